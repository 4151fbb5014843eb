"""Tiny draft models, real tiny targets, and blocks to hold two draft models against each other."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dspark.drafter.blocks import blocks_at
from dspark.drafter.config import DrafterConfig
from dspark.drafter.model import Drafter
from dspark.target.decoder import Target
from dspark.target.families import read_config
from dspark.target.weights import plan, random_weights

TARGET: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 40, "hidden_size": 16,
    "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": [3, 4],
    "pad_token_id": None, "initializer_range": 0.03, "rope_parameters": {"rope_theta": 5e4, "rope_type": "default"},
    "sliding_window": 32, "partial_rotary_factor": 1.0,
}  # fmt: skip


class FakeTarget:
    """What the bundle asks of a target."""

    def told_apart(self, wanted: str, dtype: str = "") -> str:
        return f"in {dtype}"

    name, fingerprint = "tiny", "f" * 64

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(9)
        self.embed_weight, self.head_weight = (torch.randn(40, 16, generator=generator) for _ in range(2))


@pytest.fixture
def target() -> FakeTarget:
    return FakeTarget()


OPTIONS = {"input_fusion": True, "layer_fusion": True, "convolution": True, "candidates": 5}


@pytest.fixture(params=[{}, {"input_fusion": True}, OPTIONS], ids=["plain", "fusion", "options"])
def drafter(request, target) -> Drafter:
    config = DrafterConfig(
        block_size=4, mask_token_id=2, target_layer_ids=(0, 1), sample_from_anchor=True, vocab_size=40, hidden_size=16,
        intermediate_size=24, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, num_target_layers=3,
        markov_head="gated", markov_rank=4, confidence_head=True, confidence_with_markov=True, draft_vocab_size=12,
        target_fingerprint=target.fingerprint, **request.param,
    )  # fmt: skip
    return Drafter(config, torch.arange(0, 36, 3), seed=4).bind(target.embed_weight, target.head_weight)


@pytest.fixture
def blocks():
    """(blocks, features, positions) of two packed sequences."""
    generator = torch.Generator().manual_seed(5)
    ids, offsets = torch.randint(40, (20,), generator=generator), torch.tensor([0, 8, 20])
    chosen = blocks_at(ids, offsets, torch.tensor([0, 0, 1, 1]), torch.tensor([0, 3, 1, 7]), 4)
    return chosen, torch.randn(20, 32, generator=generator), torch.cat([torch.arange(8), torch.arange(12)])


@pytest.fixture
def raw() -> dict[str, Any]:
    """The tiny target's config.json."""
    return dict(TARGET)


@pytest.fixture
def make_target() -> Callable[..., Target]:
    """make(tied, dtype) -> a target that computes, with random weights."""

    def make(tied: bool = False, dtype: torch.dtype = torch.float32) -> Target:
        config = read_config({**TARGET, "tie_word_embeddings": tied})
        return Target(config, random_weights(config, 3, dtype, scale=0.3), name="tiny")

    return make


@pytest.fixture
def make_draft() -> Callable[..., Drafter]:
    """make(target, dtype, **config fields) -> a draft model bound to it, with no weight at its starting value."""

    def make(target: Target, dtype: torch.dtype = torch.float32, **fields: Any) -> Drafter:
        shape = {
            "block_size": 4, "mask_token_id": 2, "target_layer_ids": (-1, 1), "sample_from_anchor": True,
            "num_layers": 2, "markov_rank": 4, **fields,
        }  # fmt: skip
        config = DrafterConfig.for_target(target, **shape)
        ids = torch.arange(config.draft_vocab_size) * 3 + 1 if config.draft_vocab_size else None
        drafter = Drafter(config, ids, seed=4)
        generator = torch.Generator().manual_seed(6)
        with torch.no_grad():
            for parameter in drafter.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
        return drafter.to(dtype).bind(target.embed_weight, target.head_weight).eval()

    return make


@pytest.fixture
def target_folder(tmp_path: Path) -> Callable[..., Path]:
    """save(target, raw) -> its checkpoint directory, as the command line takes it. raw: its config.json."""

    def save(target: Target, raw: dict[str, Any] = TARGET) -> Path:
        folder = tmp_path / "target"
        folder.mkdir()
        tensors = {}
        for name, parts in plan(target.config).items():
            rows = [shape[0] for _, shape in parts]
            for (part, _), piece in zip(parts, target._tensors[name].split(rows), strict=True):
                tensors[part] = piece.clone()
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        (folder / "config.json").write_text(json.dumps({**raw, "tie_word_embeddings": target.config.tied}))
        return folder

    return save
