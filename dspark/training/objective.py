"""From what a batch's blocks say to the losses: slot weights, sums, counts. Knows no target, no Lightning, no ranks.

Three calls, because a loss is divided by the sum of its weights over all ranks and the fused losses make their gradient
as they go: ``weigh`` the slots, ``counts`` (the caller adds them over ranks and divides), ``measure``. Survival weights
need the draft's acceptance first: one more pass over the logits, without a gradient.
Shapes: B blocks, P slots. Everything returned but ``Measured.loss`` is detached.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.drafter.model import BlockStates, Drafter
from dspark.training import losses
from dspark.training.fused import TERMS, Result, Setup, Slots, fused
from dspark.training.labels import TargetLaw, slot_weights, survival_weights
from dspark.training.options import LossOptions

Fused = Callable[[Setup, Slots, Mapping[str, float]], Result]


@dataclass(frozen=True, slots=True)
class Judged:
    """One batch: the draft model's states, the label columns [B,P] (-1: outside the draft vocabulary), the target's law
    at M rows, index [B,P] into it, which slots count [B,P] bool."""

    states: BlockStates
    columns: Tensor
    law: TargetLaw
    index: Tensor
    counted: Tensor


@dataclass(frozen=True, slots=True)
class Measured:
    """loss [] with gradient: the sum over terms of share * sum; sums {term: []}; acceptance [B,P], 0 at slots that do
    not count."""

    loss: Tensor
    sums: dict[str, Tensor]
    acceptance: Tensor


def alphas(options: LossOptions, confidence_head: bool) -> dict[str, float]:
    """Weight of each loss, in a fixed order: what ranks add up must line up. ce and l1 are always reported."""
    chosen = {name: getattr(options, name) for name in TERMS}
    kept = {name: alpha for name, alpha in chosen.items() if alpha or name in ("ce", "l1")}
    return kept | ({"confidence": options.confidence} if confidence_head else {})


def weigh(drafter: Drafter, judged: Judged, options: LossOptions) -> Tensor:
    """Weight of each slot [B,P] fp32."""
    if options.weighting == "decay":
        return slot_weights(judged.counted, options.decay)
    with torch.no_grad():
        accepted = _run(drafter, judged, options, judged.counted.float(), {}, fused).acceptance
    return survival_weights(judged.counted, _spread(accepted, judged.counted), options.survival_floor)


def counts(judged: Judged, weights: Tensor, names: Mapping[str, float]) -> Tensor:
    """Sum of the weights of each loss, in the order of the names: [len(names)]. A label the draft vocabulary lacks has
    no cross entropy."""
    total, known = weights.sum(), (weights * (judged.columns >= 0)).sum()
    return torch.stack([known if name == "ce" else total for name in names])


def measure(
    drafter: Drafter, judged: Judged, options: LossOptions, weights: Tensor, shares: Mapping[str, float],
    run: Fused = fused,
) -> Measured:  # fmt: skip
    """shares {name: alpha / count}, the names of ``alphas``; 0 gives a sum and no gradient. run: fused, or
    fused.reference."""
    wide = {name: share for name, share in shares.items() if name != "confidence"}
    found = _run(drafter, judged, options, weights, wide, run)
    kept = weights[judged.counted]
    loss, sums = found.loss, {name: (kept * value).sum() for name, value in found.values.items()}
    if "confidence" in shares:
        assert judged.states.confidence_logits is not None, "a confidence loss comes with a confidence head"
        said = judged.states.confidence_logits[judged.counted]
        total, _ = losses.confidence_bce(said, found.acceptance, kept)
        loss, sums["confidence"] = loss + shares["confidence"] * total, total.detach()
    return Measured(loss, sums, _spread(found.acceptance, judged.counted))


def _run(
    drafter: Drafter, judged: Judged, options: LossOptions, weights: Tensor, shares: Mapping[str, float], run: Fused
) -> Result:
    """The fused losses at the slots that count, laid flat."""
    states, at = judged.states, judged.counted
    phi, head = (None if states.phi is None else states.phi[at]), drafter.markov_head
    w2 = None if head is None else head.markov_w2.weight
    slots = Slots(states.hidden[at], phi, w2, judged.law, judged.index[at], judged.columns[at], weights[at])
    columns = drafter.head_columns(states.hidden.dtype)
    setup = Setup(drafter.slot_logits, columns, drafter.draft_ids, options.temperature, options.label)
    return run(setup, slots, shares)


def _spread(values: Tensor, counted: Tensor) -> Tensor:
    """[N] -> [B,P], 0 elsewhere."""
    return values.new_zeros(counted.shape).masked_scatter_(counted, values)
