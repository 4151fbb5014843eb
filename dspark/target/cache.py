"""Where keys and values live: one arena of rows per layer, and the allocator that hands regions of rows to sequences.

A sequence owns one contiguous region; the token at its position p lies in row base + p. Rolling back is forgetting:
rows past a sequence's end are overwritten by its next tokens and attended by nobody. Left out on purpose: paging,
prefix sharing, ring buffers for sliding windows.
"""

from __future__ import annotations

from bisect import bisect_left

import torch
from torch import Tensor


class KVCache:
    """k[l], v[l]: [capacity, Hkv, D] for each layer l. Memory is not initialised: only written rows may be attended."""

    def __init__(self, num_layers: int, capacity: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype):
        shape = (capacity, num_kv_heads, head_dim)
        self.capacity = capacity
        self.k: list[Tensor] = [torch.empty(shape, dtype=dtype) for _ in range(num_layers)]
        self.v: list[Tensor] = [torch.empty(shape, dtype=dtype) for _ in range(num_layers)]


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
