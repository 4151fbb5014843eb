"""The sequential draft model: it is what its docstring says, token by token as with known tokens, each block alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn.functional import linear, rms_norm, silu

from dspark.contracts import DsparkError
from dspark.drafter.context import Context
from dspark.drafter.initialise import initialise_from_target
from dspark.drafter.mtp import SequentialBlock
from dspark.drafter.regression import start_by_regression
from tests.drafter.checks import forced, propose, shifted
from tests.drafter.test_initialise import make_drafter as for_target
from tests.drafter.test_initialise import make_target
from tests.drafter.test_regression import logits_of, observations

MTP: dict[str, Any] = {"architecture": "mtp", "num_layers": 4, "confidence_head": True}
RNN: dict[str, Any] = {"markov_rank": 6, "markov_head": "rnn", "confidence_with_markov": True}
DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("extra", [{}, {"draft_vocab_size": 20}, {"sliding_window": 5}, RNN, {"qk_norm": False}])
def test_teacher_forced_equals_propose_bit_for_bit(drafter, batch, dtype, extra):
    model = drafter(dtype, **MTP, **extra).eval()
    data = batch(model.config, dtype=dtype)
    proposal, seen = propose(model, data)
    b, context = data.blocks, model.encode(data.features, data.positions)
    out = model.teacher_forced(b.anchor_ids, b.anchor_positions, proposal.token_ids, context, b.begin, b.end)
    assert proposal.token_ids.shape == (15, 4)
    assert torch.equal(out.logits, seen)
    assert torch.equal(out.confidence_logits, proposal.confidence_logits)
    other = model.teacher_forced(*b.inputs(context))  # other tokens than the proposed: the check above can fail
    assert not torch.equal(other.logits[:, 1:], seen[:, 1:])


def test_a_shorter_gamma_draws_the_same_tokens(drafter, batch):
    model = drafter(**MTP, **RNN).eval()
    data = batch(model.config)
    whole, short = propose(model, data), propose(model, data, gamma=2)
    assert torch.equal(short[0].token_ids, whole[0].token_ids[:, :2])
    assert torch.equal(short[1], whole[1][:, :2])
    assert torch.equal(short[0].confidence_logits, whole[0].confidence_logits[:, :2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_block_does_not_depend_on_its_batch(drafter, batch, dtype):
    """Reversed, alone, and with the context moved to other arena rows: the same bits."""
    model = drafter(dtype, **MTP).eval()
    data = batch(model.config, dtype=dtype)
    b, context = data.blocks, model.encode(data.features, data.positions)
    whole = model.teacher_forced(*b.inputs(context))
    back = torch.arange(15).flip(0)
    args = [t[back] for t in (b.anchor_ids, b.anchor_positions, b.labels)]
    assert torch.equal(model.teacher_forced(*args, context, b.begin[back], b.end[back]).logits, whole.logits[back])
    moved = Context([tuple(map(shifted, layer)) for layer in context.layers], shifted(context.features))
    for i in range(15):
        args = [t[i : i + 1] for t in (b.anchor_ids, b.anchor_positions, b.labels)]
        alone = model.teacher_forced(*args, moved, b.begin[i : i + 1] + 11, b.end[i : i + 1] + 11)
        assert torch.equal(alone.logits[0], whole.logits[i])
        assert torch.equal(alone.confidence_logits[0], whole.confidence_logits[i])


@pytest.mark.parametrize("extra", [{}, {"sliding_window": 5}, {"qk_norm": False}, RNN])
def test_training_path_agrees_with_inference_path(drafter, batch, extra):
    biases = {"attention_bias": True, "attention_out_bias": True, "mlp_bias": True}
    model = drafter(**MTP, **extra, **biases)
    data = batch(model.config)
    one, two = forced(model.train(), data), forced(model.eval(), data)
    torch.testing.assert_close(one.logits, two.logits, rtol=0, atol=1e-4)  # four layers and fusions, rounded each
    torch.testing.assert_close(one.confidence_logits, two.confidence_logits, rtol=0, atol=1e-4)
    assert one.logits.requires_grad
    assert not two.logits.requires_grad


def written_out(model, ids, features, position):
    """The docstring's formulas for one block, one head and one key at a time: hidden [P,H]. ids: the anchor, then the
    tokens behind it; features [p, n*H] of positions 0 .. p-1."""
    config = model.config
    size, share, eps = config.head_dim, config.num_heads // config.num_kv_heads, config.rms_norm_eps

    def normed(x, norm):
        return rms_norm(x, x.shape[-1:], norm.weight, eps)

    def heads(x, proj, norm, at):
        x = linear(x, proj.weight).view(-1, size)
        if norm is None:
            return x
        angle = at / 10000.0 ** (torch.arange(0, size, 2) / size)
        a, b = normed(x, norm).chunk(2, dim=-1)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)

    context = normed(linear(features, model.fc.weight), model.hidden_norm)
    state = context[-1] if len(context) else torch.zeros(config.hidden_size)
    inputs, out = [], []
    for k in range(config.block_size):
        join, layer = model.joins[k], model.layers[k]
        attn, token = layer.self_attn, model.embed(ids[k])
        inputs.append(
            linear(torch.cat([normed(state, join.state_norm), normed(token, join.embed_norm)]), join.proj.weight)
        )
        near = [normed(x, layer.input_layernorm) for x in inputs]
        window = config.sliding_window or position
        seen = [(t, x) for t, x in enumerate(context) if t >= position - window]
        seen += [(position + i, x) for i, x in enumerate(near)]
        keys = [heads(x, attn.k_proj, attn.k_norm, t) for t, x in seen]
        values = [heads(x, attn.v_proj, None, t) for t, x in seen]
        rows = []
        for h, q in enumerate(heads(near[-1], attn.q_proj, attn.q_norm, position + k)):
            weights = torch.stack([q @ key[h // share] / math.sqrt(size) for key in keys]).softmax(0)
            rows.append(sum(w * value[h // share] for w, value in zip(weights, values, strict=True)))
        x = inputs[-1] + linear(torch.cat(rows), attn.o_proj.weight)
        y, mlp = normed(x, layer.post_attention_layernorm), layer.mlp
        state = x + linear(silu(linear(y, mlp.gate_proj.weight)) * linear(y, mlp.up_proj.weight), mlp.down_proj.weight)
        out.append(normed(state, model.norm))
    return torch.stack(out)


@torch.no_grad()
@pytest.mark.parametrize("window", [0, 3])
def test_it_is_what_the_docstring_says(drafter, batch, window):
    model = drafter(**MTP, sliding_window=window).eval()
    data = batch(model.config, lengths=(12,), per_sequence=0)
    context = model.encode(data.features, data.positions)
    for position in (0, 1, 7):
        ids, zero = data.ids[position : position + 5], torch.zeros(1, dtype=torch.int64)
        at = torch.tensor([position])
        got = model.teacher_forced(ids[:1], at, ids[None, 1:], context, zero, at).hidden[0]
        wanted = written_out(model, ids, data.features[:position], position)
        torch.testing.assert_close(got, wanted, rtol=0, atol=2e-5)


def test_a_slot_knows_the_tokens_before_it_and_no_others(drafter, batch):
    model = drafter(**MTP).eval()
    data = batch(model.config)
    b, context = data.blocks, model.encode(data.features, data.positions)
    hidden = model.teacher_forced(*b.inputs(context)).hidden
    for slot in range(4):
        labels = b.labels.clone()
        labels[:, slot] = (labels[:, slot] + 1) % 61
        changed = model.teacher_forced(b.anchor_ids, b.anchor_positions, labels, context, b.begin, b.end).hidden
        assert torch.equal(changed[:, : slot + 1], hidden[:, : slot + 1])
        assert bool((changed[:, slot + 1 :] != hidden[:, slot + 1 :]).any(-1).all())


def test_every_parameter_gets_a_gradient_and_none_is_idle(drafter, batch):
    for extra in ({}, RNN):
        model = drafter(**MTP, **extra).train()
        out = forced(model, batch(model.config))
        (out.logits.logsumexp(-1).sum() + out.confidence_logits.sum()).backward()
        assert all(p.grad is not None and bool(p.grad.any()) for p in model.parameters())
    names = {n.split(".")[0] for n in drafter(**MTP).state_dict()}
    assert names == {"fc", "hidden_norm", "joins", "layers", "norm", "confidence_head"}
    assert not any(n.startswith("joins") for n in drafter().state_dict())


@pytest.mark.parametrize("training", [True, False])
def test_no_blocks_at_all(drafter, batch, training):
    model = drafter(**MTP).train(training)
    out = forced(model, batch(model.config, per_sequence=0))
    assert out.logits.shape == (0, 4, 61)
    assert out.confidence_logits.shape == (0, 4)


def test_slots_are_walked_in_order(drafter, batch):
    model = drafter(**MTP).eval()
    data = batch(model.config)
    b, context = data.blocks, model.encode(data.features, data.positions)
    block = SequentialBlock(model, model.joins, b.anchor_positions, context, b.begin, b.end)
    with pytest.raises(AssertionError, match="in order"):
        block.step(1, b.anchor_ids)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"architecture": "eagle"}, "architecture to be one of dspark, mtp"),
        ({**MTP, "num_layers": 2}, "num_layers to be block_size 4 with architecture mtp"),
        ({**MTP, "num_layers": 4, "block_size": 5, "sample_from_anchor": False}, "sample_from_anchor to be true"),
        ({**MTP, "input_fusion": True}, "input_fusion to be false with architecture mtp"),
        ({**MTP, "hidden_size": 32, "convolution": True}, "convolution to be false with architecture mtp"),
    ],
)
def test_configs_that_mean_nothing_are_refused(config, fields, said):
    with pytest.raises(DsparkError, match=said):
        config(**fields)


def test_an_older_config_is_a_parallel_one(config):
    values = config().to_dict()
    del values["architecture"]
    assert type(config()).from_dict(values) == config()
    assert "architecture" not in config().identity()
    assert config(**MTP).identity()["architecture"] == "mtp"


# Starts


def test_layers_are_copied_from_the_target():
    target = make_target()
    model = for_target(target, architecture="mtp", num_layers=4)
    joins = {n: t.clone() for n, t in model.joins.state_dict().items()}
    initialise_from_target(model, target)
    for layer, theirs in zip(model.layers, target.layers, strict=True):
        assert torch.equal(layer.self_attn.o_proj.weight, theirs.output)
        assert torch.equal(layer.mlp.down_proj.weight, theirs.down)
    assert all(torch.equal(t, joins[n]) for n, t in model.joins.state_dict().items())
    with pytest.raises(DsparkError, match="target layer ids"):
        initialise_from_target(for_target(target, architecture="mtp", num_layers=5, block_size=5), target)


def test_the_least_squares_start_finds_a_linear_target(drafter):
    model = drafter(architecture="mtp", num_layers=4).eval()
    seen = observations(model)
    wanted = (seen.hidden @ model.head_columns().T).argmax(-1)
    before = (logits_of(model, seen).argmax(-1) == wanted).float().mean(0)
    start_by_regression(model, seen, ridge=1e-3)
    after = (logits_of(model, seen).argmax(-1) == wanted).float().mean(0)
    assert bool((before < 0.2).all())
    assert bool((after > 0.5).all()), after  # less than all at once: a later module reads what an earlier one left
    for layer in model.layers:
        assert not bool(layer.self_attn.o_proj.weight.any())


def test_the_start_leaves_out_what_does_not_count(drafter):
    model = drafter(architecture="mtp", num_layers=4)
    seen = observations(model, noise=0.5)
    seen.counted[100:, 2:] = False
    start_by_regression(model, seen)
    weights = {n: t.clone() for n, t in model.state_dict().items()}
    seen.hidden[100:, 2:] = float("nan")
    start_by_regression(model, seen)
    assert all(torch.equal(t, weights[n]) for n, t in model.state_dict().items())
    assert all(bool(t.isfinite().all()) for t in weights.values())
