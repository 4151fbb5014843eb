"""What the regression start of the draft model looks at: features and hidden states over some training sequences.

They are captured as in a training step (or read from its cache), held in the target's dtype for the one solve, and
dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from dspark.drafter.regression import Observations
from dspark.training.bars import bar
from dspark.training.batches import BatchPlan, SequenceBatch, generator
from dspark.training.data import sequence_batch
from dspark.training.frozen import Capture, blocks_of
from dspark.training.labels import anchor_candidates
from dspark.training.sources import Sample

Look = Callable[[SequenceBatch], Capture]

_TOKENS = 1024  # of one pass of the target


def observe(look: Look, samples: Sequence[Sample], count: int, slots: int, seed: int, quiet: bool) -> Observations:
    """Every block of `count` samples (drawn by `seed`; all if there are fewer), sequences with non-finite values left
    out. look: what the target says about a batch. quiet: no progress bar on stderr."""
    order = torch.randperm(len(samples), generator=generator("regression", seed))[:count].tolist()
    chosen = [samples[i] for i in order]
    plan = BatchPlan([len(s.ids) for s in chosen], _TOKENS, seed, shuffle=False)
    parts = []
    with bar("looking at answers", len(chosen), quiet) as shown:
        for group in filter(None, plan.epoch(0)):
            picked = [chosen[i] for i in group]
            batch = sequence_batch(picked, [anchor_candidates(s.loss_mask) for s in picked])
            parts.append(_observe_batch(look, batch, slots))
            shown.update(len(group))
    return Observations.join(parts)


def _observe_batch(look: Look, batch: SequenceBatch, slots: int) -> Observations:
    seen = look(batch)
    blocks, rows, counted = blocks_of(batch, seen, slots)
    before = rows - 1  # the row whose hidden state predicts the label, and whose token stands before it
    anything = (blocks.end > blocks.begin)[:, None]  # as Context.last: no features before a sequence's first token
    features = torch.where(anything, seen.features[(blocks.end - 1).clamp_min(0)], 0)
    return Observations(features, blocks.anchor_ids, batch.ids[before], counted, seen.hidden[before])
