"""The DeepSpec reader: both rope schemas, and what is refused. Numbers are held in tests/parity."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from dspark.contracts import DsparkError
from dspark.drafter.model import Drafter
from dspark.export.deepspec import read_deepspec

RAW = {
    "architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "block_size": 4, "mask_token_id": 2,
    "target_layer_ids": [0, 1], "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "num_target_layers": 3, "rms_norm_eps": 1e-6,
    "markov_rank": 4, "markov_head_type": "rnn", "enable_confidence_head": True, "confidence_head_with_markov": True,
    "rope_parameters": {"rope_theta": 5e4, "rope_type": "default"}, "sliding_window": None, "hidden_act": "silu",
}  # fmt: skip


def write(path, raw, drop=()):
    path.mkdir()
    (path / "config.json").write_text(json.dumps(raw))
    tensors = {name: torch.zeros(40, 16) for name in ("embed_tokens.weight", "lm_head.weight") if name not in drop}
    save_file({**tensors, "norm.weight": torch.ones(16)}, path / "model.safetensors")
    return path


def test_reads_and_fits(tmp_path):
    config, state, embed, head = read_deepspec(write(tmp_path / "a", RAW))
    assert (config.markov_head, config.sample_from_anchor, config.num_predictions) == ("rnn", True, 4)
    assert (embed.shape, head.shape, list(state)) == ((40, 16), (40, 16), ["norm.weight"])
    with pytest.raises(RuntimeError, match="Missing key"):
        Drafter(config).load_state_dict(state, strict=True)


def test_older_rope_schema(tmp_path):
    old = {k: v for k, v in RAW.items() if k != "rope_parameters"}
    new = read_deepspec(write(tmp_path / "a", RAW))[0]
    assert read_deepspec(write(tmp_path / "b", {**old, "rope_theta": 5e4}))[0] == new
    with pytest.raises(DsparkError, match="rope_theta"):
        read_deepspec(write(tmp_path / "c", old))


def test_refusals(tmp_path):
    with pytest.raises(DsparkError, match="Qwen3DSparkModel"):
        read_deepspec(write(tmp_path / "a", {**RAW, "architectures": ["Qwen3ForCausalLM"]}))
    with pytest.raises(DsparkError, match="block_size"):
        read_deepspec(write(tmp_path / "b", {k: v for k, v in RAW.items() if k != "block_size"}))
    with pytest.raises(DsparkError, match="lm_head"):
        read_deepspec(write(tmp_path / "c", RAW, drop=("lm_head.weight",)))
    rope = {**RAW["rope_parameters"], "partial_rotary_factor": 0.5}
    with pytest.raises(DsparkError, match="partial_rotary_factor"):
        read_deepspec(write(tmp_path / "d", {**RAW, "rope_parameters": rope}))
    with pytest.raises(DsparkError, match=r"config\.json"):
        read_deepspec(tmp_path / "nothing")
