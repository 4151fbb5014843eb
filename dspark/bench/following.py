"""RL runs side by side over their rollouts: how the draft model keeps up with a policy that moves, in one plot.

Reads what each run left in history.jsonl. Runs that share a policy (by its hash before every rollout) differ in nothing
but who drafted: that is said, for then the curves can be compared point by point.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from dspark.contracts import DsparkError
from dspark.rl.history import HISTORY

FIGURES = {"rollout/tau": "tokens a pass (tau)", "rollout/ece": "ECE of the survival", "rollout/reward": "reward"}
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe-Ito
LAST = 10  # rollouts whose mean stands for the end of a run


def read_history(folder: str | Path) -> list[dict[str, Any]]:
    """A run's lines, oldest first. Raises DsparkError when there is none, or it is none of ours."""
    path = Path(folder) / HISTORY
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        assert lines and all("rollout" in line for line in lines)
    except (OSError, ValueError, AssertionError) as error:
        raise DsparkError(
            f"{path}: expected the history of an RL run (trainer.default_root_dir of its recipe), but got: "
            f"{error or 'nothing'}."
        ) from error
    return lines


def same_policy(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> bool:
    """Whether all runs sampled every rollout with the same weights, by hash, as far as the shortest goes."""
    shortest = min(map(len, runs.values()))
    told = [[line["policy"] for line in lines[:shortest]] for lines in runs.values()]
    return all(one == told[0] for one in told)


def table(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """A line a run: rollouts, tau and ECE over the first and the last rollouts, reward likewise."""
    lines = [f"{'run':<20}{'rollouts':>9}{'tau':>16}{'ECE':>18}{'reward':>16}"]
    for name, history in runs.items():
        parts = [_ends(history, key) for key in FIGURES]
        tau, ece, reward = (f"{a:.{d}f} -> {b:.{d}f}" for (a, b), d in zip(parts, (2, 3, 2), strict=True))
        lines.append(f"{name[:19]:<20}{len(history):>9}{tau:>16}{ece:>18}{reward:>16}")
    return [*lines, f"means of the first and the last {LAST} rollouts"]


def figure(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    """One panel a figure; a colour a run; thin the rollouts, thick their running mean of five."""
    made = Figure(figsize=(11, 3.4), layout="constrained")
    for axes, (key, title) in zip(made.subplots(1, len(FIGURES)), FIGURES.items(), strict=True):
        for colour, (name, history) in zip(COLOURS, runs.items(), strict=False):
            points = [(line["rollout"], line[key]) for line in history if line.get(key) is not None]
            if points:
                x, y = zip(*points, strict=True)
                axes.plot(x, y, color=colour, alpha=0.3, linewidth=0.8)
                axes.plot(x, [_mean(y[max(0, i - 4) : i + 1]) for i in range(len(y))], color=colour, label=name)
        axes.set_title(title, fontsize="medium")
        axes.set_xlabel("rollout (policy updates)")
        axes.grid(alpha=0.3)
    made.axes[-1].legend(frameon=False)  # every run is rewarded; not every one drafts
    return made


def _ends(history: Sequence[Mapping[str, Any]], key: str) -> tuple[float, float]:
    values = [line[key] for line in history if line.get(key) is not None]
    return (_mean(values[:LAST]), _mean(values[-LAST:])) if values else (math.nan, math.nan)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
