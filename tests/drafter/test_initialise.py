"""Starts: layers copied from the target compute what the target computes, bigrams come back from the Markov head."""

from __future__ import annotations

import pytest
import torch

from dspark.contracts import DsparkError
from dspark.drafter.config import DrafterConfig
from dspark.drafter.initialise import bigram_counts, initialise_from_target, initialise_markov
from dspark.drafter.model import Drafter

families, decoder = pytest.importorskip("dspark.target.families"), pytest.importorskip("dspark.target.decoder")
weights = pytest.importorskip("dspark.target.weights")
V, H = 50, 24


def make_target(architecture: str = "LlamaForCausalLM", hidden: int = H):
    raw = {
        "architectures": [architecture], "vocab_size": V, "hidden_size": hidden, "intermediate_size": 40,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu", "max_position_embeddings": 128,
        "tie_word_embeddings": False,
    }  # fmt: skip
    config = families.read_config(raw)
    return decoder.Target(config, weights.random_weights(config, seed=3, dtype=torch.float32))


def make_drafter(target, **fields) -> Drafter:
    choices = {
        "block_size": 4, "mask_token_id": 0, "target_layer_ids": [0, 2], "sample_from_anchor": True, "num_layers": 2,
        "qk_norm": target.config.qk_norm, "attention_bias": target.config.qkv_bias,
    }  # fmt: skip
    config = DrafterConfig.for_target(target, **{**choices, **fields})
    return Drafter(config).bind(target.embed_weight, target.head_weight)


@torch.no_grad()
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_a_copied_layer_is_the_targets_layer(architecture):
    """One draft layer reading one tap, a block of one slot: context keys and values are the target's own."""
    target = make_target(architecture)
    drafter = make_drafter(target, num_layers=1, target_layer_ids=[2], block_size=1)
    initialise_from_target(drafter, target, layers=[3], final_norm=1.0)
    drafter.eval()
    ids = torch.arange(5, 12)
    hidden, features, _ = target.forward_sequences([ids], (2,))
    context = drafter.encode(features, torch.arange(7))
    embedded = features[-1:, None]  # stand in for the anchor's state: what enters the copied layer in the target
    rotary, spans = drafter.rope(torch.tensor([[6]])), _spans(0, 6)
    out = drafter.norm(drafter.layers[0](embedded, rotary, context.layers[0], spans))
    torch.testing.assert_close(out[0], hidden[-1:], rtol=0, atol=1e-4)


def _spans(begin: int, end: int):
    from dspark.drafter.attention import Spans

    return Spans(torch.tensor([begin]), torch.tensor([end]))


def test_parts_touch_only_what_they_name():
    target = make_target()
    plain, drafter = make_drafter(target), make_drafter(target)
    initialise_from_target(drafter, target, layers=(), fuse=False, final_norm=None)
    state = plain.state_dict()
    assert all(torch.equal(t, state[n]) for n, t in drafter.state_dict().items())
    initialise_from_target(drafter, target, layers=(), fuse=False, final_norm=0.01, residual_scale=0.0)
    assert torch.equal(drafter.norm.weight, target.final_norm * 0.01)
    changed = {n for n, t in drafter.state_dict().items() if not torch.equal(t, state[n])}
    assert {n.split(".")[-2] for n in changed} == {"norm", "o_proj", "down_proj"}


def test_layers_are_copied_into_a_model_with_options():
    """Convolutions stay the identity they start as; each layer's context norm is that layer's own input norm."""
    target = make_target(hidden=32)
    for layer in target.layers:
        layer.input_norm.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(int(layer.qkv[0, 0].abs() * 1e6)))
    plain, drafter = (make_drafter(target, layer_fusion=on, convolution=on) for on in (False, True))
    for one in (plain, drafter):
        initialise_from_target(one, target)
    norms = [target.layers[i].input_norm for i in (2, 3)]
    assert not torch.equal(*norms)
    assert [norm.weight.tolist() for _, norm in drafter.feature_maps] == [norm.tolist() for norm in norms]
    assert torch.equal(plain.hidden_norm.weight, torch.stack(norms).mean(dim=0))
    assert all(torch.equal(fc.weight, plain.fc.weight) for fc, _ in drafter.feature_maps)
    for one, other in zip(plain.layers, drafter.layers, strict=True):
        theirs = other.state_dict()
        assert all(torch.equal(theirs[name], tensor) for name, tensor in one.state_dict().items())
    taps = [p for name, p in drafter.named_parameters() if name.endswith("taps.weight")]
    assert len(taps) == 8
    assert not any(bool(p.any()) for p in taps)


