"""What a block sees of the tokens before its anchor: per draft layer keys and values, and the features themselves."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.drafter.config import DrafterConfig


@dataclass(frozen=True, slots=True)
class Context:
    """Tokens in rows [T]. layers: one (keys, values) [T,Hkv,D] per draft layer, keys normed and rotated; features
    [T,H]: the normed context features, where a block's input reads them (config.reads_features; else None)."""

    layers: list[tuple[Tensor, Tensor]]
    features: Tensor | None

    @classmethod
    def empty(cls, config: DrafterConfig, rows: int, dtype: torch.dtype) -> Context:
        """Room for `rows` tokens, unwritten."""
        shape = (rows, config.num_kv_heads, config.head_dim)
        layers = [(torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)) for _ in range(config.num_layers)]
        return cls(layers, torch.empty(rows, config.hidden_size, dtype=dtype) if config.reads_features else None)

    def write(self, rows: Tensor, fresh: Context) -> None:
        """Puts the N tokens of `fresh` into rows [N]."""
        for (keys, values), (k, v) in zip(self.layers, fresh.layers, strict=True):
            keys[rows], values[rows] = k, v
        if self.features is not None and fresh.features is not None:
            self.features[rows] = fresh.features

    def copy(self, source: int, to: int, count: int) -> None:
        """Rows source ... source + count - 1, also at rows to ...; the two do not overlap."""
        rows = [tensor for layer in self.layers for tensor in layer]
        for tensor in [*rows, *([] if self.features is None else [self.features])]:
            tensor[to : to + count] = tensor[source : source + count]

    def last(self, begin: Tensor, end: Tensor) -> Tensor:
        """The features [B,H] in row end - 1 of each block; zeros where begin == end (nothing before the anchor)."""
        assert self.features is not None, "this context was made without features"
        if not len(self.features):
            return self.features.new_zeros(len(end), self.features.shape[-1])
        rows = self.features[(end - 1).clamp_min(0)]
        return torch.where((end > begin)[:, None], rows, torch.zeros_like(rows))
