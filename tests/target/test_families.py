"""config.json to DecoderConfig: defaults, windows, and one clear error for each thing refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dspark.contracts import DsparkError
from dspark.target.families import FAMILIES, DecoderConfig, read_config
from dspark.target.rope import RopeConfig, RopeTable

BASE: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def config_of(family: str, **fields: Any) -> DecoderConfig:
    return read_config({"architectures": [f"{family}ForCausalLM"], **BASE, **fields})


def test_model_type_stands_in_for_a_missing_architecture():
    types = ("llama", "qwen2", "qwen3", "mistral")
    assert tuple(read_config({"model_type": t, **BASE}).architecture for t in types) == FAMILIES[:4]
    assert FAMILIES[4:] == ("YocoForCausalLM",)  # ours, with a name of its own: tests/target/test_yoco.py


def test_each_family_has_its_own_defaults():
    assert config_of("Llama").head_dim == 8
    assert config_of("Qwen3").head_dim == 128
    assert config_of("Mistral").windows == (4096,) * 3
    assert config_of("Mistral", sliding_window=None).windows == (0,) * 3
    assert config_of("Qwen2").windows == (0,) * 3  # sliding_window without use_sliding_window means nothing
    flags = [(c.qkv_bias, c.output_bias, c.qk_norm) for c in map(config_of, ("Llama", "Qwen2", "Qwen3", "Mistral"))]
    assert flags == [(False,) * 3, (True, False, False), (False, False, True), (False,) * 3]
    assert config_of("Mistral", attention_bias=True).qkv_bias is False


def test_qwen_windows_follow_layer_types_or_max_window_layers():
    sliding = {"use_sliding_window": True, "sliding_window": 7}
    assert config_of("Qwen2", **sliding, max_window_layers=1).windows == (0, 7, 7)
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    assert config_of("Qwen3", **sliding, layer_types=types).windows == (7, 0, 7)


def test_both_rope_schemas_say_the_same():
    scaling = {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 16}
    old = config_of("Llama", rope_theta=5e5, rope_scaling={"type": "llama3", **scaling})
    new = config_of("Llama", rope_parameters={"rope_type": "llama3", "rope_theta": 500000, **scaling})
    assert old == new
    assert old.rope == RopeConfig("llama3", 5e5, 8.0, 16, 1.0, 4.0)
    assert config_of("Llama").rope == RopeConfig()


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": [], "model_type": "gemma"}, "gemma"),
        ({"vocab_size": None}, "vocab_size"),
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads"),
        ({"head_dim": 7}, "even head_dim"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, "dynamic"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor 0.25"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "one flat dict"),
        ({"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "linear", "factor": 2}}, "to agree"),
        ({"architectures": ["Qwen2ForCausalLM"], "layer_types": ["sliding_attention"] * 3}, "use_sliding_window"),
        ({"architectures": ["MistralForCausalLM"], "layer_types": ["full_attention"] * 3}, "sliding_attention"),
        ({"architectures": ["Qwen3ForCausalLM"], "layer_types": ["full_attention"]}, "one attention window per layer"),
    ],
)
def test_what_is_refused_is_named(fields: dict[str, Any], says: str):
    with pytest.raises(DsparkError, match="target config: expected") as caught:
        read_config({"architectures": ["LlamaForCausalLM"], **BASE, **fields})
    assert says in str(caught.value)


def test_rope_rows_do_not_depend_on_how_the_table_grew():
    rope = RopeConfig("linear", factor=4.0)
    at_once, grown = RopeTable(rope, 8, block=16), RopeTable(rope, 8, block=16)
    positions = torch.tensor([70, 3, 3, 15, 16])
    grown.at(torch.tensor([2]))
    grown.at(torch.tensor([20]))
    assert all(torch.equal(a, b) for a, b in zip(at_once.at(positions), grown.at(positions), strict=True))
