"""RoPE in both schemas: what we write is one rotation for either reader, ours and transformers'."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dspark.contracts import DsparkError
from dspark.drafter.rope import Rope
from dspark.export.qwen3 import layer_keys, read_rope_parameters

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_theta": 5e4, "rope_type": "default"},
    "linear": {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0},
    "llama3": {"rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
    "yarn": {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "yarn, all said": {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0, "beta_slow": 2.0,
                       "original_max_position_embeddings": 32, "attention_factor": 1.5, "truncate": False},
}  # fmt: skip
NEWER, OLDER = ("rope_parameters",), ("rope_theta", "rope_scaling")


@pytest.fixture(params=ROPES, ids=list(ROPES))
def keys(request, make_target, make_draft, raw) -> dict[str, Any]:
    config = make_draft(make_target(), rope_parameters=ROPES[request.param]).config
    return layer_keys(config, raw)


@pytest.mark.parametrize("dropped", [(), NEWER, OLDER], ids=["both", "older", "newer"])
def test_one_rotation_in_either_schema(keys, dropped):
    transformers = pytest.importorskip("transformers")
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    kept = {key: value for key, value in keys.items() if key not in dropped}
    rope = read_rope_parameters(kept, "here")
    assert rope == keys["rope_parameters"]
    theirs = Qwen3RotaryEmbedding(transformers.Qwen3Config(**kept))
    positions = torch.arange(200)[None]  # past the 32 of pretraining
    cos, sin = theirs(torch.zeros(1, 200, 16), positions)
    ours = Rope(rope, keys["head_dim"])(positions[0])
    for got, expected in zip(ours, (cos, sin), strict=True):
        torch.testing.assert_close(got, expected[0, :, :4], rtol=0, atol=1e-5)  # two cosines of one fp32 angle


def test_what_older_files_and_harmless_values_say():
    yarn = {"factor": 4.0, "original_max_position_embeddings": 32}
    old = {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", **yarn}}
    assert read_rope_parameters(old, "here") == ROPES["yarn"]
    both = {**old, "rope_parameters": ROPES["yarn"]}
    assert read_rope_parameters(both, "here") == ROPES["yarn"]
    whole = {"rope_parameters": {**ROPES["default"], "partial_rotary_factor": 1.0}}
    assert read_rope_parameters(whole, "here") == ROPES["default"]


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({}, "rope_parameters.rope_theta or rope_theta, but got neither"),
        ({"rope_parameters": {"rope_type": "default"}}, "got neither"),
        ({"rope_parameters": {**ROPES["default"], "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": {"full_attention": ROPES["default"]}}, "one flat object for all layers"),
        ({"rope_parameters": [1]}, "one flat object for all layers"),
        ({"rope_parameters": {**ROPES["default"], "rope_theta": "many"}}, "numbers in rope_parameters"),
        ({"rope_parameters": ROPES["default"], "rope_theta": 1e4}, "the same RoPE in both schemas"),
        ({"rope_parameters": ROPES["default"], "rope_scaling": {"type": "linear", "factor": 2}}, "in both schemas"),
    ],
)
def test_refused(raw, message):
    with pytest.raises(DsparkError, match=message):
        read_rope_parameters(raw, "here")
