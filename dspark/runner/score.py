"""Log-probabilities of finished sequences by one teacher-forced pass: the trainer's view of what the runner sampled.

The same target, the same operations and the same laws as in the loop, so the bits equal those that were recorded token
by token; and since every operation has a gradient, a policy's loss is made of these very numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dspark import ops
from dspark.contracts import DsparkError, SamplingParams
from dspark.runner.verify import SamplingRows
from dspark.target.decoder import Target


class Finished(NamedTuple):
    """A sequence and the law it was sampled from; prompt of at least one token."""

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    params: SamplingParams


def score(target: Target, sequences: Sequence[Finished]) -> tuple[Tensor, Tensor]:
    """(logprobs, raw_logprobs), both [sum of response lengths] fp32, responses one after the other: of the sampling law
    (after temperature and truncation) and of the softmax at temperature 1. Differentiable where the target's weights
    are. A token outside the kept support has logprob -inf and no gradient. Raises DsparkError for an empty prompt."""
    if not all(len(s.prompt_ids) for s in sequences):
        raise DsparkError("score: expected a prompt of at least one token with every sequence, but got an empty one.")
    sequences = [s for s in sequences if len(s.response_ids)]
    if not sequences:
        return torch.zeros(0), torch.zeros(0)
    tokens = torch.tensor([token for s in sequences for token in s.response_ids])
    inputs = [torch.tensor([*s.prompt_ids, *s.response_ids][:-1]) for s in sequences]
    hidden, _, offsets = target.forward_sequences(inputs)
    starts = offsets[:-1] + torch.tensor([len(s.prompt_ids) - 1 for s in sequences])
    rows = torch.cat([torch.arange(a, b) for a, b in zip(starts.tolist(), offsets[1:].tolist(), strict=True)])
    logits = target.logits(hidden[rows])
    laws = SamplingRows.of([s.params for s in sequences]).repeat(torch.tensor([len(s.response_ids) for s in sequences]))
    return laws.logprob(logits, tokens), ops.raw_logprob(logits, tokens)
