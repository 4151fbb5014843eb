"""The report's pictures: matplotlib Figures (Agg, no pyplot state) and their PNG bytes.

Left out on purpose: any arithmetic beyond a bin's mean and its error bar; the numbers come from scores.py. The same
report gives the same bytes under the same matplotlib.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, PercentFormatter

from dspark.calibration.events import ALL
from dspark.calibration.scores import ESTIMATORS

WIDTH = 11.0  # inches; at DPI the reader's column is filled at twice its pixels
DPI = 144
_COLUMNS = 5  # reliability panels in a row
_COLOURS = {  # Okabe-Ito: told apart by readers who see few colours
    "head": "#D55E00",
    "head_calibrated": "#0072B2",
    "draft_max_probability": "#009E73",
    "draft_max_probability_calibrated": "#CC79A7",
    "position_prior": "#8C8C8C",
}
_DRAWN = tuple(_COLOURS)  # the other methods of calibration stand in the tables
_MARKERS = dict(zip(_DRAWN, "oD^vs", strict=True))
_QUANTITY = {"cumulative": "survival of the prefix", "conditional": "acceptance, given all before"}


def png(figure: Figure) -> bytes:
    """The figure as PNG bytes; nothing but the picture is in them."""
    buffer = io.BytesIO()
    FigureCanvasAgg(figure)
    figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
    return buffer.getvalue()


def overview(rows: Sequence[dict[str, Any]], num_slots: int) -> Figure:
    """Four panels over slots, for the survival: predicted and observed, then ECE, NLL and AUROC of every estimator."""
    chosen = [r for r in rows if r["law"] == "cumulative" and r["domain"] == ALL and isinstance(r["slot"], int)]
    figure = Figure(figsize=(WIDTH, 7.0), layout="constrained")
    panels = figure.subplots(2, 2)
    first, ece, nll, auroc = panels.flat
    _survival_panel(first, chosen)
    _estimator_panel(ece, chosen, "ece", "ECE (calibration alone; lower is better)")
    ece.set_ylim(bottom=0)
    ece.yaxis.set_major_formatter(lambda share, _: f"{100 * share:g}%")
    _estimator_panel(nll, chosen, "nll", "NLL in nats (calibration and ranking; lower is better)")
    _estimator_panel(auroc, chosen, "auroc", "AUROC (ranking alone; higher is better)")
    for axes in panels.flat:
        axes.set_xlim(0.5, num_slots + 0.5)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    for axes in panels[1]:
        axes.set_xlabel("slot (1 = first draft token)")
    handles = {h.get_label(): h for axes in (first, ece) for h in axes.get_legend_handles_labels()[0]}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles), frameon=False)
    return figure


def reliability_diagram(bins: dict[str, Any], law: str) -> Figure:
    """Per slot, observed frequency against predicted probability, before and after, over how many rounds lie where.

    bins: head estimator -> [3][K][bins] (events, sum of predictions, sum of labels). Bars: 95 % binomial error.
    """
    sums = {name: np.asarray(bins[name]) for name in ("head", "head_calibrated")}
    num_slots = sums["head"].shape[1]
    columns, bands = min(num_slots, _COLUMNS), math.ceil(num_slots / _COLUMNS)
    panel = min(WIDTH / columns, 4.5)
    figure = Figure(figsize=(panel * columns, (panel * 1.25 + 0.1) * bands + 0.9), layout="constrained")
    grid = figure.subplots(2 * bands, columns, squeeze=False, height_ratios=[3, 1] * bands, sharex="col")
    for slot in range(columns * bands):
        upper, lower = grid[2 * (slot // columns), slot % columns], grid[2 * (slot // columns) + 1, slot % columns]
        if slot < num_slots:
            _reliability_panel(upper, lower, slot, {name: s[:, slot] for name, s in sums.items()})
        else:
            upper.set_axis_off()
            lower.set_axis_off()
    for band in range(bands):
        grid[2 * band, 0].set_ylabel("observed")
        grid[2 * band + 1, 0].set_ylabel("share of\nrounds")
    figure.supxlabel(f"predicted {_QUANTITY[law]}", fontsize="medium")
    keys = [Line2D([], [], color="#999999", linestyle="--", label="perfect")]
    keys += [Line2D([], [], color=_COLOURS[n], marker=_MARKERS[n], markersize=5, label=ESTIMATORS[n]) for n in sums]
    figure.legend(handles=keys, loc="outside upper center", ncols=3, frameon=False)
    return figure


def sweep(data: dict[str, Any]) -> Figure:
    """Tokens and verified drafts per round, and the share of verified drafts that is accepted, over the threshold."""
    rows = data["thresholds"]
    at = [r["threshold"] for r in rows]
    figure = Figure(figsize=(WIDTH, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(
        at, [r["tokens"] for r in rows], color="#0072B2", marker="D", markersize=4, label="tokens, with the target's"
    )
    left.plot(at, [r["verified"] for r in rows], color="#D55E00", marker="o", markersize=4, label="drafts verified")
    left.set_ylabel("per round")
    left.set_ylim(bottom=0)
    left.legend(frameon=False)
    known = [r for r in rows if r["acceptance"] is not None]
    right.plot(
        [r["threshold"] for r in known], [r["acceptance"] for r in known], color="#009E73", marker="^", markersize=4
    )
    right.set_ylabel("verified drafts accepted")
    right.set_ylim(0, 1)
    right.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    for axes in (left, right):
        axes.set_xlabel("threshold on the calibrated survival")
        axes.grid(alpha=0.3)
    return figure


def _survival_panel(axes: Axes, rows: list[dict[str, Any]]) -> None:
    calibrated = [r for r in rows if r["estimator"] == "head_calibrated"]
    points(axes, calibrated, "mean_observed", "observed", "black", "o", linewidth=3, alpha=0.45)
    for name in ("head", "head_calibrated"):
        # Without intervals: how the predictions spread is no error bar.
        mine = [{**r, "interval": {}} for r in rows if r["estimator"] == name]
        points(axes, mine, "mean_predicted", ESTIMATORS[name], _COLOURS[name], _MARKERS[name])
    axes.set_title("Survival, predicted and observed", fontsize="medium")
    axes.set_ylim(0, 1)


def _estimator_panel(axes: Axes, rows: list[dict[str, Any]], metric: str, title: str) -> None:
    present = [name for name in _DRAWN if any(r["estimator"] == name for r in rows)]
    for i, name in enumerate(present):
        mine = [r for r in rows if r["estimator"] == name]
        shift = 0.09 * (i - (len(present) - 1) / 2)  # side by side, so that the intervals can be read
        points(axes, mine, metric, ESTIMATORS[name], _COLOURS[name], _MARKERS[name], shift)
    axes.set_title(title, fontsize="medium")
    axes.grid(axis="y", alpha=0.3)


def points(
    axes: Axes,
    rows: list[dict[str, Any]],
    metric: str,
    label: str,
    colour: str,
    marker: str,
    shift: float = 0.0,
    **line: Any,
) -> None:
    """A curve over slots with its error bars. rows: {"slot", metric: value or None, "interval": {metric: (low, high)}};
    shift: of the slots, so that several curves' bars stand side by side."""
    known = [r for r in rows if r[metric] is not None]
    x = [r["slot"] + shift for r in known]
    axes.plot(x, [r[metric] for r in known], color=colour, marker=marker, markersize=4.5, label=label, **line)
    spans = [(at, r["interval"].get(metric)) for at, r in zip(x, known, strict=True)]
    for at, span in spans:
        if span is not None:
            axes.plot([at, at], span, color=colour, linewidth=1.2, alpha=0.8)