def test_shapes_must_fit():
    target = make_target()
    normed = make_target("Qwen3ForCausalLM")
    with pytest.raises(DsparkError, match="qk_norm"):
        initialise_from_target(make_drafter(normed, qk_norm=False), normed)
    with pytest.raises(DsparkError, match="head_dim 8"):
        initialise_from_target(make_drafter(target, head_dim=4), target)
    for layers in ([3], [3, 4]):
        with pytest.raises(DsparkError, match="target layer ids"):
            initialise_from_target(make_drafter(target), target, layers=layers)
    initialise_from_target(make_drafter(target, head_dim=4), target, layers=())


def test_norms_that_the_target_lacks_start_at_one():
    target = make_target()
    plain, normed = make_drafter(target), make_drafter(target, qk_norm=True)
    for drafter in (plain, normed):
        initialise_from_target(drafter, target)
    before, after = plain.state_dict(), normed.state_dict()
    added = after.keys() - before.keys()
    assert len(added) == 2 * normed.config.num_layers
    assert all(bool((after[name] == 1).all()) for name in added)
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_bigram_counts():
    pairs, counts = bigram_counts([torch.tensor([5, 1, 5, 1]), torch.tensor([1, 1]), torch.tensor([7])])
    assert pairs.tolist() == [[1, 1], [1, 5], [5, 1]]
    assert counts.tolist() == [1, 1, 2]
    assert bigram_counts([])[0].shape == (0, 2)


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn", "pair"])
@pytest.mark.parametrize("vocabulary", [0, 30])
def test_bigrams_come_back_from_the_head(head, vocabulary):
    """At a rank that suffices, softmax(bias) is the smoothed bigram model of the text."""
    target = make_target()
    config = make_drafter(target, markov_rank=32, markov_head=head, draft_vocab_size=vocabulary).config
    ids = torch.arange(10, 40) if vocabulary else None
    drafter = Drafter(config, ids).bind(target.embed_weight, target.head_weight).train()
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(10, 40, (4000,), generator=generator)
    text[1::2] = 10 + (text[::2] * 7) % 30  # every second token follows from the one before it
    initialise_markov(drafter, *bigram_counts([text]), smoothing=2.0)
    pairs, counts = bigram_counts([text])
    table = torch.zeros(V, V).index_put((pairs[:, 0], pairs[:, 1]), counts.float())
    law = table.sum(0) + 0.5 if not vocabulary else (table.sum(0) + 0.5)[10:40]
    law = law / law.sum()
    table = table if not vocabulary else table[:, 10:40]
    expected = ((table + 2.0 * law) / (table.sum(1, keepdim=True) + 2.0))[10:40]
    bias = drafter.slot_bias(None, torch.zeros(30, H), torch.arange(10, 40))[0].detach()
    distance = (bias.softmax(-1) - expected).abs().sum(-1) / 2
    assert float(distance.mean()) < (0.05 if head == "rnn" else 0.01)
    again = Drafter(config, ids)
    initialise_markov(again, *bigram_counts([text]), smoothing=2.0)
    assert torch.equal(again.markov_head.markov_w1.weight, drafter.markov_head.markov_w1.weight)


def test_bigrams_need_a_head_and_known_tokens():
    target = make_target()
    pairs, counts = bigram_counts([torch.tensor([1, 2])])
    with pytest.raises(DsparkError, match="markov_rank 0"):
        initialise_markov(make_drafter(target), pairs, counts)
    config = make_drafter(target, markov_rank=2, draft_vocab_size=2).config
    with pytest.raises(DsparkError, match="draft vocabulary"):
        initialise_markov(Drafter(config, torch.tensor([5, 6])), pairs, counts)
