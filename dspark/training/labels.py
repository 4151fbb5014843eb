"""What the draft model is trained towards: the target's law at a slot, slot masks, acceptance labels.

Everything here is fp32, detached and pure. Shapes: B blocks, K slots, V' draft vocabulary columns, M target rows.
The target's law over a reduced draft vocabulary keeps what lies outside as one number, because the draft can never
match that mass: it counts fully in the L1 distance and never in the overlap (DESIGN section 3).
Left out on purpose: anchors on the last prompt token. The runner's first anchor is the first response token, so a
candidate has its own token and the next one supervised (oracle/README.md section 4).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dspark.ops import raw_logprob
from dspark.training.coupled import coupled_acceptance

LOGIT_ROWS = 128  # rows of full-vocabulary logits alive at a time

AnalyticLabel = Literal["rejection", "coupled", "greedy"]
LABELS: tuple[str, ...] = ("observed", "rejection", "coupled", "greedy")


@dataclass(frozen=True, slots=True)
class TargetLaw:
    """The target's next-token law at M rows.

    inside [M, V'] fp32: probabilities of the draft vocabulary's ids; outside [M] fp32: mass of all other ids;
    argmax [M] int64: most likely vocabulary id (lowest on ties), whether or not the draft knows it.
    """

    inside: Tensor
    outside: Tensor
    argmax: Tensor

    def rows(self, index: Tensor) -> TargetLaw:
        """The law at `index` [...] of its rows, with index's shape in front."""
        return TargetLaw(*(part.index_select(0, index.flatten()).unflatten(0, index.shape) for part in self.parts()))

    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.inside, self.outside, self.argmax


def normalise(logits: Tensor) -> tuple[Tensor, Tensor]:
    """logits [M, V] -> (ln sum exp [M] fp32, argmax [M] int64, lowest on ties); a row's bits depend on it alone."""
    logits = logits.detach().float()
    argmax = logits.argmax(dim=-1)
    top = logits.gather(-1, argmax[:, None]).squeeze(-1)
    return top - raw_logprob(logits, argmax), argmax


def normalise_at(say: Callable[[Tensor], Tensor], hidden: Tensor) -> tuple[Tensor, Tensor]:
    """`normalise` of say(hidden [N,H]), the target's LM head, a few rows at a time: ([N], [N])."""
    parts = [normalise(say(chunk)) for chunk in hidden.split(LOGIT_ROWS)]
    normaliser, argmax = zip(*parts, strict=True)
    return torch.cat(normaliser), torch.cat(argmax)


def target_law(logits: Tensor, draft_ids: Tensor | None, temperature: float = 1.0) -> TargetLaw:
    """logits [M, V] of the target (any float dtype) -> its law; draft_ids [V'] int64 ascending, or None for all ids.

    One pass over the full vocabulary (the normaliser); the probabilities exist only for the draft vocabulary.
    """
    logits = logits.detach().float()
    if temperature != 1.0:
        logits = logits / temperature
    if draft_ids is None or draft_ids.numel() == logits.shape[-1]:
        return TargetLaw(torch.softmax(logits, dim=-1), logits.new_zeros(logits.shape[:-1]), logits.argmax(dim=-1))
    return reduced_law(logits.index_select(-1, draft_ids), *normalise(logits))


def reduced_law(columns: Tensor, normaliser: Tensor, argmax: Tensor) -> TargetLaw:
    """The law from the logits of the draft vocabulary alone: columns [M, V'] fp32, written over; the other two as
    `normalise` gives them for the full vocabulary."""
    inside = columns.sub_(normaliser[:, None]).exp_()
    return TargetLaw(inside, (1.0 - inside.sum(dim=-1)).clamp_min(0.0), argmax)


@torch.no_grad()
def laws_at(law_of: Callable[[Tensor], TargetLaw], rows: Tensor, counted: Tensor) -> tuple[TargetLaw, Tensor]:
    """The target's law at the rows some counted slot needs: (law of M distinct rows, index [B,K] into them).

    law_of: rows [n] -> their law; rows [B,K]; slots that do not count get index 0. At least one slot must count. The
    law is filled a few rows at a time: it exists once, the logits never.
    """
    needed, inverse = torch.unique(rows[counted], return_inverse=True)
    index = torch.zeros_like(rows)
    index[counted] = inverse
    chunks = needed.split(LOGIT_ROWS)
    first = law_of(chunks[0])
    if len(chunks) == 1:
        return first, index
    law = TargetLaw(*(part.new_empty(len(needed), *part.shape[1:]) for part in first.parts()))
    for at, chunk in enumerate(chunks):
        found = law_of(chunk) if at else first
        for whole, part in zip(law.parts(), found.parts(), strict=True):
            whole[at * LOGIT_ROWS :][: len(chunk)] = part
    return law, index


def anchor_candidates(loss_mask: Tensor) -> Tensor:
    """Positions that may be anchors: loss_mask [S] bool set there and at the next position. Returns [A] int64."""
    return torch.nonzero(loss_mask[:-1] & loss_mask[1:]).flatten()


def slot_mask(loss_mask: Tensor, begin: Tensor, end: Tensor, anchors: Tensor, slots: int) -> tuple[Tensor, Tensor]:
    """Label rows of a flat batch and which slots count.

    loss_mask [N] bool; begin, end [B]: the rows of the block's sequence; anchors [B]: positions in it. Returns (rows
    [B,K] int64 of the label anchor + k + 1, clamped to the sequence's last row; counted [B,K] bool). A slot counts when
    its label is inside the sequence, supervised, and all earlier slots of its block count.
    """
    rows = (begin + anchors)[:, None] + 1 + torch.arange(slots, device=anchors.device)
    inside = rows < end[:, None]
    rows = torch.minimum(rows, end[:, None] - 1)
    return rows, (inside & loss_mask[rows]).cumprod(dim=-1).bool()


def slot_weights(counted: Tensor, decay: float) -> Tensor:
    """counted [B,K] bool -> weights [B,K] fp32: exp(-k / decay) where counted, else 0; decay 0 switches it off."""
    slots = torch.arange(counted.shape[-1], dtype=torch.float32, device=counted.device)
    return counted.float() * (torch.exp(-slots / decay) if decay > 0 else torch.ones_like(slots))


def survival_weights(counted: Tensor, acceptance: Tensor, floor: float) -> Tensor:
    """counted [B,K] bool, acceptance [B,K] -> weights [B,K] fp32: the probability that the draft gets as far as slot k,
    prod_{j<k} c_j, but at least `floor`; 0 where the slot does not count. Detached."""
    before = torch.ones_like(acceptance)
    before[:, 1:] = acceptance.detach()[:, :-1].cumprod(dim=-1)
    return counted.float() * before.clamp_min(floor)


def overlap_from_l1(l1: Tensor) -> Tensor:
    """Acceptance probability of the rejection verifier, 1 - TV, from the full L1 distance (0..2)."""
    return (1.0 - 0.5 * l1).clamp(0.0, 1.0)


@torch.no_grad()
def acceptance(kind: AnalyticLabel, draft_logits: Tensor, law: TargetLaw, draft_ids: Tensor | None,
               temperature: float = 1.0) -> Tensor:  # fmt: skip
    """Probability that the verifier `kind` accepts the draft's token, per slot: [...] fp32 in [0, 1].

    draft_logits [..., V'], law with the same leading shape; temperature shapes the draft's law (the target's was shaped
    when it was made). coupled sorts V' columns per row and is by far the dearest.
    """
    if kind == "greedy":
        best = draft_logits.argmax(dim=-1)
        return ((best if draft_ids is None else draft_ids[best]) == law.argmax).float()
    draft = torch.softmax(draft_logits.float() / temperature, dim=-1)
    if kind == "rejection":
        return torch.minimum(draft, law.inside).sum(dim=-1).clamp(0.0, 1.0)
    assert kind == "coupled", f"acceptance label {kind!r} is none of {LABELS[1:]}"
    return coupled_acceptance(draft, law.inside, law.outside).clamp(0.0, 1.0)


def observed_events(verified: Tensor, accepted: Tensor, slots: int) -> tuple[Tensor, Tensor]:
    """Labels of B untruncated rounds, counts [B] int64 -> (accepted [B,K] fp32 0/1, observed [B,K] bool).

    Slot k was put to the test only if all before it were accepted and it was verified: k <= accepted, k < verified.
    """
    slot = torch.arange(slots, device=verified.device)
    observed = (slot <= accepted[:, None]) & (slot < verified[:, None])
    return (slot < accepted[:, None]).float(), observed
