"""Sequential temperature scaling: one temperature per slot, so that survival means what it says.

Left to right over slots: T_k minimises the ECE of the cumulative product a_k = prod_{i<=k} sigmoid(z_i / T_i), the
earlier slots held fixed (DSpark paper, DESIGN §4). A temperature above 0 keeps the order of a slot's confidences.

ECE is a staircase in T and noisy on few events, so its bare minimum overfits. Temperatures whose ECE lies within one
standard deviation of the minimum (the deviation a perfect calibration would show) count as tied; among them the
likelihood of the slot's own decisions is taken, with a unit normal prior on log T, and near-equal ones resolve to the
one nearest 1. The search is a log grid, then golden section around its choice: deterministic.
Left out on purpose: a bias. A temperature cannot move a mean that is off at logit 0 (Platt and isotonic can).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dspark import probability
from dspark.calibration.events import Events
from dspark.calibration.measures import DEFAULT_BINS, bin_index, ece, ece_noise, nll
from dspark.contracts import DsparkError
from dspark.files import atomic_write, read_json

FORMAT = "dspark-calibration/1"
_LIMIT = 10.0  # temperatures lie in [1 / 10, 10]
_GRID = torch.linspace(-math.log(_LIMIT), math.log(_LIMIT), 93, dtype=torch.float64).exp().tolist()  # 5 % apart
_PRIOR = 1.0  # standard deviation of log T
_SLACK = 0.125  # nats, in total: likelihoods this close (half a standard error of log T) are equal


@dataclass(frozen=True, slots=True)
class Calibration:
    """Temperatures per slot, and what they were fitted on.

    temperatures: K numbers > 0. drafter_hash: the draft model they belong to. data_hash: Events.data_hash() of the
    fit split. num_events: its rounds; slot_events: how many of them decided on each slot (0: no data, temperature 1).
    ece_before, ece_after: ECE of the survival per slot on the fit split at T = 1 and at the fitted temperatures, None
    without data. Raises DsparkError on values that cannot be.
    """

    temperatures: tuple[float, ...]
    drafter_hash: str
    data_hash: str
    num_events: int
    ece_before: tuple[float | None, ...]
    ece_after: tuple[float | None, ...]
    slot_events: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("temperatures", "ece_before", "ece_after", "slot_events"):
            value = getattr(self, name)
            _expect(isinstance(value, (list, tuple)), name, "a list with one entry per slot", value)
            object.__setattr__(self, name, tuple(value))
        check_temperatures(self.temperatures)
        for name in ("ece_before", "ece_after"):
            value = getattr(self, name)
            _expect(len(value) == self.num_slots, name, f"{self.num_slots} entries, one per slot", len(value))
            _expect(all(v is None or _is_number(v) for v in value), name, "finite numbers or null", value)
        for name in ("drafter_hash", "data_hash"):
            _expect(isinstance(getattr(self, name), str), name, "a string", getattr(self, name))
        _expect(_is_count(self.num_events), "num_events", "a whole number >= 0", self.num_events)
        counts_fit = len(self.slot_events) in (0, self.num_slots) and all(map(_is_count, self.slot_events))
        _expect(counts_fit, "slot_events", f"{self.num_slots} whole numbers >= 0, or none", self.slot_events)

    @property
    def num_slots(self) -> int:
        return len(self.temperatures)

    def check(self, drafter_hash: str | None = None, num_slots: int | None = None) -> Calibration:
        """Itself, if it belongs to this draft model and number of slots; else raises DsparkError."""
        _expect(drafter_hash in (None, self.drafter_hash), "drafter_hash", repr(drafter_hash), self.drafter_hash)
        _expect(num_slots in (None, self.num_slots), "temperatures", f"{num_slots} slots", self.num_slots)
        return self

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, the format's name included."""
        return {"format": FORMAT, **{k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}}

    @classmethod
    def from_dict(cls, values: Any) -> Calibration:
        """The record that to_dict wrote. Raises DsparkError on another format, a missing or an unknown key."""
        _expect(isinstance(values, dict), "the record", "a JSON object", type(values).__name__)
        _expect(values.get("format") == FORMAT, "format", repr(FORMAT), values.get("format"))
        keys, given = {f.name for f in fields(cls)}, set(values) - {"format"}
        _expect(given == keys, "the keys", f"{sorted(keys)}", sorted(given))
        return cls(**{key: values[key] for key in keys})

    def save(self, path: str | Path) -> None:
        """Writes the record as JSON, whole or not at all. Raises DsparkError when the place cannot be written."""
        atomic_write(path, json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: str | Path, drafter_hash: str | None = None, num_slots: int | None = None) -> Calibration:
        """Reads a record and checks it against the draft model in use. Raises DsparkError when stale or broken."""
        return cls.from_dict(read_json(path, "calibration")).check(drafter_hash, num_slots)


class _Score(NamedTuple):
    ece: float
    penalised_nll: float  # of the slot's own decisions, summed, in nats, with the prior's penalty
    noise: float  # standard deviation of the ECE under a perfect calibration


def fit(events: Events, drafter_hash: str, data_hash: str | None = None, num_bins: int = DEFAULT_BINS) -> Calibration:
    """Temperatures for the head whose events these are (the calibration split; report on another one).

    Never worse on the fit split than no calibration: slot by slot given the earlier ones, and in the mean ECE over
    slots. A slot that no round reached keeps temperature 1. data_hash defaults to events.data_hash().
    """
    identity = (1.0,) * events.num_slots
    before = survival_ece(events, identity, num_bins)
    slot_events = tuple(events.conditional_observed.sum(0).tolist())
    temperatures: list[float] = []
    for slot in range(events.num_slots):
        found = _fit_slot(events, slot, temperatures, before[slot], num_bins) if slot_events[slot] else 1.0
        temperatures.append(found)
    after = survival_ece(events, temperatures, num_bins)
    if _total(after) > _total(before):  # an early slot's gain can cost later ones more
        temperatures, after = list(identity), before
    data_hash = events.data_hash() if data_hash is None else data_hash
    return Calibration(tuple(temperatures), drafter_hash, data_hash, events.num_events, before, after, slot_events)


