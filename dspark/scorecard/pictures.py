"""Conditional acceptance over slots: one draft model by setting and domain, or several in one plot.

The suffix decay of a parallel draft model shows in it: how much worse slot k is than slot 1 although everything before
it was right (survival would mix both).
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.ticker import MaxNLocator, PercentFormatter

from dspark.calibration.figures import WIDTH, points
from dspark.scorecard.rates import FEW, OVERALL
from dspark.scorecard.text import clip

_COLUMNS = 3  # panels in a row
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C8C8C")  # Okabe-Ito
_MARKERS = ("o", "D", "^", "s", "v", "P", "X")
_LETTERS = 12  # of the legend, on an inch


def slots_figure(report: dict[str, Any]) -> Figure:
    """One panel a setting; overall in black, a colour a domain."""
    panels = [(e["title"], e["figures"]) for e in report["settings"]]
    said = f"draft model {report['drafter']['hash'][:12]} for {report['target']['name']}, {_prompts(report)}"
    return _figure(panels, said, emphasised=OVERALL)


def decay_figure(reports: Mapping[str, dict[str, Any]], titles: Sequence[str]) -> Figure:
    """One panel for each of the settings that all reports have; a colour a draft model, all domains together."""
    first = next(iter(reports.values()))
    names = {name: f"{clip(name, 28)} ({r['drafter']['hash'][:8]})" for name, r in reports.items()}
    panels = []
    for title in titles:
        entries = {name: next(e for e in r["settings"] if e["title"] == title) for name, r in reports.items()}
        panels.append((title, {names[name]: e["figures"][OVERALL] for name, e in entries.items()}))
    return _figure(panels, f"draft models for {first['target']['name']}, {_prompts(first)}")


def write_board(writer: Any, name: str, picture: bytes, step: int) -> None:
    """PNG bytes as an image into a TensorBoard SummaryWriter."""
    writer.add_image(name, imread(io.BytesIO(picture)), step, dataformats="HWC")


def _prompts(report: dict[str, Any]) -> str:
    return f"{report['prompts']['count']} prompts"


def _figure(panels: Sequence[tuple[str, dict[str, Any]]], said: str, emphasised: str = "") -> Figure:
    """panels: title and {curve: its figures}. said: what all of it is about, above the legend."""
    columns = min(len(panels), _COLUMNS)
    rows = math.ceil(len(panels) / columns)
    width = WIDTH * max(columns, 2) / _COLUMNS
    figure = Figure(figsize=(width, 3.1 * rows + 0.8), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharey=True)
    for axes, (title, curves) in zip(grid.flat, panels, strict=False):
        _panel(axes, title, curves, emphasised)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    for line in grid:
        line[0].set_ylabel("accepted, given all before")
    bars = "bars: 95 %, conversations resampled"
    figure.supxlabel(f"slot (1 = first draft token); {bars}; hollow: of fewer than {FEW} blocks", fontsize="medium")
    handles = {h.get_label(): h for axes in grid.flat for h in axes.get_legend_handles_labels()[0]}
    fitting = max(1, int(_LETTERS * width / (max(map(len, handles)) + 6)))
    figure.legend(
        handles.values(), handles.keys(), loc="outside upper center", ncols=min(len(handles), 4, fitting),
        frameon=False, title=clip(said, int(_LETTERS * width)),
    )  # fmt: skip
    return figure


def _panel(axes: Axes, title: str, curves: dict[str, Any], emphasised: str) -> None:
    others = [name for name in curves if name != emphasised]
    for place, (name, found) in enumerate(curves.items()):
        step = min(0.08, 0.5 / len(curves))  # side by side, so that the intervals can be read
        shift = step * (place - (len(curves) - 1) / 2)
        if name == emphasised:
            style: dict[str, Any] = {"linewidth": 2.5, "zorder": 3}
            colour, marker = "black", "o"
        else:
            number = others.index(name)
            style = {"linewidth": 1.2, "linestyle": "-" if number < len(_COLOURS) else ":"}
            colour, marker = _COLOURS[number % len(_COLOURS)], _MARKERS[number % len(_MARKERS)]
        rows = [
            {"slot": k + 1, "conditional": e["value"], "interval": {"conditional": e["interval"]}, "blocks": n}
            for k, (e, n) in enumerate(zip(found["conditional"], found["tried"], strict=True))
        ]
        points(axes, [r for r in rows if r["blocks"] >= FEW], "conditional", name, colour, marker, shift, **style)
        _hollow(axes, [r for r in rows if r["blocks"] < FEW and r["conditional"] is not None], colour, marker, shift)
    longest = max(len(found["conditional"]) for found in curves.values())
    axes.set(xlim=(0.5, longest + 0.5), ylim=(-0.03, 1.03))
    axes.set_title(title, fontsize="medium")
    axes.grid(axis="y", alpha=0.3)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def _hollow(axes: Axes, rows: list[dict[str, Any]], colour: str, marker: str, shift: float) -> None:
    """Hollow marks without a line or bars: shares of so few blocks that they say little."""
    x, y = [r["slot"] + shift for r in rows], [r["conditional"] for r in rows]
    axes.plot(x, y, linestyle="", marker=marker, markersize=4.5, color=colour, markerfacecolor="none", alpha=0.4)
