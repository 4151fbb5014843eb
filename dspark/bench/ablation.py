"""What an ablation is: variants of one recipe, trained for equal time, tested on the same prompts. Pure parts.

Equal time, not equal steps: a part that makes a step dearer has to earn it. A variant's number of steps follows from
the median of its own step time, measured first, so the runs themselves may be disturbed without being unfair. With
equal steps nothing is measured first: the step time is that of the training run itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from dspark.contracts import DsparkError
from dspark.recipe import read_recipe
from dspark.scorecard.text import clip, span

TIMED_STEPS = 12


@dataclass(frozen=True, slots=True)
class AblationConfig:
    """recipe: what is varied. variants: name -> overrides ({dotted key: value}); the first is the base of all ratios.
    common: overrides of every variant. seconds: training time of each, validation and start left out; steps: the same
    number of steps for all instead (one of the two). out: a folder per variant, the table and the picture."""

    recipe: str
    variants: dict[str, dict[str, Any]]
    common: dict[str, Any] = field(default_factory=dict)
    seconds: int = 0
    steps: int = 0
    out: str = "runs/ablation"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "ablation") -> AblationConfig:
        """Raises DsparkError naming what is unknown, missing or of no meaning."""
        known = [f.name for f in fields(cls)]
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise DsparkError(f"{where}: expected known keys, but got {unknown[0]!r}. Known: {', '.join(known)}.")
        for name in ("recipe", "variants"):
            if not values.get(name):
                raise DsparkError(f"{where}: expected {name}, but it is absent.")
        config = cls(**values)
        config._check(where)
        return config

    def _check(self, where: str) -> None:
        if (self.seconds > 0) == (self.steps > 0):
            raise DsparkError(
                f"{where}: expected either seconds or steps > 0, but got seconds {self.seconds}, steps {self.steps}."
            )
        if not isinstance(self.variants, dict) or not isinstance(self.common, dict):
            raise DsparkError(f"{where}: expected variants and common as mappings, but got something else.")
        for name, overrides in self.variants.items():
            if not isinstance(overrides or {}, dict):
                raise DsparkError(f"{where}: expected variant {name!r} to map keys to values, but got {overrides!r}.")
        folders = [folder_of(name) for name in self.variants]
        if len(set(folders)) < len(folders):
            raise DsparkError(f"{where}: expected names that differ in letters or digits, but got {folders}.")

    def given(self, name: str) -> dict[str, Any]:
        """What the variant changes in the recipe, by dotted key; its own value before the common one."""
        return {**self.common, **(self.variants[name] or {})}

    def overrides(self, name: str) -> list[str]:
        """The variant as arguments of `dspark fit`."""
        return [f"--{key}={_yaml(value)}" for key, value in self.given(name).items()]


def folder_of(name: str) -> str:
    """A variant's folder name."""
    return re.sub(r"[^a-z0-9]+", "-", str(name).lower()).strip("-")


def steps_for(seconds: float, step_seconds: float) -> int:
    """Steps that fit into the time, at least one."""
    return max(1, round(seconds / step_seconds))


def read_ablation(path: str) -> AblationConfig:
    return AblationConfig.from_dict(read_recipe(path), path)


def ablation_table(rows: list[dict[str, Any]]) -> str:
    """A row a variant at 80 columns. rows: name, steps, step_seconds (or None), draft_ms (by batch size), tau and
    ratio by setting (value, interval)."""
    titles = list(rows[0]["tau"])
    lines = [f"{'':<22}{'steps':>6}{'s/step':>8}" + "".join(f"{'ms b' + str(b):>8}" for b in rows[0]["draft_ms"])]
    lines += [
        f"{clip(row['name'], 21):<22}{row['steps']:>6}{_seconds(row['step_seconds']):>8}"
        + "".join(f"{ms:>8.1f}" for ms in row["draft_ms"].values())
        for row in rows
    ]
    for title in titles:
        lines += ["", f"{title:<42}{'tau':<19}{'ratio'}"]
        for row in rows:
            ratio = "1" if row["ratio"][title] is None else span(row["ratio"][title])
            lines.append(f"  {clip(row['name'], 38):<40}{span(row['tau'][title]):<19}{ratio}".rstrip())
    return "\n".join(lines)


def _seconds(value: float | None) -> str:
    """A step's time in seconds, with as many digits as a quick step needs."""
    return "-" if value is None else f"{value:.2f}" if value >= 0.1 else f"{value:.4f}"


def _yaml(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return str(value)
