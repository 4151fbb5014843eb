"""Rotary tables: the usual formulas, and bits that depend on the position alone."""

from __future__ import annotations

import pytest
import torch

from dspark.drafter.rope import Rope, rotate

TYPES = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 512},
}  # fmt: skip


@pytest.mark.parametrize("kind", TYPES)
def test_equals_transformers(kind):
    utils = pytest.importorskip("transformers.modeling_rope_utils")
    from transformers import LlamaConfig

    parameters = {"rope_theta": 50000.0, "rope_type": kind, **TYPES[kind]}
    rope = Rope(parameters, 16)
    if kind == "default":
        inverse, factor = 1.0 / 50000.0 ** (torch.arange(0, 16, 2).float() / 16), 1.0
    else:
        config = LlamaConfig(
            hidden_size=64, num_attention_heads=4, max_position_embeddings=4096, rope_parameters=parameters
        )
        inverse, factor = utils.ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    positions = torch.tensor([0, 1, 511, 2000])
    cos, sin = rope(positions)
    angles = positions[:, None].float() * inverse
    torch.testing.assert_close(cos, angles.cos() * factor, rtol=0, atol=2e-4)  # fp32 angles near 2000
    torch.testing.assert_close(sin, angles.sin() * factor, rtol=0, atol=2e-4)


def test_bits_do_not_depend_on_how_the_table_grew():
    parameters = {"rope_theta": 10000.0, "rope_type": "default"}
    grown, whole = Rope(parameters, 24), Rope(parameters, 24)
    positions = torch.arange(1000)
    for position in (0, 63, 64, 700):
        grown(torch.tensor([position]))
    for a, b in zip(grown(positions), whole(positions), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(whole(positions.view(10, 100))[0], whole(positions)[0].view(10, 100, 12))


def test_rotation_keeps_lengths_and_relative_angles():
    rope, generator = Rope({"rope_theta": 100.0, "rope_type": "default"}, 8), torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 1, 1, 8, generator=generator)

    def product(a: int, b: int) -> torch.Tensor:
        return (rotate(x, *rope(torch.tensor([a]))) * rotate(y, *rope(torch.tensor([b])))).sum()

    torch.testing.assert_close(product(3, 10), product(53, 60))
    torch.testing.assert_close(rotate(x, *rope(torch.tensor([9]))).norm(), x.norm())
