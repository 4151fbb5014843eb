"""Tiny checkpoints that transformers writes, and tiny targets of random weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.target.decoder import Target
from dspark.target.families import read_config
from dspark.target.weights import random_weights

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
}


@pytest.fixture
def save_checkpoint(tmp_path: Path) -> Callable[..., tuple[Path, Any]]:
    """save(family, **config fields) -> (directory, transformers' own model in fp32, eager attention)."""
    transformers = pytest.importorskip("transformers")

    def save(family: str, max_shard_size: str = "5GB", **fields: Any) -> tuple[Path, Any]:
        config = getattr(transformers, f"{family}Config")(**{**SIZES, **fields}, attn_implementation="eager")
        torch.manual_seed(5)
        model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
        with torch.no_grad():  # defaults are too tame: biases 0, norms 1, weights 0.02
            for name, parameter in model.named_parameters():
                parameter.add_(torch.randn_like(parameter) * (0.02 if "embed" in name else 0.2))
        directory = tmp_path / family
        model.save_pretrained(directory, max_shard_size=max_shard_size)
        return directory, model

    return save


@pytest.fixture
def tiny_target() -> Callable[..., Target]:
    """make(dtype, architecture, **config.json fields) -> Target with random weights, no checkpoint."""

    def make(dtype: torch.dtype = torch.float32, architecture: str = "Qwen3ForCausalLM", **fields: Any) -> Target:
        config = read_config({**SIZES, "architectures": [architecture], **fields})
        return Target(config, random_weights(config, 3, dtype, scale=0.2))

    return make
