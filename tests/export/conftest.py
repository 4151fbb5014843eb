"""A tiny draft model with everything on, and blocks to hold two of them against each other."""

from __future__ import annotations

import pytest
import torch

from dspark.drafter.blocks import blocks_at
from dspark.drafter.config import DrafterConfig
from dspark.drafter.model import Drafter


class FakeTarget:
    """What the export room asks of a target."""

    name, fingerprint = "tiny", "f" * 64

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(9)
        self.embed_weight, self.head_weight = (torch.randn(40, 16, generator=generator) for _ in range(2))


@pytest.fixture
def target() -> FakeTarget:
    return FakeTarget()


@pytest.fixture(params=[False, True], ids=["plain", "fusion"])
def drafter(request, target) -> Drafter:
    config = DrafterConfig(
        block_size=4, mask_token_id=2, target_layer_ids=(0, 1), sample_from_anchor=True, vocab_size=40, hidden_size=16,
        intermediate_size=24, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, num_target_layers=3,
        markov_head="gated", markov_rank=4, confidence_head=True, confidence_with_markov=True, draft_vocab_size=12,
        target_fingerprint=target.fingerprint, input_fusion=request.param,
    )  # fmt: skip
    return Drafter(config, torch.arange(0, 36, 3), seed=4).bind(target.embed_weight, target.head_weight)


@pytest.fixture
def blocks():
    """(blocks, features, positions) of two packed sequences."""
    generator = torch.Generator().manual_seed(5)
    ids, offsets = torch.randint(40, (20,), generator=generator), torch.tensor([0, 8, 20])
    chosen = blocks_at(ids, offsets, torch.tensor([0, 0, 1, 1]), torch.tensor([0, 3, 1, 7]), 4)
    return chosen, torch.randn(20, 32, generator=generator), torch.cat([torch.arange(8), torch.arange(12)])
