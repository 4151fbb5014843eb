"""A tiny draft model, its lent vocabulary, and a packed batch of blocks to try it on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from dspark.drafter.blocks import Blocks, blocks_at
from dspark.drafter.config import DrafterConfig
from dspark.drafter.model import Drafter

SHAPE: dict[str, Any] = {
    "block_size": 4,
    "mask_token_id": 3,
    "target_layer_ids": (-1, 2),
    "sample_from_anchor": True,
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "num_target_layers": 4,
}
FULL: dict[str, Any] = {"markov_rank": 6, "confidence_head": True, "confidence_with_markov": True}


@dataclass(frozen=True)
class Batch:
    """R packed sequences with features, and blocks in them."""

    ids: torch.Tensor
    offsets: torch.Tensor
    features: torch.Tensor
    positions: torch.Tensor
    blocks: Blocks
    sequence: torch.Tensor


def make_config(**fields: Any) -> DrafterConfig:
    return DrafterConfig(**{**SHAPE, **fields})


def make_drafter(dtype: torch.dtype = torch.float32, seed: int = 1, **fields: Any) -> Drafter:
    config = make_config(**fields)
    generator = torch.Generator().manual_seed(seed)
    ids = None
    if config.draft_vocab_size:
        ids = torch.randperm(config.vocab_size, generator=generator)[: config.draft_vocab_size].sort().values
    drafter = Drafter(config, ids, seed=seed).to(dtype)
    with torch.no_grad():
        for parameter in drafter.parameters():  # norms and biases off their neutral values
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(dtype) * 0.1)
    shape = (config.vocab_size, config.hidden_size)
    return drafter.bind(*(torch.randn(shape, generator=generator).to(dtype) for _ in range(2)))


def make_batch(config: DrafterConfig, lengths=(9, 1, 30), per_sequence=5, dtype=torch.float32, seed=2) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    total = int(offsets[-1])
    ids = torch.randint(config.vocab_size, (total,), generator=generator)
    features = torch.randn(total, len(config.target_layer_ids) * config.hidden_size, generator=generator).to(dtype)
    anchors = [torch.randint(n, (per_sequence,), generator=generator).sort().values for n in lengths]
    sequence = torch.arange(len(lengths)).repeat_interleave(per_sequence)
    positions = torch.cat([torch.arange(n) for n in lengths])
    blocks = blocks_at(ids, offsets, sequence, torch.cat(anchors), config.num_predictions)
    return Batch(ids, offsets, features, positions, blocks, sequence)


@pytest.fixture
def config() -> Callable[..., DrafterConfig]:
    return make_config


@pytest.fixture
def drafter() -> Callable[..., Drafter]:
    return make_drafter


@pytest.fixture
def batch() -> Callable[..., Batch]:
    return make_batch


@pytest.fixture
def full() -> dict[str, Any]:
    """Fields that switch both heads on."""
    return dict(FULL)
