"""The capacity curve: how long a round takes by the rows in it, measured on one machine with one pair of models.

SPS(B) = 1 / seconds(B). Sizes are those that were really run; between them straight lines, or where a runner pads a
batch up to the next size, steps. Seconds are forced monotone: a larger batch that seemed faster was noise.
Drafting costs by the number of requests, not by how much of a block is verified (a block is drafted at once), so it is
a table of its own; so are rows of prompts, which need no logits, sampling or verification. `dspark profile` measures
all three.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark.contracts import DsparkError
from dspark.files import atomic_write, canonical_json, read_json

FORMAT = "dspark-capacity-curve/1"
_FLAT = 1.02  # largest / smallest: noise, not a curve
_AGAIN = "Measure it again: dspark profile."
_TABLES = (("rows", "seconds"), ("requests", "draft_seconds"), ("prompt_rows", "prompt_seconds"))


@dataclass(frozen=True, slots=True)
class CapacityCurve:
    """rows, seconds: a target pass with so many rows (its logits, sampling and verification included). requests,
    draft_seconds: a block drafted for each of so many requests; empty: drafting costs nothing. prompt_rows,
    prompt_seconds: a pass of so many rows of a prompt and nothing else; empty: they cost what any row does. padded: a
    batch runs at the next of ``rows``. facts: what it was measured on. Raises DsparkError on values that cannot be.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    requests: tuple[int, ...] = ()
    draft_seconds: tuple[float, ...] = ()
    prompt_rows: tuple[int, ...] = ()
    prompt_seconds: tuple[float, ...] = ()
    padded: bool = False
    facts: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for sizes, times in _TABLES:
            x, y = getattr(self, sizes), getattr(self, times)
            both = isinstance(x, (list, tuple)) and isinstance(y, (list, tuple)) and len(x) == len(y)
            _expect(both, sizes, f"a list as long as {times}", x)
            _expect(all(_is_size(n) for n in x), sizes, "sizes from 1 to 2**31", x)
            _expect(all(a < b for a, b in pairwise(x)), sizes, "ascending sizes", x)
            _expect(all(_is_time(s) for s in y), times, "seconds from 1e-9 to 1e6", y)
            object.__setattr__(self, sizes, tuple(x))
            object.__setattr__(self, times, tuple(np.maximum.accumulate(y).tolist() if len(y) else ()))
        _expect(len(self.rows) > 0, "rows", "at least one size", self.rows)
        _expect(isinstance(self.padded, bool), "padded", "true or false", self.padded)
        _expect(_is_json(self.facts), "facts", "an object of plain JSON values", "something else")

    @property
    def flat(self) -> bool:
        """Nothing to choose by: one size alone, or more rows cost what few do."""
        return self.seconds[-1] <= _FLAT * self.seconds[0]

    def passes(self, most: int) -> NDArray[np.float64]:
        """Seconds of a pass with 0 ... most rows, [most + 1]. Past the last size the last slope goes on."""
        wanted = np.arange(most + 1, dtype=np.float64)
        if not self.padded:
            return _line(self.rows, self.seconds, wanted)
        at = np.searchsorted(self.rows, wanted)
        inside = np.asarray(self.seconds)[np.minimum(at, len(self.rows) - 1)]
        return np.where(at < len(self.rows), inside, _line(self.rows, self.seconds, wanted))

    def mixed(self, rows: int, prompt_rows: int) -> float:
        """Seconds of a pass with so many rows that are decoded or verified, and so many of prompts beside them: what a
        pass of the latter takes beyond the smallest pass there is, comes on top."""
        if not self.prompt_rows:
            return float(self.passes(rows + prompt_rows)[-1])
        least = self.seconds[0]
        alone = _line((0, *self.prompt_rows), (least, *self.prompt_seconds), np.array([float(prompt_rows)]))
        return float(self.passes(rows)[-1] + max(0.0, alone[0] - least))

    def drafting(self, requests: int) -> float:
        """Seconds to draft for so many requests."""
        if not requests or not self.requests:
            return 0.0
        return float(_line(self.requests, self.draft_seconds, np.array([float(requests)]))[0])

    def rounds(self, requests: int, drafts: int, other_rows: int = 0) -> NDArray[np.float64]:
        """Seconds of a round of so many requests that verifies 0 ... drafts drafts, [drafts + 1]. other_rows: of
        prompts in the same pass."""
        least = requests + other_rows
        return self.passes(least + drafts)[least:] + self.drafting(requests)

    def break_even(self, requests: int, width: int) -> float:
        """Accepted drafts per round and request from which verifying ``width`` drafts each is as fast as no speculation
        at all."""
        plain = float(self.passes(requests)[requests])
        return float(self.rounds(requests, requests * width)[-1]) / plain - 1.0

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, the format's name included."""
        plain = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}
        return {"format": FORMAT, **plain}

    @classmethod
    def from_dict(cls, values: Any) -> CapacityCurve:
        """The record that to_dict wrote. Raises DsparkError on anything else."""
        found = values.get("format") if isinstance(values, dict) else type(values).__name__
        _expect(found == FORMAT, "format", repr(FORMAT), found)
        keys, given = {f.name for f in fields(cls)}, set(values) - {"format"}
        needed = keys - set(_TABLES[-1])  # older files have no table of prompt rows
        _expect(needed <= given <= keys, "the keys", str(sorted(keys)), sorted(given))
        return cls(**{key: values[key] for key in given})

    def save(self, path: str | Path) -> None:
        """As JSON, whole or not at all. Raises DsparkError when the place cannot be written."""
        atomic_write(path, json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> CapacityCurve:
        """Raises DsparkError when it is absent, broken or no capacity curve."""
        return cls.from_dict(read_json(path, "capacity curve"))


def _line(sizes: Sequence[int], times: Sequence[float], wanted: NDArray[np.float64]) -> NDArray[np.float64]:
    """Straight lines between sizes, constant before the first, the last slope behind the last."""
    found = np.interp(wanted, sizes, times)
    if len(sizes) > 1:
        slope = (times[-1] - times[-2]) / (sizes[-1] - sizes[-2])
        found += np.maximum(wanted - sizes[-1], 0.0) * slope
    return found


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 2**31


def _is_time(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 1e-9 <= value <= 1e6


def _is_json(value: Any) -> bool:
    """Whether it can be written again: no NaN, no lone surrogate, no nesting without end."""
    try:
        return isinstance(value, dict) and bool(canonical_json(value).encode())
    except (ValueError, TypeError, RecursionError):
        return False


def _expect(ok: bool, name: str, wanted: str, got: Any) -> None:
    if not ok:
        raise DsparkError(f"capacity curve: expected {name} to be {wanted}, but got {got!r}. {_AGAIN}")
