"""One target pass as flat rows: which token sits where, and which rows are asked for logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.contracts import MTPPredictInfo
from dspark.runner.sequence import Sequence
from dspark.settings import TruncationMode
from dspark.target.replay import Replay, replay_of
from dspark.target.rings import Span


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """Rows of the decoding sequences first (anchor, then its verified drafts), then those of the prompt chunks.

    ids, positions, rows (arena row each token's keys and values go to), begin (first arena row it sees): [N] int64.
    logit_rows: rows whose logits are needed, in the order decoding sequences, then completed prompts.
    """

    decoding: list[Sequence]
    lengths: list[int]
    chunks: list[tuple[Sequence, int]]
    ids: Tensor
    positions: Tensor
    rows: Tensor
    begin: Tensor
    logit_rows: Tensor

    @staticmethod
    def build(
        decoding: list[Sequence],
        predictions: list[MTPPredictInfo],
        lengths: list[int],
        chunks: list[tuple[Sequence, int]],
    ) -> FlatBatch:
        """lengths[r] of predictions[r]'s tokens are verified; chunks are (sequence, prompt tokens to process now)."""
        ids: list[int] = []
        positions: list[int] = []
        base: list[int] = []
        for sequence, prediction, length in zip(decoding, predictions, lengths, strict=True):
            ids += [sequence.tokens[-1], *prediction.token_ids[:length]]
            positions += range(sequence.anchor, sequence.anchor + length + 1)
            base += [sequence.base] * (length + 1)
        logit_rows = list(range(len(ids)))
        for sequence, take in chunks:
            ids += sequence.tokens[sequence.cached : sequence.cached + take]
            positions += range(sequence.cached, sequence.cached + take)
            base += [sequence.base] * take
            if sequence.cached + take == sequence.prompt_length:
                logit_rows.append(len(ids) - 1)
        begin = torch.tensor(base)
        where = torch.tensor(positions)
        return FlatBatch(
            decoding, lengths, chunks, torch.tensor(ids), where, begin + where, begin, torch.tensor(logit_rows)
        )

    @property
    def spans(self) -> list[Span]:
        """The rows sequence by sequence, for layers that keep rings. Before advance_prefill."""
        decoded = [Span(s.ring, s.anchor, n + 1, False) for s, n in zip(self.decoding, self.lengths, strict=True)]
        return decoded + [Span(s.ring, s.cached, take, True) for s, take in self.chunks]

    def replay(self, mode: TruncationMode, keep: int) -> Replay | None:
        """Which rows go through the consumer layers of a decoder-decoder target. Before advance_prefill."""
        if mode == "off":
            return None
        sequences = self.decoding + [s for s, _ in self.chunks]
        return replay_of(self.spans, [s.base for s in sequences], [s.prompt_length for s in sequences], mode, keep)

    def advance_prefill(self) -> list[Sequence]:
        """Mark the chunks as processed. Returns the sequences whose prompt is now complete, in ``logit_rows`` order."""
        for sequence, take in self.chunks:
            sequence.cached += take
        return [s for s, _ in self.chunks if not s.prefilling]

    def final_rows(self, kept: list[int], window: int = 0) -> Tensor | slice:
        """Flat rows that will not be rolled back: the first kept[r] of each decoding sequence and every prompt row.

        window: of the draft model's context (0: all of it). What lies before the window of the prompt's last token no
        block will see, so those rows are left out: a bounded replay that is exact.
        """
        final: list[int] = []
        start = 0
        for length, n in zip(self.lengths, kept, strict=True):
            final += range(start, start + n)
            start += length + 1
        for sequence, take in self.chunks:
            seen = sequence.prompt_length - 1 - window if window else 0
            first = sequence.cached - take  # they have been advanced past the chunk
            final += range(start + min(max(0, seen - first), take), start + take)
            start += take
        return slice(None) if len(final) == len(self.ids) else torch.tensor(final, dtype=torch.int64)
