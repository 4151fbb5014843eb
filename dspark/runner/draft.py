"""Propose a block for every running request, and keep the draft model's context cache.

Context row base + p holds what the draft model made of the target's features at position p, for every position before
the anchor. ``commit`` takes the features as the target confirms tokens; what the draft model makes of them is computed
when a block of the same request, or another prompt, next needs it: where the model rests that is never. Block keys are
not cached.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from dspark import noise, ops
from dspark.contracts import MTPPredictInfo, VerifierName
from dspark.drafter.context import Context
from dspark.drafter.model import Drafter, Proposal
from dspark.runner.sequence import Sequence
from dspark.runner.verify import SamplingRows

_MOST_LATE = 4096  # rows of features that wait for the draft model to look at them: some 20 MB
_MOST_OF_ONE = 1024  # of one request: a long prompt's are computed as it is read, and not all in the round it drafts in


@dataclass(frozen=True, slots=True)
class Drafts:
    """Blocks for R requests: what the scheduler sees, and the laws the tokens were drawn from (probs [R,K,V'] over the
    draft vocabulary, whose tokens are ids [V'], None: all; kept for the rejection verifier only)."""

    predictions: list[MTPPredictInfo]
    probs: Tensor | None
    ids: Tensor | None = None

    def laws(self, lengths: list[int], vocab_size: int) -> Tensor | None:
        """[sum of lengths, V] over the full vocabulary, of the first lengths[r] drafts of each request."""
        if self.probs is None or sum(lengths) == 0:
            return None
        rows = torch.cat([self.probs[i, :n] for i, n in enumerate(lengths)])
        if self.ids is None:
            return rows
        full = torch.zeros(len(rows), vocab_size)
        full[:, self.ids] = rows
        return full


def cut(prediction: MTPPredictInfo, count: int) -> MTPPredictInfo:
    """Its first drafts, `count` at most."""
    rates = prediction.confidence_rates
    return replace(prediction, token_ids=prediction.token_ids[:count], confidence_rates=rates and rates[:count])


@dataclass(slots=True)
class _Late:
    """What of a sequence is not in the context yet: parts, each features and positions, of so many rows."""

    parts: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    rows: int = 0


class DraftStage:
    """The draft model at work inside the runner: ``width`` drafts a round, arena rows 0 .. capacity - 1."""

    def __init__(self, drafter: Drafter, capacity: int, verifier: VerifierName, width: int):
        config = drafter.config
        self.drafter, self.verifier, self.width = drafter, verifier, width
        self.maps = drafter.confidence_head.maps if drafter.confidence_head else ()
        self.window = config.sliding_window  # context tokens a block may see; 0: all
        self.context = Context.empty(config, capacity, drafter.dtype)
        self._late: dict[int, _Late] = {}  # by the first row of its sequence
        self._late_rows = 0

    def commit(self, features: Tensor, positions: Tensor, rows: Tensor) -> None:
        """features [N, n*H] of confirmed tokens at positions [N], sequence by sequence, go to context rows [N]: before
        a block looks there."""
        bases, counts = torch.unique_consecutive(rows - positions, return_counts=True)
        sizes = counts.tolist()
        self._late_rows += len(rows)
        for base, ours, at in zip(bases.tolist(), features.split(sizes), positions.split(sizes), strict=True):
            mine = ours if len(sizes) == 1 else ours.clone()  # a view would keep all rows of the pass in memory
            late = self._late.setdefault(base, _Late())
            late.parts.append((mine, at))
            late.rows += len(at)
            if late.rows > _MOST_OF_ONE:
                self._settle([base])
        while self._late_rows > _MOST_LATE:
            self._settle([next(iter(self._late))])

    def copy(self, source: int, to: int, count: int) -> None:
        """What is committed of the first `count` rows of the sequence at row source, also to the one at row to."""
        self._settle([source])
        self.context.copy(source, to, count)

    def forget(self, base: int) -> None:
        """The sequence at this row is gone: nobody will ask for what is not in the context yet."""
        self._late_rows -= self._late.pop(base, _Late()).rows

    def _settle(self, bases: Iterable[int]) -> None:
        """Everything committed of these sequences is in the context."""
        late = [(base, *part) for base in bases for part in self._late.pop(base, _Late()).parts]
        if not late:
            return
        positions = torch.cat([positions for _, _, positions in late])
        rows = torch.cat([base + positions for base, _, positions in late])
        self.context.write(rows, self.drafter.encode(torch.cat([features for _, features, _ in late]), positions))
        self._late_rows -= len(rows)

    def propose(self, sequences: list[Sequence], sampling: SamplingRows) -> Drafts:
        """Draft one block per sequence, each token drawn with the request's own law shaping and keyed noise."""
        self._settle(s.base for s in sequences)
        anchors = torch.tensor([s.anchor for s in sequences])
        begin = torch.tensor([s.base for s in sequences])
        laws: list[Tensor] = []

        def choose(slot: int, logits: Tensor) -> Tensor:
            probs, stream = sampling.shape(logits), noise.TARGET
            if self.verifier == "rejection":
                laws.append(probs)
                stream = noise.draft_stream(slot)
            ids = self.drafter.draft_ids
            column = ops.gumbel_argmax(probs, sampling.seeds, stream, anchors + slot + 1, ids)
            return self.drafter.vocab_ids(column)

        tokens = torch.tensor([s.tokens[-1] for s in sequences])
        proposal = self.drafter.propose(tokens, anchors, self.context, begin, begin + anchors, choose, self.width)
        probs = torch.stack(laws, dim=1) if laws else None
        return Drafts(self._predictions(proposal), probs, self.drafter.draft_ids)

    def _predictions(self, proposal: Proposal) -> list[MTPPredictInfo]:
        tokens = proposal.token_ids.tolist()
        if proposal.confidence_logits is None:
            return [MTPPredictInfo(tuple(row), None) for row in tokens]
        return [
            MTPPredictInfo(tuple(ids), tuple(m.rate(z) for m, z in zip(self.maps, logits, strict=False)))
            for ids, logits in zip(tokens, proposal.confidence_logits.tolist(), strict=True)
        ]
