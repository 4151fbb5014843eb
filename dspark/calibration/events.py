"""Acceptance events: what the confidence head said, and what the verifier then did.

Shapes: M rounds, K slots. Two kinds of labels follow from the number of accepted drafts:
- conditional, slot k given that all before it were accepted: observed iff k <= accepted and k < verified,
  label 1 iff k < accepted;
- cumulative, the prefix of k + 1 drafts survived: observed iff k < verified, label 1 iff k < accepted.

Left out on purpose: soft (analytic) labels, which are a training matter. Rounds whose verification length was chosen
from the confidences are censored and do not belong here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dspark.contracts import DsparkError
from dspark.files import sha256_json, tensor_hash

ALL = "all"  # the name under which every domain's rounds stand together
_HINT = "Collect rollouts with a draft model that has a confidence head, verifying every drafted token."


@dataclass(frozen=True, eq=False, slots=True)
class Events:
    """M observed rounds of K slots.

    confidence_logits [M, K] fp32: the head's logits before any temperature. accepted [M] int64: accepted drafts.
    verified [M] int64: drafts that went through the target. domain, conversation: M names each; intervals resample
    whole conversations. draft_max_prob [M, K]: the draft law's largest probability, a baseline confidence.
    Raises DsparkError when there is no round, or on a shape or value that cannot be.
    """

    confidence_logits: Tensor
    accepted: Tensor
    verified: Tensor
    domain: Sequence[str]
    conversation: Sequence[str]
    draft_max_prob: Tensor | None = None

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "confidence_logits", torch.as_tensor(self.confidence_logits).detach().cpu().float())
        put(self, "accepted", torch.as_tensor(self.accepted).cpu().to(torch.int64))
        put(self, "verified", torch.as_tensor(self.verified).cpu().to(torch.int64))
        put(self, "domain", tuple(str(name) for name in self.domain))
        put(self, "conversation", tuple(str(name) for name in self.conversation))
        if self.draft_max_prob is not None:
            put(self, "draft_max_prob", torch.as_tensor(self.draft_max_prob).detach().cpu().float())
        self._check_shapes()
        self._check_values()

    @property
    def num_events(self) -> int:
        return self.confidence_logits.shape[0]

    @property
    def num_slots(self) -> int:
        return self.confidence_logits.shape[1]

    @property
    def labels(self) -> Tensor:
        """[M, K] fp64: 1 where the draft of slot k was accepted (and so were all before it), else 0."""
        return (_slots(self) < self.accepted[:, None]).double()

    @property
    def conditional_observed(self) -> Tensor:
        """[M, K] bool: the verifier reached slot k and decided on it."""
        return (_slots(self) <= self.accepted[:, None]) & self.cumulative_observed

    @property
    def cumulative_observed(self) -> Tensor:
        """[M, K] bool: it is known whether the first k + 1 drafts survived."""
        return _slots(self) < self.verified[:, None]

    def data_hash(self) -> str:
        """sha256 of everything a fit can see, the order of the rounds included."""
        tensors = [self.confidence_logits, self.accepted, self.verified]
        return sha256_json([*map(tensor_hash, tensors), list(self.domain), list(self.conversation)])

    def select(self, keep: Tensor) -> Events:
        """The rounds where `keep` [M] bool is true. Raises DsparkError when none is."""
        rows = keep.nonzero().flatten()
        names = [(self.domain[i], self.conversation[i]) for i in rows.tolist()]
        maximum = None if self.draft_max_prob is None else self.draft_max_prob[rows]
        logits, accepted, verified = self.confidence_logits[rows], self.accepted[rows], self.verified[rows]
        return Events(logits, accepted, verified, [n[0] for n in names], [n[1] for n in names], maximum)

    def by_domain(self) -> list[tuple[str, Events]]:
        """("all", every round), then each domain's own rounds by name when there is more than one."""
        names = sorted(set(self.domain))
        parts = [(name, self.select(torch.tensor([d == name for d in self.domain]))) for name in names]
        return [(ALL, self), *(parts if len(names) > 1 else [])]

    def _check_shapes(self) -> None:
        if self.confidence_logits.ndim != 2 or 0 in self.confidence_logits.shape:
            shape = tuple(self.confidence_logits.shape)
            raise DsparkError(
                f"calibration events: expected logits [rounds, slots], at least one each, but got {shape}. {_HINT}"
            )
        per_round = {"accepted": self.accepted, "verified": self.verified}
        lengths = {name: tuple(value.shape) for name, value in per_round.items()}
        lengths |= {"domain": (len(self.domain),), "conversation": (len(self.conversation),)}
        for name, shape in lengths.items():
            _expect(shape == (self.num_events,), name, f"{self.num_events} values, one per round", shape)
        if self.draft_max_prob is not None:
            shape, wanted = self.draft_max_prob.shape, self.confidence_logits.shape
            _expect(shape == wanted, "draft_max_prob", f"shape {tuple(wanted)}", tuple(shape))

    def _check_values(self) -> None:
        clash = ALL in self.domain and len(set(self.domain)) > 1
        _expect(not clash, "domain", f"any name but {ALL!r}, which stands for every domain", repr(ALL))
        finite = self.confidence_logits.isfinite().all().item()
        _expect(finite, "confidence_logits", "finite numbers", "NaN or infinity; the head diverged")
        counts = (self.accepted >= 0) & (self.accepted <= self.verified) & (self.verified <= self.num_slots)
        if not counts.all():
            row = int((~counts).nonzero()[0])
            got = f"{int(self.accepted[row])} and {int(self.verified[row])} in round {row}"
            _expect(False, "accepted and verified", f"0 <= accepted <= verified <= {self.num_slots}", got)
        if self.draft_max_prob is not None:
            inside = ((self.draft_max_prob >= 0) & (self.draft_max_prob <= 1)).all().item()
            _expect(inside, "draft_max_prob", "probabilities in [0, 1]", "a value outside")


def _slots(events: Events) -> Tensor:
    return torch.arange(events.num_slots)[None, :]


def _expect(ok: Any, name: str, wanted: str, got: Any) -> None:
    if not ok:
        raise DsparkError(f"calibration events: expected {name} to be {wanted}, but got {got}. {_HINT}")
