"""Where keys and values live: one arena of rows per layer, and the allocator that hands regions of rows to sequences.

A sequence owns one contiguous region; the token at its position p lies in row base + p. Rolling back is forgetting:
rows past a sequence's end are overwritten by its next tokens and attended by nobody. Layers with a sliding window may
keep a ring per sequence instead (rings.py). Left out on purpose: paging.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import torch
from torch import Tensor


class KVCache:
    """k[l], v[l]: [capacity, Hkv, D] for each layer l; [rings * entries, Hkv, D] where its window is in ``entries``.
    Memory is not initialised: only written rows may be attended.

    windows: per layer, 0 for all of the past. backtracking: with `rings` sequences at most, a layer whose window is
    smaller than a sequence's longest need keeps a ring of window + backtracking entries for each (rings.py), unless
    the rings would take more than the arena.
    """

    def __init__(
        self, windows: Sequence[int], capacity: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype,
        rings: int = 0, backtracking: int = 0, longest: int = 0,
    ):  # fmt: skip
        self.capacity, self.windows = capacity, tuple(windows)
        sizes = {w: w + backtracking for w in self.windows if w and rings}
        ringed = {w for w, n in sizes.items() if n < longest and rings * n < capacity}
        self.entries = {w: w + backtracking for w in sorted(ringed)}
        rows = [rings * self.entries[w] if w in ringed else capacity for w in self.windows]
        self.k: list[Tensor] = [torch.empty((n, num_kv_heads, head_dim), dtype=dtype) for n in rows]
        self.v: list[Tensor] = [torch.empty((n, num_kv_heads, head_dim), dtype=dtype) for n in rows]

    @property
    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of every layer."""
        return list(zip(self.k, self.v, strict=True))

    @property
    def nbytes(self) -> int:
        """Of all layers."""
        return sum(t.nbytes for t in (*self.k, *self.v))

    def copy(self, source: int, to: int, count: int, from_ring: int = 0, to_ring: int = 0) -> None:
        """Rows source ... source + count - 1 of every layer, also at rows to ...; the two do not overlap. A layer with
        rings copies the whole ring."""
        for window, *tensors in zip(self.windows, self.k, self.v, strict=True):
            n = self.entries.get(window, 0)
            a, b, size = (from_ring * n, to_ring * n, n) if n else (source, to, count)
            for tensor in tensors:
                tensor[b : b + size] = tensor[a : a + size]


class Arena:
    """First-fit allocator of contiguous row regions in [0, capacity). Freed neighbours are joined.

    Where a region lies never changes what a sequence computes: attention's bits do not depend on the rows' numbers.
    """

    def __init__(self, capacity: int):
        assert capacity >= 0, f"arena capacity must be >= 0, got {capacity}"
        self.capacity = capacity
        self._gaps = [(0, capacity)] if capacity else []  # (first row, rows), ascending, disjoint
        self._taken: dict[int, int] = {}

    @property
    def used(self) -> int:
        """Rows handed out."""
        return sum(self._taken.values())

    def alloc(self, rows: int) -> int | None:
        """First row of a free region of ``rows`` >= 1 rows; None when no gap is large enough."""
        assert rows >= 1, f"a region needs at least one row, got {rows}"
        for i, (start, length) in enumerate(self._gaps):
            if length >= rows:
                self._gaps[i : i + 1] = [(start + rows, length - rows)] if length > rows else []
                self._taken[start] = rows
                return start
        return None

    def free(self, base: int) -> None:
        """Gives back the region that alloc returned as ``base``."""
        assert base in self._taken, f"row {base} is not the base of a region in use"
        end = base + self._taken.pop(base)
        i = bisect_left(self._gaps, (base, 0))
        first, last, start = i, i, base
        if i > 0 and sum(self._gaps[i - 1]) == base:
            first, start = i - 1, self._gaps[i - 1][0]
        if i < len(self._gaps) and self._gaps[i][0] == end:
            last, end = i + 1, sum(self._gaps[i])
        self._gaps[first:last] = [(start, end - start)]
