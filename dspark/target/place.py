"""Where the rows of a pass lie and what they may see: made once a pass, read by every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dspark.target.cache import KVCache
from dspark.target.replay import Replay
from dspark.target.rings import RingPass, Span, plan

Ranges = tuple[Tensor, Tensor]  # first row and one past the last, [N] each


@dataclass(frozen=True, slots=True)
class Place:
    """N rows. cos, sin: of their positions. rows [N]: the arena row each one's key goes to. begins: by window the first
    arena row each may see; end [N]: one past the last. stems: by window the rows of a beginning shared with others,
    seen before those; empty without. rings: by window, where a cache keeps rings for it."""

    cos: Tensor
    sin: Tensor
    rows: Tensor
    begins: dict[int, Tensor]
    end: Tensor
    stems: dict[int, Ranges]
    rings: dict[int, RingPass]

    @staticmethod
    def of(
        angles: tuple[Tensor, Tensor], rows: Tensor, begin: Tensor, end: Tensor, windows: Sequence[int],
        spans: Sequence[Span], cache: KVCache | None, stem: Ranges | None = None,
    ) -> Place:  # fmt: skip
        """Window 0 sees all of the past, a window w the last w rows."""
        kinds = {0, *windows}
        begins = {w: torch.maximum(begin, end - w) if w else begin for w in kinds}
        stems = {w: _stem(stem, end - begin, w) for w in kinds} if stem else {}
        return Place(*angles, rows, begins, end, stems, _rings(spans, cache))

    def cut(self, how: Replay, cache: KVCache) -> Place:
        """Of the rows that go on, none of which sees anything from before the cut in its own window."""
        at = how.rows
        begins = {w: torch.maximum(b[at], how.floor) if w else b[at] for w, b in self.begins.items()}
        return replace(
            self, cos=self.cos[at], sin=self.sin[at], rows=self.rows[at], begins=begins, end=self.end[at],
            rings=_rings(how.spans, cache),
        )  # fmt: skip


def _stem(stem: Ranges, own: Tensor, window: int) -> Ranges:
    """What a window still reaches of the stem; own [N]: how many rows each sees behind it."""
    begin, end = stem
    return (torch.maximum(begin, end - (window - own).clamp_min(0)), end) if window else stem


def _rings(spans: Sequence[Span], cache: KVCache | None) -> dict[int, RingPass]:
    return {w: plan(spans, w, n) for w, n in cache.entries.items()} if cache else {}
