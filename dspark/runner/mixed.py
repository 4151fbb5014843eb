"""Who drafts for which request this round: a lookup, the draft model, or nobody.

A lookup costs nothing beside a pass of the target, so everybody is looked up. Drafting with the model takes a share of
a pass (7.7 ms beside 34 at batch 1: docs/scheduling.md), so it is asked only for the requests where what it can be
expected to add, by how its slots have been accepted in this run, is worth that; and of two blocks the one with the
larger expected gain goes to the target. Gain: accepted drafts, the sum over the slots of the product of the rates up to
them; the rates are the model's calibrated confidences, or, without a confidence head, its running acceptance by slot.

Under the coupled and the greedy verifiers none of this shows in what a request produces (engine.py refuses others).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from dspark.contracts import MTPPredictInfo
from dspark.runner.curve import CapacityCurve
from dspark.runner.draft import Drafts, DraftStage, cut
from dspark.runner.lookup import Lookup, Rates, Trail, gain
from dspark.runner.schedule import draft_limit
from dspark.runner.sequence import Sequence
from dspark.runner.verify import SamplingRows

_TRIED_EVERY = 16  # positions


class MixedStage:
    """A lookup beside a draft model at work inside the runner, or alone (model None). curve: where there is one, it
    says what drafting costs; else drafting is taken to cost nothing."""

    def __init__(self, lookup: Lookup, model: DraftStage | None, curve: CapacityCurve | None):
        self.lookup, self.model, self.curve = lookup, model, curve
        self.slots = Rates()  # of the model, by slot
        self._trails: dict[int, Trail] = {}
        self._modelled: dict[int, tuple[int, ...]] = {}  # what the model drafted for a request last

    def propose(self, sequences: list[Sequence], sampling: SamplingRows, may_ask: bool = True) -> Drafts:
        """The better block for each sequence, with a rate for every draft; an empty one where nothing was found.
        may_ask: whether the model may be asked in this round."""
        blocks = [self._look_up(s) for s in sequences]
        asked = self._worth_asking(sequences, blocks) if may_ask else []
        if self.model and asked:
            only = torch.zeros(len(sequences), dtype=torch.int64).index_fill(0, torch.tensor(asked), 1)
            drafts = self.model.propose([sequences[i] for i in asked], sampling.repeat(only))
            for i, block in zip(asked, drafts.predictions, strict=True):
                self._modelled[sequences[i].index] = block.token_ids
                useful = cut(self._rated(block), draft_limit(self.model.width, sequences[i].remaining))
                blocks[i] = max(blocks[i], useful, key=_gain_of)
        return Drafts(blocks, None)

    def retire(self, finished: list[Sequence]) -> None:
        """Their last tokens go to the lookup, and stay there."""
        for sequence in finished:
            self._follow(sequence)
            del self._trails[sequence.index]

    def _look_up(self, sequence: Sequence) -> MTPPredictInfo:
        return self._follow(sequence).draft(draft_limit(self.lookup.width, sequence.remaining))

    def _follow(self, sequence: Sequence) -> Trail:
        """The sequence's trail, with all that was written since: that also says what the last drafts were worth."""
        trail = self._trails.get(sequence.index)
        if trail is None:
            trail = self._trails[sequence.index] = self.lookup.follow(sequence.request.prompt_ids)
        written = sequence.tokens[len(trail.tokens) :]
        self.slots.learn(enumerate(self._modelled.pop(sequence.index, ())), written)
        trail.write(written)
        return trail

    def _worth_asking(self, sequences: list[Sequence], blocks: list[MTPPredictInfo]) -> list[int]:
        """The sequences whose round the model is asked for."""
        share = self._cost(len(sequences))
        return [i for i, (s, block) in enumerate(zip(sequences, blocks, strict=True)) if self._pays(s, block, share)]

    def _pays(self, sequence: Sequence, block: MTPPredictInfo, share: float) -> bool:
        """Whether the model can be expected to add more tokens per second than what was looked up: the same pass, and a
        share of it more. Now and then it is tried whatever is expected, so that a bad start is not for good."""
        limit = draft_limit(self.model.width, sequence.remaining) if self.model else 0
        hoped = gain(self._slot_rates(limit))
        worth = 1.0 + hoped > (1.0 + _gain_of(block)) * (1.0 + share)
        return limit > 0 and (worth or sequence.anchor % _TRIED_EVERY == 0)

    def _cost(self, requests: int) -> float:
        """Of drafting with the model for all, as a share of a pass without drafts."""
        if self.curve is None:
            return 0.0
        return self.curve.drafting(requests) / float(self.curve.passes(requests)[requests])

    def _rated(self, block: MTPPredictInfo) -> MTPPredictInfo:
        if block.confidence_rates is not None:
            return block
        return replace(block, confidence_rates=self._slot_rates(len(block.token_ids)))

    def _slot_rates(self, count: int) -> tuple[float, ...]:
        return tuple(self.slots.of(slot) for slot in range(count))


def _gain_of(block: MTPPredictInfo) -> float:
    return gain(block.confidence_rates or ())
