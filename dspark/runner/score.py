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
    are. A token outside the kept support has logprob -inf and no gradient. Raises DsparkError for an
    empty prompt, ids outside the vocabulary, and sequences past the longest context."""
    check_finished(target, sequences)
    sequences = [s for s in sequences if len(s.response_ids)]
    if not sequences:
        attached = target.embed_weight[:0].sum(1).float()  # no rows, but part of the graph
        return attached, attached
    logits, tokens, laws = response_logits(target, sequences)
    return laws.logprob(logits, tokens), ops.raw_logprob(logits, tokens)


def response_logits(target: Target, sequences: Sequence[Finished]) -> tuple[Tensor, Tensor, SamplingRows]:
    """Of the N > 0 response tokens, one after the other: the logits [N, V] fp32 they were drawn by, the tokens [N], and
    how each was sampled. Sequences as check_finished wants them, none without a response."""
    target.refresh()
    tokens = torch.tensor([token for s in sequences for token in s.response_ids])
    hidden, rows = _forward(target, sequences)
    laws = SamplingRows.of([s.params for s in sequences]).repeat(torch.tensor([len(s.response_ids) for s in sequences]))
    return target.logits(hidden[rows]), tokens, laws


def _forward(target: Target, sequences: Sequence[Finished]) -> tuple[Tensor, Tensor]:
    """(hidden states, the rows that predict each response token). A prompt that several sequences have is run once."""
    asked: dict[tuple[int, ...], list[int]] = {}
    for i, s in enumerate(sequences):
        asked.setdefault(tuple(s.prompt_ids), []).append(i)
    stems = [torch.tensor(prompt) for prompt in asked]
    answers = [torch.tensor(s.response_ids[:-1], dtype=torch.int64) for s in sequences]
    hidden, rows = target.forward_branching(stems, [[answers[i] for i in few] for few in asked.values()])
    order = [i for few in asked.values() for i in few]
    placed = dict(zip(order, (found for some in rows for found in some), strict=True))
    return hidden, torch.cat([placed[i] for i in range(len(sequences))])


def check_finished(target: Target, sequences: Sequence[Finished]) -> None:
    """Raises DsparkError for a sequence that cannot be scored."""
    for i, s in enumerate(sequences):
        _check(i, s, target)


def check_ids(ids: Sequence[int], vocab_size: int, what: str) -> None:
    """Raises DsparkError for a token id that the target does not have."""
    wrong = [i for i in ids if not 0 <= i < vocab_size]
    if wrong:
        raise DsparkError(f"{what}: expected token ids from 0 to {vocab_size - 1}, but got {wrong[0]}. Mend the ids.")


def _check(index: int, sequence: Finished, target: Target) -> None:
    length, longest = len(sequence.prompt_ids) + len(sequence.response_ids), target.config.max_position_embeddings
    if not len(sequence.prompt_ids) or length > longest:
        raise DsparkError(
            f"score, sequence {index}: expected a prompt of at least one token and at most {longest} tokens with its "
            f"response, but got {len(sequence.prompt_ids)} + {len(sequence.response_ids)}. Mend the sequence."
        )
    check_ids([*sequence.prompt_ids, *sequence.response_ids], target.vocab_size, f"score, sequence {index}")
