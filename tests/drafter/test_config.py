"""The config: round trips, refuses what it does not know, and every mix of heads works or gives one clear message."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace

import pytest
import torch

from dspark.contracts import DsparkError
from dspark.drafter.config import DrafterConfig
from dspark.drafter.model import Drafter


def test_round_trip(config, full):
    one = config(**full, rope_parameters={"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0})
    assert DrafterConfig.from_dict(json.loads(json.dumps(one.to_dict()))) == one


def test_unknown_and_missing_keys(config):
    values = config().to_dict()
    with pytest.raises(DsparkError, match="partial_rotary_factor"):
        DrafterConfig.from_dict({**values, "partial_rotary_factor": 0.5})
    for name in ("block_size", "mask_token_id", "target_layer_ids", "sample_from_anchor"):
        with pytest.raises(DsparkError, match=name):
            DrafterConfig.from_dict({k: v for k, v in values.items() if k != name})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_size", 0),
        ("block_size", True),
        ("mask_token_id", 61),
        ("mask_token_id", -1),
        ("target_layer_ids", ()),
        ("target_layer_ids", (2, 2)),
        ("target_layer_ids", (2, 1)),
        ("target_layer_ids", (-2, 1)),
        ("target_layer_ids", (1, 4)),
        ("num_heads", 3),
        ("head_dim", 7),
        ("markov_head", "lstm"),
        ("markov_rank", -1),
        ("draft_vocab_size", 61),
        ("sliding_window", -1),
        ("sample_from_anchor", None),
        ("candidates", -1),
        ("candidates", True),
        ("candidates", 62),
        ("convolution", 1),
        ("layer_fusion", "yes"),
        ("rope_parameters", {"rope_theta": 1e4}),
        ("rope_parameters", {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}),
        ("rope_parameters", {"rope_theta": 1e4, "rope_type": "dynamic", "factor": 2}),
    ],
)
def test_bad_values_are_named(config, field, value):
    with pytest.raises(DsparkError, match=field):
        config(**{field: value})


def test_options_that_do_not_fit_are_named(config):
    with pytest.raises(DsparkError, match=r"hidden_size to be a multiple of 16 with convolution: true.* got 24"):
        config(convolution=True)
    with pytest.raises(DsparkError, match=r"candidates to be 0 .all tokens. or an integer up to the 20 columns"):
        config(candidates=21, draft_vocab_size=20)
    with pytest.raises(DsparkError, match=r"num_layers to be at least 2 with layer_fusion: true, but got 1"):
        config(layer_fusion=True, num_layers=1)
    assert config(candidates=20, draft_vocab_size=20).candidates == 20


def test_options_at_their_default_leave_the_identity_alone(config, full):
    """What earlier models' hashes were taken over; a config written before the options reads as one without them."""
    options = {"layer_fusion": True, "convolution": True, "candidates": 4}
    plain = config(**full, hidden_size=32)
    assert not options.keys() & plain.identity().keys()
    old = {name: value for name, value in plain.to_dict().items() if name not in options}
    assert DrafterConfig.from_dict(old) == plain
    assert options.items() <= config(**full, hidden_size=32, **options).identity().items()


def test_dflash_convention_needs_two_slots(config):
    with pytest.raises(DsparkError, match="block_size"):
        config(block_size=1, sample_from_anchor=False)
    assert config(block_size=5, sample_from_anchor=False).num_predictions == 4
    assert config(block_size=5, sample_from_anchor=True).num_predictions == 5


MIXES = tuple(itertools.product(("vanilla", "gated", "rnn", "pair"), (0, 6), (False, True), (False, True), (0, 20)))


@pytest.mark.parametrize(("head", "rank", "confidence", "with_markov", "vocabulary"), MIXES)
def test_every_mix_of_heads_works_or_says_why(drafter, batch, head, rank, confidence, with_markov, vocabulary):
    fields = {
        "markov_head": head, "markov_rank": rank, "confidence_head": confidence,
        "confidence_with_markov": with_markov, "draft_vocab_size": vocabulary,
    }  # fmt: skip
    if with_markov and not (confidence and rank):
        with pytest.raises(DsparkError, match="confidence_with_markov"):
            drafter(**fields)
        return
    model = drafter(**fields).train()
    data = batch(model.config)
    out = model.teacher_forced(*data.blocks.inputs(model.encode(data.features, data.positions)))
    assert out.logits.shape == (15, 4, vocabulary or 61)
    assert (out.confidence_logits is not None) == confidence
    assert bool(torch.isfinite(out.logits).all())


def test_shapes_come_from_the_target_field_by_field():
    rope = SimpleNamespace(
        kind="llama3", theta=5e5, factor=8.0, original_max=8192, low_freq_factor=1.0, high_freq_factor=4.0,
        beta_fast=32.0, beta_slow=1.0, truncate=True, attention_factor=1.0,
    )  # fmt: skip
    shape = SimpleNamespace(intermediate_size=40, num_heads=4, num_kv_heads=2, head_dim=8, rms_norm_eps=1e-5, rope=rope)
    target = SimpleNamespace(config=shape, vocab_size=61, hidden_size=24, num_layers=4, fingerprint="abc")
    choices = {"block_size": 4, "mask_token_id": 0, "target_layer_ids": [1, 3], "sample_from_anchor": True}
    made = DrafterConfig.for_target(target, num_layers=1, num_heads=2, **choices)
    assert (made.num_heads, made.head_dim, made.target_fingerprint) == (2, 8, "abc")
    assert made.rope_parameters["original_max_position_embeddings"] == 8192
    with pytest.raises(DsparkError, match="sample_from_anchor"):
        DrafterConfig.for_target(target, block_size=4, mask_token_id=0, target_layer_ids=[1], num_layers=1)


def test_draft_vocabulary_must_be_there_and_ascending(config):
    one = config(draft_vocab_size=3)
    with pytest.raises(DsparkError, match="draft vocabulary"):
        Drafter(one, torch.arange(4))
    embed = torch.zeros(61, 24)
    for ids in (None, torch.tensor([2, 1, 5]), torch.tensor([1, 2, 61])):
        with pytest.raises(DsparkError, match="draft vocabulary"):
            Drafter(one, ids).bind(embed, embed).train().base_logits(torch.zeros(1, 24))
