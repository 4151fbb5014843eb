"""The losses that read the whole vocabulary, a few slots at a time: values, and gradients that are ready in forward.

    hidden [N,H], phi [N,r] -> logits -> values of each loss, acceptance -> d loss / d (hidden, phi, W2) -> next chunk

A loss is linear in its slots with coefficients that are known before any logit is: the slot's weight times the loss'
share. So the gradient with respect to a chunk's logits is made where the logits are, multiplied by the LM head and W2
at once, and dropped: nothing of the size slots x vocabulary exists but the target's law (the idea of Liger's fused
linear cross entropy, arXiv:2410.10989, for a sum of divergences). backward only scales; there is no second derivative.
slopes.py has the formulas, ``reference`` the same function by autograd. Probabilities are fp32, or fp64 if the logits
are.
Left out: a gradient for the LM head (frozen); recomputing logits in backward (a third more matrix products).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dspark.training import losses
from dspark.training.labels import AnalyticLabel, TargetLaw, acceptance, overlap_from_l1
from dspark.training.slopes import values_and_slope

CHUNK, ROWS = 1 << 19, 64  # logits alive at a time, for a processor's cache; slots, for its matrix product
TERMS = ("ce", "soft_ce", "l1", "coupled")
_BEHIND = {"rejection": ("l1",), "coupled": ("coupled",)}  # the loss that an acceptance label is read from


@dataclass(frozen=True, slots=True)
class Setup:
    """How slots are judged. say: hidden [n,H], phi [n,r] or None -> logits [n,V'] = head(hidden) + W2 phi, the LM
    head [V',H] being constant; draft_ids [V'] as in labels.acceptance; temperature of all but the cross entropy; label:
    whose acceptance is wanted."""

    say: Callable[[Tensor, Tensor | None], Tensor]
    head: Tensor
    draft_ids: Tensor | None = None
    temperature: float = 1.0
    label: AnalyticLabel = "rejection"
    rows: int = 0  # slots at a time; 0: as many as CHUNK logits hold, but at least ROWS


@dataclass(frozen=True, slots=True)
class Slots:
    """N slots. hidden [N,H]; phi [N,r] and w2 [V',r], or None; law at row index [N]; columns [N] of the labels (-1:
    outside the draft vocabulary); weights [N] fp32, constant."""

    hidden: Tensor
    phi: Tensor | None
    w2: Tensor | None
    law: TargetLaw
    index: Tensor
    columns: Tensor
    weights: Tensor


@dataclass(frozen=True, slots=True)
class Result:
    """loss []: sum over terms and slots of share * weight * value, with gradient; values {term: [N]}, unweighted, and
    acceptance [N] in [0, 1], without. A cross entropy is 0 where the label is outside the draft vocabulary."""

    loss: Tensor
    values: dict[str, Tensor]
    acceptance: Tensor


def fused(setup: Setup, slots: Slots, shares: Mapping[str, float]) -> Result:
    """shares {term: factor of its weighted sum in the loss} for terms of TERMS; 0 asks for the value alone."""
    loss, accepted, values = _Fused.apply(slots.hidden, slots.phi, slots.w2, setup, slots, dict(shares))
    return Result(loss, dict(zip(shares, values.unbind(), strict=True)), accepted)


def reference(setup: Setup, slots: Slots, shares: Mapping[str, float]) -> Result:
    """The same by autograd, with every tensor at full size."""
    logits, law = setup.say(slots.hidden, slots.phi), slots.law.rows(slots.index)
    log_draft = torch.log_softmax(logits / setup.temperature, dim=-1)
    every: dict[str, Callable[[], Tensor]] = {
        "ce": lambda: losses.cross_entropies(torch.log_softmax(logits, dim=-1), slots.columns),
        "soft_ce": lambda: losses.soft_cross_entropies(log_draft, law),
        "l1": lambda: losses.l1_distance(log_draft.exp(), law),
        "coupled": lambda: losses.coupled_distance(log_draft.exp(), law),
    }
    values = {name: every[name]() for name in shares}
    terms = [share * (slots.weights * values[name]).sum() for name, share in shares.items()]
    accepted = acceptance(setup.label, logits, law, setup.draft_ids, setup.temperature)
    return Result(sum(terms, logits.new_zeros(())), {k: v.detach() for k, v in values.items()}, accepted)


class _Fused(torch.autograd.Function):
    """-> loss, acceptance, values [terms,N] in the order of the shares. Saves the three gradients."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, phi: Tensor | None, w2: Tensor | None, setup: Setup, slots: Slots,
                shares: dict[str, float]) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        wanted = ctx.needs_input_grad[:3] if any(shares.values()) else (False, False, False)
        gradients = _Gradients(slots, wanted)
        parts = [_chunk(setup, slots, rows, shares, gradients) for rows in _chunks(setup, len(hidden))]
        accepted, values = (torch.cat(columns, dim=-1) for columns in zip(*parts, strict=True))
        ctx.save_for_backward(*gradients.as_inputs())
        factors = torch.tensor(list(shares.values()), dtype=values.dtype, device=values.device)
        loss = (values * slots.weights).sum(-1) @ factors
        ctx.mark_non_differentiable(accepted, values)
        return loss, accepted, values

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, outer: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        return *(None if g is None else g * outer.to(g.dtype) for g in ctx.saved_tensors), None, None, None


