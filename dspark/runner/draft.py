"""Propose a block for every running request, and keep the draft model's context cache.

Context row base + p holds what the draft model made of the target's features at position p, for every position before
the anchor. ``commit`` takes the features as the target confirms tokens; what the draft model makes of them is computed
when a block, or another request's prompt, next needs it: rounds in which the model rests cost it next to nothing. Block
keys are never cached.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dspark import noise, ops
from dspark.contracts import MTPPredictInfo, VerifierName
from dspark.drafter.context import Context
from dspark.drafter.model import Drafter, Proposal
from dspark.runner.sequence import Sequence
from dspark.runner.verify import SamplingRows

_MOST_LATE = 512  # rows that wait for the draft model: 2 MB of features, and 10 ms when they are computed


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


class DraftStage:
    """The draft model at work inside the runner: ``width`` drafts a round, arena rows 0 .. capacity - 1."""

    def __init__(self, drafter: Drafter, capacity: int, verifier: VerifierName, width: int):
        config = drafter.config
        self.drafter, self.verifier, self.width = drafter, verifier, width
        self.maps = drafter.confidence_head.maps if drafter.confidence_head else ()
        self.window = config.sliding_window  # context tokens a block may see; 0: all
        self.context = Context.empty(config, capacity, drafter.dtype)
        self._late: list[tuple[Tensor, Tensor, Tensor]] = []  # features, positions, rows not yet in the context

    def commit(self, features: Tensor, positions: Tensor, rows: Tensor) -> None:
        """features [N, n*H] of confirmed tokens at positions [N] go to context rows [N], before a block looks there."""
        self._late.append((features, positions, rows))
        if sum(len(rows) for _, _, rows in self._late) >= _MOST_LATE:
            self._settle()

    def copy(self, source: int, to: int, count: int) -> None:
        """What is committed of rows source ... source + count - 1, also to rows to ..."""
        self._settle()
        self.context.copy(source, to, count)

    def _settle(self) -> None:
        """In the order of the commits: a row that another request took over has the later one's token."""
        if not self._late:
            return
        features, positions, rows = zip(*self._late, strict=True)
        made = self.drafter.encode(torch.cat(features), torch.cat(positions))
        for at, part in zip(rows, made.split([len(r) for r in rows]), strict=True):
            self.context.write(at, part)
        self._late.clear()

    def propose(self, sequences: list[Sequence], sampling: SamplingRows) -> Drafts:
        """Draft one block per sequence, each token drawn with the request's own law shaping and keyed noise."""
        self._settle()
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