def apply(logits: Tensor, temperatures: Sequence[float]) -> Tensor:
    """Conditional acceptance probabilities sigmoid(z_k / T_k): logits [..., K] to the same shape, fp32.

    They are conditional on every earlier slot's acceptance: threshold `survival`, never these.
    """
    check_temperatures(temperatures)
    slots = logits.shape[-1]
    _expect(slots == len(temperatures), "temperatures", f"{slots} values, one per slot", len(temperatures))
    return torch.sigmoid(logits.float() / torch.tensor(temperatures, dtype=torch.float32, device=logits.device))


def survival(logits: Tensor, temperatures: Sequence[float]) -> Tensor:
    """Probability that the first k + 1 drafts are all accepted: logits [..., K] to the same shape, fp32."""
    return probability.survival(apply(logits, temperatures))


def survival_ece(
    events: Events, temperatures: Sequence[float], num_bins: int = DEFAULT_BINS
) -> tuple[float | None, ...]:
    """ECE of the survival per slot (K entries), None for a slot that was never verified."""
    scores = torch.sigmoid(events.confidence_logits.double() / torch.tensor(temperatures, dtype=torch.float64))
    probabilities, observed = scores.cumprod(-1), events.cumulative_observed
    result = []
    for slot, seen in enumerate(observed.unbind(1)):
        p = probabilities[seen, slot]
        result.append(ece(p, events.labels[seen, slot], bin_index(p, num_bins)))
    return tuple(result)


def check_temperatures(temperatures: Sequence[float]) -> None:
    """Raises DsparkError unless there is at least one and all are finite and > 0."""
    _expect(len(temperatures) > 0, "temperatures", "one value per slot", "none")
    good = all(_is_number(t) and t > 0 for t in temperatures)
    _expect(good, "temperatures", "finite numbers > 0", list(temperatures))


def _fit_slot(events: Events, slot: int, earlier: list[float], before: float | None, num_bins: int) -> float:
    seen = events.cumulative_observed[:, slot]
    logits = events.confidence_logits[seen, : slot + 1].double()
    scaled = logits[:, :slot] / torch.tensor(earlier, dtype=torch.float64)
    prefix, last = torch.sigmoid(scaled).prod(-1), logits[:, slot]
    labels = events.labels[seen, slot]
    decided = events.conditional_observed[:, slot]
    own_logits, own_labels = events.confidence_logits[decided, slot].double(), events.labels[decided, slot]

    def evaluate(temperature: float) -> _Score:
        p = prefix * torch.sigmoid(last / temperature)
        bins = bin_index(p, num_bins)
        error, noise = ece(p, labels, bins), ece_noise(p, bins)
        assert error is not None, f"slot {slot} was verified, but has no event"
        assert noise is not None, f"slot {slot} was verified, but has no event"
        own_nll = float(nll(torch.sigmoid(own_logits / temperature), own_labels).sum())
        return _Score(error, own_nll + math.log(temperature) ** 2 / (2 * _PRIOR**2), noise[1])

    return _search(evaluate, math.inf if before is None else before)


def _search(evaluate: Callable[[float], _Score], before: float) -> float:
    """The temperature to use; its ECE is never above evaluate(1)'s, nor above `before` where that can be had."""
    scores = {temperature: evaluate(temperature) for temperature in [*_GRID, 1.0]}
    best = min(scores.values(), key=lambda s: s.ece)
    limit = min(best.ece + best.noise, max(best.ece, min(scores[1.0].ece, before)))
    tied = {t: s for t, s in scores.items() if s.ece <= limit}
    choice = min(tied, key=lambda t: tied[t].penalised_nll)
    refined = _golden_section(lambda t: evaluate(t).penalised_nll, choice / 1.051, choice * 1.051)
    if (score := evaluate(refined)).ece <= limit:
        tied[refined] = score
    lowest = min(s.penalised_nll for s in tied.values())
    return min((t for t, s in tied.items() if s.penalised_nll <= lowest + _SLACK), key=lambda t: abs(math.log(t)))


def _golden_section(value: Callable[[float], float], low: float, high: float, steps: int = 14) -> float:
    """Where `value` is smallest between low and high (both > 0), on a log scale, to (high / low) ** 0.0012."""
    ratio = (math.sqrt(5) - 1) / 2
    a, b = math.log(max(low, 1 / _LIMIT)), math.log(min(high, _LIMIT))
    left, right = b - ratio * (b - a), a + ratio * (b - a)
    at_left, at_right = value(math.exp(left)), value(math.exp(right))
    for _ in range(steps):
        if at_left <= at_right:
            b, right, at_right = right, left, at_left
            left = b - ratio * (b - a)
            at_left = value(math.exp(left))
        else:
            a, left, at_left = left, right, at_right
            right = a + ratio * (b - a)
            at_right = value(math.exp(right))
    return math.exp((a + b) / 2)


def _total(errors: Sequence[float | None]) -> float:
    return sum(e for e in errors if e is not None)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _expect(ok: bool, name: str, wanted: str, got: Any) -> None:
    if not ok:
        raise DsparkError(f"calibration: expected {name} to be {wanted}, but got {got!r}. Run dspark calibrate again.")