class _Gradients:
    """Sums over chunks of d loss / d (hidden, phi, W2), None where not wanted."""

    def __init__(self, slots: Slots, wanted: tuple[bool, ...]):
        self.slots, self.any = slots, any(wanted)
        wide = torch.float64 if slots.hidden.dtype == torch.float64 else torch.float32
        inputs = (slots.hidden, slots.phi, slots.w2)
        self.sums = [torch.zeros_like(x, dtype=wide) if x is not None and yes else None
                     for x, yes in zip(inputs, wanted, strict=True)]  # fmt: skip

    def add(self, rows: slice, slope: Tensor, head: Tensor) -> None:
        """slope [n,V'] of the chunk's logits. The product with the LM head is taken in the head's dtype, as autograd of
        the logits would; those with W2 in fp32."""
        hidden, phi, w2 = self.sums
        if hidden is not None:
            hidden[rows] = slope.to(head.dtype) @ head
        if phi is not None:
            torch.mm(slope, self._w2(slope.dtype), out=phi[rows])
        if w2 is not None:
            assert self.slots.phi is not None, "W2 comes with phi"
            w2.addmm_(slope.T, self.slots.phi[rows].to(slope.dtype))

    def _w2(self, dtype: torch.dtype) -> Tensor:
        assert self.slots.w2 is not None, "phi comes with W2"
        return self.slots.w2.to(dtype)

    def as_inputs(self) -> Iterator[Tensor | None]:
        inputs = (self.slots.hidden, self.slots.phi, self.slots.w2)
        return (None if g is None or x is None else g.to(x.dtype) for g, x in zip(self.sums, inputs, strict=True))


def _chunks(setup: Setup, count: int) -> list[slice]:
    """Slices of the slots; one, empty, where there are none."""
    step = setup.rows or max(ROWS, CHUNK // len(setup.head))
    return [slice(at, min(at + step, count)) for at in range(0, max(count, 1), step)]


def _chunk(setup: Setup, slots: Slots, rows: slice, shares: dict[str, float],
           gradients: _Gradients) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Acceptance [n] and values [terms,n] of some slots; their gradients are added."""
    logits = setup.say(slots.hidden[rows], None if slots.phi is None else slots.phi[rows])
    law, weights = slots.law.rows(slots.index[rows]), slots.weights[rows].to(logits.dtype)
    factors = {name: share * weights for name, share in shares.items() if share and gradients.any}
    terms = {*shares, *_BEHIND.get(setup.label, ())}
    values, slope = values_and_slope(logits, law, slots.columns[rows], terms, factors, setup.temperature)
    if slope is not None:
        gradients.add(rows, slope, setup.head)
    wanted = [values[name] for name in shares]
    return _accepted(setup, logits, law, values), torch.stack(wanted) if wanted else logits.new_zeros(0, len(logits))


def _accepted(setup: Setup, logits: Tensor, law: TargetLaw, values: dict[str, Tensor]) -> Tensor:
    """labels.acceptance, from the distances where they have it."""
    if setup.label == "greedy":
        return acceptance("greedy", logits, law, setup.draft_ids)
    return overlap_from_l1(values["l1"]) if setup.label == "rejection" else (1.0 - values["coupled"]).clamp(0.0, 1.0)
