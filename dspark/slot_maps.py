"""What a confidence means: per slot a monotone map from the head's logit z to a probability of acceptance.

    sigmoid(z / temperature + shift)      shift 0: temperature scaling; else Platt's
    straight lines between knots (z, p)   isotonic regression; constant outside them
The runner maps scalar by scalar: a tensor's vector loop and its tail may differ in the last bit, and then a value would
depend on the request's place in the batch. ``rates`` is for everything that is judged in bulk.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dspark.contracts import DsparkError

CALIBRATION_FORMAT = "dspark-calibration/2"  # of a sealed file that holds maps and whose they are
_HINT = "Calibrate this draft model again."
_LARGEST = sys.float_info.max
_MOST = 1e30  # temperatures beyond it turn logits into infinities


@dataclass(frozen=True, slots=True)
class SlotMap:
    """One slot's map. knots: (logit, probability) pairs, at least one if any, logits strictly ascending, probabilities
    never descending; with knots the other two are not read. The default is no calibration.

    Raises DsparkError on values that give no monotone map into [0, 1].
    """

    temperature: float = 1.0
    shift: float = 0.0
    knots: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        plausible = is_number(self.temperature) and 1 / _MOST <= self.temperature <= _MOST
        _expect(plausible, f"temperatures from {1 / _MOST:g} to {_MOST:g}", self.temperature)
        _expect(is_number(self.shift), "finite shifts", self.shift)
        _expect(all(len(k) == 2 and all(map(is_number, k)) for k in self.knots), "pairs of numbers", self.knots)
        object.__setattr__(self, "knots", tuple((float(z), float(p)) for z, p in self.knots))
        steps = list(zip(self.knots, self.knots[1:], strict=False))
        ascending = all(a[0] < b[0] and a[1] <= b[1] for a, b in steps)
        _expect(ascending, "ascending knots", self.knots)
        _expect(all(0.0 <= p <= 1.0 for _, p in self.knots), "knots with probabilities in [0, 1]", self.knots)

    def rate(self, logit: float) -> float:
        """Probability at one logit, in the float arithmetic of one scalar."""
        if not self.knots:
            z = logit / self.temperature + self.shift
            return 1.0 / (1.0 + math.exp(-z)) if z >= 0.0 else math.exp(z) / (1.0 + math.exp(z))
        right = bisect_right(self.knots, (logit, math.inf))
        if right in (0, len(self.knots)):
            return self.knots[min(right, len(self.knots) - 1)][1]
        (z0, p0), (z1, p1) = self.knots[right - 1], self.knots[right]
        return p0 + (p1 - p0) * ((logit - z0) / (z1 - z0))

    def told(self) -> str:
        """For people, at most 34 characters."""
        if self.knots:
            return f"{len(self.knots)} knots"
        shift = f", shift {self.shift:+.3f}" if self.shift else ""
        return f"temperature {self.temperature:.3f}{shift}"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values: what from_dict reads."""
        return {"temperature": self.temperature, "shift": self.shift, "knots": [list(k) for k in self.knots]}

    @classmethod
    def from_dict(cls, values: Any) -> SlotMap:
        """Raises DsparkError on anything that to_dict does not write."""
        keys = {"temperature", "shift", "knots"}
        _expect(isinstance(values, dict) and values.keys() == keys, f"maps with the keys {sorted(keys)}", values)
        knots = values["knots"]
        _expect(isinstance(knots, list) and all(isinstance(k, list) for k in knots), "lists of knots", knots)
        return cls(values["temperature"], values["shift"], tuple(tuple(k) for k in knots))


def read_maps(values: Any) -> tuple[SlotMap, ...]:
    """The maps of K slots from plain JSON values. Raises DsparkError as SlotMap does."""
    _expect(isinstance(values, list), "a list of maps, one per slot", values)
    return tuple(map(SlotMap.from_dict, values))


def identity(slots: int) -> tuple[SlotMap, ...]:
    """No calibration for K slots."""
    return (SlotMap(),) * slots


def of_temperatures(temperatures: Sequence[float]) -> tuple[SlotMap, ...]:
    """A temperature per slot."""
    return tuple(SlotMap(t) for t in temperatures)


def rates(logits: Tensor, maps: Sequence[SlotMap]) -> Tensor:
    """Logits [..., K] -> conditional acceptance probabilities [..., K], in the logits' dtype (at least fp32).

    They are conditional on every earlier slot's acceptance: threshold their cumulative product, never these.
    Raises DsparkError when there is not one map per slot.
    """
    slots = logits.shape[-1]
    _expect(slots == len(maps), f"{slots} maps, one per slot", len(maps))
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))

    def table(values: Any) -> Tensor:
        return torch.tensor(values, dtype=logits.dtype, device=logits.device)

    found = torch.sigmoid(logits / table([m.temperature for m in maps]) + table([m.shift for m in maps]))
    for slot, chosen in enumerate(maps):
        if chosen.knots:
            found[..., slot] = _between(logits[..., slot], table(chosen.knots))
    return found


def _between(logits: Tensor, knots: Tensor) -> Tensor:
    """Straight lines between knots [n,2], constant outside."""
    z, p = knots.unbind(1)
    right = torch.searchsorted(z.contiguous(), logits.contiguous(), right=True).clamp(1, max(len(z) - 1, 1))
    if len(z) == 1:
        return p.expand_as(logits)
    z0, z1, p0, p1 = z[right - 1], z[right], p[right - 1], p[right]
    return p0 + (p1 - p0) * ((logits - z0) / (z1 - z0)).clamp(0, 1)


def is_number(value: Any) -> bool:
    """A number that a float can hold: no bool, no NaN, no infinity."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) <= _LARGEST  # also of a whole number that no float can hold


def _expect(ok: bool, wanted: str, got: Any) -> None:
    if not ok:
        raise DsparkError(f"calibration: expected {wanted}, but got {got!r}. {_HINT}")
