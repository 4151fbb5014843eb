"""The flat layout: every key that is written, what is refused on both sides, and damaged checkpoints by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark.contracts import DsparkError
from dspark.export.deepspec import deepspec_config, deepspec_keys, read_deepspec, refusals, write_deepspec

EXPECTED: dict[str, Any] = {
    "architectures": ["Qwen3DSparkModel"], "attention_bias": False, "attention_dropout": 0.0, "block_size": 4,
    "bos_token_id": 1, "confidence_head_with_markov": True, "dtype": "float32", "enable_confidence_head": True,
    "eos_token_id": [3, 4], "head_dim": 8, "hidden_act": "silu", "hidden_size": 16, "initializer_range": 0.03,
    "intermediate_size": 24, "layer_types": ["full_attention", "full_attention"], "markov_head_type": "rnn",
    "markov_rank": 4, "mask_token_id": 2, "max_position_embeddings": 128, "max_window_layers": 2,
    "model_type": "qwen3", "num_anchors": 512, "num_attention_heads": 2, "num_hidden_layers": 2,
    "num_key_value_heads": 1, "num_target_layers": 3, "pad_token_id": None, "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 5e4, "rope_type": "default"}, "rope_scaling": None, "rope_theta": 5e4,
    "sliding_window": None, "target_layer_ids": [-1, 1], "tie_word_embeddings": False, "use_cache": True,
    "use_sliding_window": False, "vocab_size": 40,
}  # fmt: skip
HEADS = {"markov_head": "rnn", "confidence_head": True, "confidence_with_markov": True}


@pytest.fixture
def written(tmp_path, make_target, make_draft, raw) -> Path:
    target = make_target()
    write_deepspec(tmp_path / "draft", make_draft(target, **HEADS), target, raw)
    return tmp_path / "draft"


def change_tensors(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_every_written_key(written):
    assert json.loads((written / "config.json").read_text()) == EXPECTED
    assert sorted(p.name for p in written.iterdir()) == ["config.json", "dspark_export.json", "model.safetensors"]


def test_keys_that_are_absent_without_their_head(make_target, make_draft, raw):
    config = make_draft(make_target(), markov_rank=0).config
    absent = EXPECTED.keys() - deepspec_keys(config, "bfloat16", raw).keys()
    assert absent == {"markov_head_type", "confidence_head_with_markov"}


def test_every_written_tensor(written):
    layer = {
        "input_layernorm.weight": [16], "post_attention_layernorm.weight": [16], "self_attn.q_proj.weight": [16, 16],
        "self_attn.k_proj.weight": [8, 16], "self_attn.v_proj.weight": [8, 16], "self_attn.o_proj.weight": [16, 16],
        "self_attn.q_norm.weight": [8], "self_attn.k_norm.weight": [8], "mlp.gate_proj.weight": [24, 16],
        "mlp.up_proj.weight": [24, 16], "mlp.down_proj.weight": [16, 24],
    }  # fmt: skip
    expected = {
        "embed_tokens.weight": [40, 16], "lm_head.weight": [40, 16], "fc.weight": [16, 32], "hidden_norm.weight": [16],
        "norm.weight": [16], "markov_head.markov_w1.weight": [40, 4], "markov_head.markov_w2.weight": [40, 4],
        "markov_head.joint_proj.weight": [12, 24], "markov_head.joint_proj.bias": [12],
        "confidence_head.proj.weight": [1, 20], "confidence_head.proj.bias": [1],
        **{f"layers.{i}.{name}": shape for i in range(2) for name, shape in layer.items()},
    }  # fmt: skip
    tensors = load_file(written / "model.safetensors")
    assert {name: list(tensor.shape) for name, tensor in tensors.items()} == expected


def test_a_tied_target_is_stored_twice(tmp_path, make_target, make_draft, raw):
    target = make_target(tied=True)
    write_deepspec(tmp_path / "draft", make_draft(target), target, raw)
    _, _, embed, head = read_deepspec(tmp_path / "draft")
    assert torch.equal(embed, target.embed_weight)
    assert torch.equal(head, target.embed_weight)


def test_refusals(make_target, make_draft):
    target = make_target()
    assert refusals(make_draft(target, **HEADS).config) == []
    cases = {
        "input_fusion true": {"input_fusion": True},
        "layer_fusion true": {"layer_fusion": True},
        "convolution true": {"convolution": True},
        "candidates 5": {"candidates": 5},
        "markov_head pair": {"markov_head": "pair"},
        "qk_norm false": {"qk_norm": False},
        "mlp_bias true": {"mlp_bias": True},
        "attention_bias unlike": {"attention_bias": True},
        "sliding_window 7": {"sliding_window": 7},
        "sample_from_anchor false": {"sample_from_anchor": False},
        "draft_vocab_size 12": {"draft_vocab_size": 12},
        "confidence_with_law true": {"confidence_head": True, "confidence_with_law": True},
    }
    for text, fields in cases.items():
        found = refusals(make_draft(target, **fields).config)
        assert len(found) == 1
        assert found[0].startswith(text)
    assert len(refusals(make_draft(target, input_fusion=True, qk_norm=False).config)) == 2


def test_damaged_tensors_are_named(written):
    change_tensors(written, lambda t: t["norm.weight"].mul_(2))
    with pytest.raises(DsparkError, match=r"norm\.weight as exported, but its bytes differ"):
        read_deepspec(written)
    (written / "dspark_export.json").unlink()  # anybody else's checkpoint has no hashes
    read_deepspec(written)
    change_tensors(written, lambda t: t.update({"norm.bias": t.pop("norm.weight")}))
    with pytest.raises(DsparkError, match=r"missing: norm\.weight; unexpected: norm\.bias"):
        read_deepspec(written)
    change_tensors(written, lambda t: t.update({"norm.weight": t.pop("norm.bias")[:8].clone()}))
    with pytest.raises(DsparkError, match=r"norm\.weight of shape \[16\], but got \[8\]"):
        read_deepspec(written)


@pytest.mark.parametrize("name", ["confidence_head.proj.bias", "embed_tokens.weight", "lm_head.weight"])
def test_a_missing_tensor_is_named(written, name):
    change_tensors(written, lambda t: t.pop(name))
    (written / "dspark_export.json").unlink()
    with pytest.raises(DsparkError, match=f"missing: {name}"):
        read_deepspec(written)


def test_a_confidence_head_the_config_does_not_say(written):
    change_config(written, enable_confidence_head=False, confidence_head_with_markov=None)
    with pytest.raises(DsparkError, match=r"unexpected: confidence_head\.proj\.bias"):
        read_deepspec(written)


def change_config(folder: Path, **fields: Any) -> None:
    """None removes a field."""
    raw = json.loads((folder / "config.json").read_text())
    kept = {key: value for key, value in {**raw, **fields}.items() if value is not None or key not in fields}
    (folder / "config.json").write_text(json.dumps(kept))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, "Qwen3DSparkModel"),
        ({"block_size": None}, "expected block_size .a whole number., but it is absent"),
        ({"block_size": "4"}, "block_size to be a whole number, but got '4'"),
        ({"target_layer_ids": [1, "2"]}, "target_layer_ids to be a list of whole numbers"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps to be a number"),
        ({"enable_confidence_head": "false"}, "enable_confidence_head to be true or false"),
        ({"markov_head_type": "lstm"}, "markov_head to be one of vanilla, gated, rnn, pair"),
        ({"markov_head_type": "pair"}, "a draft model that the layout knows, but it has markov_head pair"),
        ({"model_type": "llama"}, "model_type to be absent or 'qwen3'"),
        ({"hidden_act": "gelu"}, "hidden_act to be absent or 'silu'"),
        ({"mlp_bias": True}, "mlp_bias to be absent or False"),
        ({"sample_from_anchor": False}, "sample_from_anchor to be absent or True"),
        ({"draft_vocab_size": 12}, "draft_vocab_size to be absent or 40"),
        ({"target_hidden_size": 8}, "target_hidden_size to be absent or 16"),
        ({"dspark_draft_topk": 16}, "dspark_draft_topk to be absent or no value"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types all full_attention"),
        ({"layer_types": 5}, "layer_types all full_attention"),
        ({"layer_types": None, "use_sliding_window": True}, "layer_types all full_attention"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor to be absent or 1"),
    ],
)
def test_configs_that_are_not_read(written, fields, message):
    change_config(written, **fields)
    with pytest.raises(DsparkError, match=message):
        read_deepspec(written)


def test_values_that_say_what_we_do_are_read(written):
    before = read_deepspec(written)[0]
    change_config(written, draft_vocab_size=40, target_hidden_size=16, sample_from_anchor=True, model_type=None)
    assert read_deepspec(written)[0] == before


def test_no_checkpoint_at_all(written, tmp_path):
    with pytest.raises(DsparkError, match=r"config\.json"):
        read_deepspec(tmp_path / "nothing")
    (written / "config.json").write_text("[]")
    with pytest.raises(DsparkError, match="a JSON object"):
        read_deepspec(written)
    (written / "config.json").write_text(json.dumps(EXPECTED))
    data = (written / "model.safetensors").read_bytes()
    (written / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(DsparkError, match="readable safetensors"):
        read_deepspec(written)
    (written / "model.safetensors").unlink()
    with pytest.raises(DsparkError, match=r"model\.safetensors"):
        read_deepspec(written)


def test_an_older_file_without_the_newer_rope():
    old = {key: value for key, value in EXPECTED.items() if key not in ("rope_parameters", "rope_scaling")}
    assert deepspec_config(old, "here") == deepspec_config(EXPECTED, "here")
