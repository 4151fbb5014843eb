"""Sequential temperature scaling: one temperature per slot, so that survival means what it says.

Left to right over slots: T_k minimises the ECE of the cumulative product a_k = prod_{i<=k} sigmoid(z_i / T_i), the
earlier slots held fixed (DSpark paper, DESIGN §4). A temperature above 0 keeps the order of a slot's confidences.

ECE is a staircase in T and noisy on few events, so its bare minimum overfits. Temperatures whose ECE lies within one
standard deviation of the minimum (the deviation a perfect calibration would show) count as tied; among them the
likelihood of the slot's own decisions is taken, with a unit normal prior on log T, and near-equal ones resolve to the
one nearest 1. The search is a log grid, then golden section around its choice: deterministic.
A temperature cannot move a mean that is off at logit 0; platt.py and isotonic.py can.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from dspark.calibration.events import Events
from dspark.calibration.measures import bin_index, ece, ece_noise, nll
from dspark.calibration.record import survival_ece
from dspark.slot_maps import SlotMap, identity, of_temperatures

_LIMIT = 10.0  # temperatures lie in [1 / 10, 10]
_GRID = torch.linspace(-math.log(_LIMIT), math.log(_LIMIT), 93, dtype=torch.float64).exp().tolist()  # 5 % apart
_PRIOR = 1.0  # standard deviation of log T
_SLACK = 0.125  # nats, in total: likelihoods this close (half a standard error of log T) are equal


class _Score(NamedTuple):
    ece: float
    penalised_nll: float  # of the slot's own decisions, summed, in nats, with the prior's penalty
    noise: float  # standard deviation of the ECE under a perfect calibration


def fit_temperatures(events: Events, num_bins: int) -> tuple[SlotMap, ...]:
    """A temperature per slot. Never worse on these events than no calibration: slot by slot given the earlier ones, and
    in the mean ECE over slots. A slot that no round reached keeps temperature 1."""
    before = survival_ece(events, identity(events.num_slots), num_bins)
    reached = events.conditional_observed.any(0).tolist()
    temperatures: list[float] = []
    for slot in range(events.num_slots):
        found = _fit_slot(events, slot, temperatures, before[slot], num_bins) if reached[slot] else 1.0
        temperatures.append(found)
    maps = of_temperatures(temperatures)
    if _total(survival_ece(events, maps, num_bins)) > _total(before):  # an early slot's gain can cost later ones more
        return identity(events.num_slots)
    return maps


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
