"""The report of `dspark simulate`: policies over numbers of users, pictures, a table. trying.py puts the real runner
beside them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from dspark.bench.simulation import NONE, Job, Outcome, Pools, Way, simulate
from dspark.runner.curve import CapacityCurve

_COLOURS = ("#8C8C8C", "#56B4E9", "#D55E00", "#E69F00", "#009E73", "#CC79A7", "#0072B2")  # Okabe-Ito
_MARKERS = "osD^vPX"


def ways(slots: int, threshold: float) -> list[Way]:
    """No speculation, one draft, the whole block, and every policy that reads confidences."""
    scheduled = [Way(policy, slots) for policy in ("early_stop", "lagged_global", "global")]
    fixed = [Way("fixed", length) for length in sorted({1, slots})]
    return [Way(NONE), *fixed, Way("threshold", slots, threshold), *scheduled]


def predict(
    pools: Pools, curve: CapacityCurve, chosen: Sequence[Way], jobs: Sequence[Job], users: Sequence[int], each: int,
    key: int,
) -> dict[str, Any]:  # fmt: skip
    """JSON-ready: the curve, and a row per way and number of users."""
    rows = [
        {"way": way.title, "users": many, **_row(simulate(pools, curve, way, _jobs(jobs, many * each), many, key))}
        for way in chosen
        for many in sorted(set(users))
    ]
    return {"format": "dspark-simulation/1", "curve": curve.to_dict(), "ways": [w.title for w in chosen], "rows": rows}


def _jobs(jobs: Sequence[Job], count: int) -> list[Job]:
    """The first so many, over and over."""
    return [jobs[i % len(jobs)] for i in range(count)]


def _row(outcome: Outcome) -> dict[str, Any]:
    rounds = max(outcome.rounds, 1)
    return {
        "tokens_per_second": outcome.rate, "tokens_per_second_per_user": outcome.user_rate,
        "verified_per_round": outcome.verified / rounds, "accepted_per_round": outcome.accepted / rounds,
    }  # fmt: skip


def as_lines(report: dict[str, Any]) -> list[str]:
    """At most 80 columns: tokens/s by way and number of users, drafts verified, then simulated against measured."""
    lines = _table(report, "simulated tokens/s by requests at once", "tokens_per_second", ".0f")
    lines += _table(report, "drafts verified per round and request", "verified_per_round", ".2f")
    if not report.get("tried"):
        return lines[:-1]
    both = f"{'simulated':>11}"
    ratios = sorted(row["ratio"] for row in report["tried"])
    return [
        *lines,
        f"{'the real runner':<16}{'users':>6}{'tokens/s':>10}{both}{'ratio':>7}{'per user':>11}{both}",
        *(_tried(row) for row in report["tried"]),
        f"simulated over measured: {ratios[0]:.2f} / {statistics.median(ratios):.2f} / {ratios[-1]:.2f} "
        "(least, median, most)",
    ]


def _tried(row: dict[str, Any]) -> str:
    return (
        f"{row['way']:<16}{row['users']:>6}{row['measured']:>10.1f}{row['simulated']:>11.1f}{row['ratio']:>7.2f}"
        f"{row['measured_per_user']:>11.1f}{row['simulated_per_user']:>11.1f}"
    )


def _table(report: dict[str, Any], title: str, key: str, form: str) -> list[str]:
    """A line per way, eight numbers of users at a time."""
    users = sorted({row["users"] for row in report["rows"]})
    value = {(row["way"], row["users"]): row[key] for row in report["rows"]}
    lines = []
    for some in (users[i : i + 8] for i in range(0, len(users), 8)):
        lines += [title, f"{'':<16}" + "".join(f"{n:>8}" for n in some)]
        lines += [f"{way:<16}" + "".join(f"{value[way, n]:>8{form}}" for n in some) for way in report["ways"]]
        lines.append("")
    return lines


def pictures(report: dict[str, Any]) -> dict[str, Figure]:
    """throughput: tokens/s of all against tokens/s of one. lengths: drafts verified and accepted against users."""
    return {"throughput": _throughput(report), "lengths": _lengths(report)}


def _throughput(report: dict[str, Any]) -> Figure:
    figure = Figure(figsize=(8.0, 5.5), layout="constrained")
    axes = figure.subplots()
    for i, way in enumerate(report["ways"]):
        rows = [r for r in report["rows"] if r["way"] == way]
        x, y = ([r[key] for r in rows] for key in ("tokens_per_second_per_user", "tokens_per_second"))
        label = "no speculation" if way == NONE else way
        axes.plot(x, y, color=_COLOURS[i % 7], marker=_MARKERS[i % 7], markersize=5, label=label)
        if i == 0:
            for row, a, b in zip(rows, x, y, strict=True):
                axes.annotate(f"{row['users']}", (a, b), xytext=(5, 5), textcoords="offset points", color="#555555")
    for row in report.get("tried", ()):
        i = report["ways"].index(row["way"])
        axes.plot(row["measured_per_user"], row["measured"], color=_COLOURS[i % 7], marker="x", markersize=8,
                  linestyle="", markeredgewidth=2)  # fmt: skip
    crosses = "; crosses: the real runner" if report.get("tried") else ""
    axes.set(xlabel="tokens/s of one user", ylabel="tokens/s of all users",
             title=f"Throughput against speed per user, at 1, 2, 4, ... users{crosses}")  # fmt: skip
    axes.grid(color="#DDDDDD")
    axes.legend(frameon=False)
    return figure


def _lengths(report: dict[str, Any]) -> Figure:
    figure = Figure(figsize=(8.0, 5.5), layout="constrained")
    axes = figure.subplots()
    for i, way in enumerate(report["ways"]):
        rows = [r for r in report["rows"] if r["way"] == way]
        if way == NONE:
            continue
        users = [r["users"] for r in rows]
        axes.plot(users, [r["verified_per_round"] for r in rows], color=_COLOURS[i % 7], marker=_MARKERS[i % 7],
                  markersize=5, label=way)  # fmt: skip
        axes.plot(users, [r["accepted_per_round"] for r in rows], color=_COLOURS[i % 7], linestyle=":")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set(xlabel="users (requests at once)", ylabel="drafts per round and request",
             title="Verified (solid) and accepted (dotted) drafts")  # fmt: skip
    axes.grid(color="#DDDDDD")
    axes.legend(frameon=False)
    return figure