def _reliability_panel(upper: Axes, lower: Axes, slot: int, sums: dict[str, np.ndarray]) -> None:
    upper.plot([0, 1], [0, 1], color="#999999", linewidth=1, linestyle="--")
    for name, (count, predicted, observed) in sums.items():
        full = count > 0
        n, p, y = count[full], predicted[full] / count[full], observed[full] / count[full]
        share, colour = count / max(count.sum(), 1), _COLOURS[name]
        upper.plot(p, y, color=colour, linewidth=1, alpha=0.5)
        upper.scatter(p, y, 8 + 160 * share[full], color=colour, marker=_MARKERS[name], lw=0, zorder=3, clip_on=False)
        upper.vlines(p, *_wilson(y, n), color=colour, linewidth=1, alpha=0.45)
        lower.stairs(share, np.linspace(0, 1, len(count) + 1), color=colour, linewidth=1.3)
    total = int(sums["head"][0].sum())
    upper.set_title(f"slot {slot + 1}  (n = {total:,})" if total else f"slot {slot + 1}: no data", fontsize="medium")
    upper.set(xlim=(-0.03, 1.03), ylim=(-0.03, 1.03), aspect="equal")
    upper.set_yticks([0, 0.5, 1], ["0", "0.5", "1"])
    lower.set_ylim(bottom=0)
    lower.yaxis.set_major_locator(MaxNLocator(2))
    lower.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    lower.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
    lower.tick_params(labelbottom=True)


def _wilson(rate: np.ndarray, n: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """95 % interval of a binomial rate (Wilson 1927): sensible at 0, 1 and small n."""
    z2 = 1.96**2
    centre = (rate + z2 / (2 * n)) / (1 + z2 / n)
    half = np.sqrt(z2 * rate * (1 - rate) / n + (z2 / (2 * n)) ** 2) / (1 + z2 / n)
    return np.minimum(rate, centre - half), np.maximum(rate, centre + half)
