"""After the verdict: tokens go to their sequences, and each round is noted."""

from __future__ import annotations

from itertools import islice

import torch
from torch import Tensor

from dspark import ops
from dspark.contracts import MTPPredictInfo, Round
from dspark.runner.sequence import Sequence
from dspark.runner.verify import Verdict


def emit(
    sequences: list[Sequence], verdicts: list[Verdict], caps: list[int], logits: Tensor, probs: Tensor
) -> list[int]:
    """Append the first caps[r] + 1 of each verdict's tokens with their log-probabilities: logits, probs [N,V], the
    verdicts' rows. Returns how many each sequence kept."""
    verdicts = [Verdict(v.accepted, v.tokens[: c + 1], v.rows[: c + 1]) for v, c in zip(verdicts, caps, strict=True)]
    emitted = [row for v in verdicts for row in v.rows]
    rows, tokens = torch.tensor(emitted), torch.tensor([token for v in verdicts for token in v.tokens])
    chosen = probs[rows, tokens]  # and not whole rows of a vocabulary: a copy costs a twentieth of a pass
    logprobs = iter(ops.log_of(chosen[:, None], torch.zeros_like(tokens)).tolist())
    raw_of = logits if emitted == list(range(len(logits))) else logits[rows]
    raw = iter(ops.raw_logprob(raw_of, tokens).tolist())
    kept = []
    for sequence, verdict in zip(sequences, verdicts, strict=True):
        n = len(verdict.tokens)
        kept.append(sequence.append(verdict.tokens, list(islice(logprobs, n)), list(islice(raw, n))))
        sequence.cached = len(sequence.tokens) - 1
    return kept


def record(
    decoding: list[Sequence],
    predictions: list[MTPPredictInfo],
    lengths: list[int],
    verdicts: list[Verdict],
    kept: list[int],
) -> None:
    """Note the round of each sequence that had drafts. Where the sequence ended inside the block, the drafts behind
    its end never mattered and are cut from the record."""
    for sequence, prediction, length, verdict, n in zip(decoding, predictions, lengths, verdicts, kept, strict=False):
        if not prediction.token_ids:
            continue
        end = n if sequence.finish_reason else len(prediction.token_ids)
        sequence.rounds.append(
            Round(
                anchor=sequence.anchor - n,
                drafted=prediction.token_ids[:end],
                verified=min(length, end),
                accepted=min(verdict.accepted, end),
                confidences=(prediction.confidence_rates or ())[:end],
                source=prediction.source,
            )
        )
