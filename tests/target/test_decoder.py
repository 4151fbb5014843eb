"""The decoder against transformers (fp32, eager): logits and tapped hidden states, family by family."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from dspark.contracts import DsparkError
from dspark.target.load import load_target

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
WIDE = {**YARN, "original_max_position_embeddings": 64}  # long enough for the ramp's end to fall between pairs
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "Llama", {}),
    ("llama tied", "Llama", {"tie_word_embeddings": True}),
    ("llama one kv head", "Llama", {"num_key_value_heads": 1}),
    ("llama all biases", "Llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama wide heads", "Llama", {"head_dim": 16}),
    ("llama padded vocab", "Llama", {"vocab_size": 128, "tie_word_embeddings": True}),
    ("llama3 rope", "Llama", {"rope_parameters": LLAMA3}),
    ("linear rope", "Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    ("qwen2", "Qwen2", {"tie_word_embeddings": True}),
    ("qwen2 yarn", "Qwen2", {"rope_parameters": YARN}),
    ("qwen2 sliding", "Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    ("qwen3", "Qwen3", {"head_dim": 16}),
    ("qwen3 biased tied", "Qwen3", {"attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 1}),
    ("qwen3 yarn, ramp not rounded", "Qwen3", {"head_dim": 16, "rope_parameters": {**WIDE, "truncate": False}}),
    ("mistral, window shorter than the sequence", "Mistral", {"sliding_window": 6}),
    ("mistral, no window", "Mistral", {"sliding_window": None, "tie_word_embeddings": True}),
]


@pytest.mark.parametrize(("family", "fields"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_logits_and_taps_equal_transformers(save_checkpoint, family: str, fields: dict[str, Any]):
    directory, theirs = save_checkpoint(family, **fields)
    ours = load_target(directory, "float32")
    sequences = [torch.randint(0, 97, (n,), generator=torch.Generator().manual_seed(n)) for n in (23, 1, 9)]
    taps = (-1, 0, 2)
    hidden, features, offsets = ours.forward_sequences(sequences, taps)
    logits = ours.logits(hidden)
    assert logits.shape == (33, ours.vocab_size)
    assert features.shape == (33, 3 * 32)
    before_norm: list[torch.Tensor] = []  # transformers' own last hidden state is the one after the norm
    theirs.model.norm.register_forward_pre_hook(lambda module, args: before_norm.append(args[0]))
    for r, ids in enumerate(sequences):
        with torch.no_grad():
            result = theirs(ids[None], output_hidden_states=True)
        part = slice(int(offsets[r]), int(offsets[r + 1]))
        torch.testing.assert_close(logits[part], result.logits[0], atol=1e-4, rtol=0)
        embedding, first, last = features[part].split(32, dim=1)
        torch.testing.assert_close(embedding, result.hidden_states[0][0], atol=0, rtol=0)
        torch.testing.assert_close(first, result.hidden_states[1][0], atol=1e-4, rtol=0)
        torch.testing.assert_close(last, before_norm[r][0], atol=1e-4, rtol=0)


def test_the_older_rope_schema_gives_the_same_bits(save_checkpoint):
    directory, _ = save_checkpoint("Llama", rope_parameters=LLAMA3)
    ids = [torch.arange(20)]
    newer = load_target(directory, "float32").forward_sequences(ids)[0]
    path = directory / "config.json"
    raw = json.loads(path.read_text())
    assert raw["rope_parameters"].pop("rope_theta") == 5e5
    raw |= {"rope_theta": 5e5, "rope_scaling": raw.pop("rope_parameters")}
    path.write_text(json.dumps(raw))
    assert torch.equal(newer, load_target(directory, "float32").forward_sequences(ids)[0])


def test_taps_come_in_the_order_asked_for(tiny_target):
    target, ids = tiny_target(), [torch.arange(5)]
    one = {tap: target.forward_sequences(ids, (tap,))[1] for tap in (-1, 0, 1, 2)}
    many = target.forward_sequences(ids, (2, -1, 0, 2))[1]
    assert torch.equal(many, torch.cat([one[2], one[-1], one[0], one[2]], dim=1))
    assert torch.equal(one[-1], target.embed(ids[0]))
    assert target.forward_sequences(ids)[1] is None


@pytest.mark.parametrize("tap", [-2, 3])
def test_a_tap_the_target_does_not_have_is_refused(tiny_target, tap: int):
    with pytest.raises(DsparkError, match=rf"from -1 \(embedding\) to 2, but got \[{tap}\]"):
        tiny_target().forward_sequences([torch.arange(3)], (0, tap))


def test_features_can_be_trained_on(tiny_target):
    hidden, features, _ = tiny_target().forward_sequences([torch.arange(4)], (1,))
    weight = torch.ones(32, requires_grad=True)
    (features * weight).sum().backward()  # would fail on inference tensors
    assert not hidden.requires_grad
    assert torch.equal(weight.grad, features.sum(0))
