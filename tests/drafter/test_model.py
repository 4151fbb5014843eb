"""The draft model: training and drafting agree bit for bit, a block depends on itself alone, nothing of the target is
owned."""

from __future__ import annotations

import copy

import pytest
import torch

from dspark.contracts import DsparkError
from tests.drafter.checks import (
    assert_all_get_gradients,
    assert_alone,
    assert_paths_agree,
    assert_proposes_as_forced,
    forced,
    propose,
)

HEADS = ("none", "vanilla", "gated", "rnn", "pair", "fusion", "law")
DTYPES = (torch.float32, torch.bfloat16)


def fields_of(head: str) -> dict:
    if head == "fusion":
        return {**fields_of("vanilla"), "input_fusion": True}
    if head == "law":
        return {**fields_of("gated"), "confidence_with_law": True}
    if head == "none":
        return {"confidence_head": True}
    return {"markov_head": head, "markov_rank": 6, "confidence_head": True, "confidence_with_markov": True}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("extra", [{}, {"draft_vocab_size": 20}, {"sliding_window": 5}, {"sample_from_anchor": False}])
def test_teacher_forced_equals_propose_bit_for_bit(drafter, batch, dtype, head, extra):
    model = drafter(dtype, **fields_of(head), **extra).eval()
    assert_proposes_as_forced(model, batch(model.config, dtype=dtype))


@pytest.mark.parametrize("head", HEADS)
def test_a_shorter_gamma_draws_the_same_tokens(drafter, batch, head):
    model = drafter(**fields_of(head)).eval()
    data = batch(model.config)
    whole, short = propose(model, data), propose(model, data, gamma=2)
    assert torch.equal(short[0].token_ids, whole[0].token_ids[:, :2])
    assert torch.equal(short[1], whole[1][:, :2])
    assert torch.equal(short[0].confidence_logits, whole[0].confidence_logits[:, :2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head", HEADS)
def test_a_block_does_not_depend_on_its_batch(drafter, batch, dtype, head):
    model = drafter(dtype, **fields_of(head)).eval()
    assert_alone(model, batch(model.config, dtype=dtype))


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (4, 1), (6, 3)])
@pytest.mark.parametrize("extra", [{}, {"sliding_window": 5}])
def test_any_grouping_of_heads_trains_and_drafts(drafter, batch, heads, kv_heads, extra):
    """One query head per key head (multi-head attention, as in Llama 2), one key head for all, and in between."""
    model = drafter(num_heads=heads, num_kv_heads=kv_heads, **fields_of("vanilla"), **extra)
    data = batch(model.config)
    assert_paths_agree(model, data)
    assert_all_get_gradients(model, data)
    assert_proposes_as_forced(model.eval(), data)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("extra", [{}, {"sliding_window": 5}, {"qk_norm": False}, {"draft_vocab_size": 20}])
def test_training_path_agrees_with_inference_path(drafter, batch, head, extra):
    biases = {"attention_bias": True, "attention_out_bias": True, "mlp_bias": True}
    model = drafter(**fields_of(head), **extra, **biases)
    assert_paths_agree(model, batch(model.config))


@pytest.mark.parametrize("training", [True, False])
def test_no_blocks_at_all(drafter, batch, full, training):
    model = drafter(**full).train(training)
    out = forced(model, batch(model.config, per_sequence=0))
    assert out.logits.shape == (0, 4, 61)
    if training:
        (out.logits.sum() + out.confidence_logits.sum()).backward()


def test_target_weights_are_lent_not_owned(drafter, batch, full):
    model = drafter(**full)
    embed, head = (torch.randn(61, 24).requires_grad_() for _ in range(2))
    model.bind(embed, head).train()
    forced(model, batch(model.config)).logits.sum().backward()
    assert embed.grad is None
    assert head.grad is None
    owned = {t.data_ptr() for t in model.state_dict().values()}
    assert not owned & {embed.data_ptr(), head.data_ptr()}
    shapes = {n for n, t in model.state_dict().items() if tuple(t.shape) == (61, 24)}
    assert not shapes
    assert copy.deepcopy(model)._bound is model._bound


def test_every_parameter_gets_a_gradient(drafter, batch, full):
    for head in HEADS[1:]:
        model = drafter(**{**full, **fields_of(head)})
        assert_all_get_gradients(model, batch(model.config))


def test_first_slot_is_trained(drafter, batch, full):
    model = drafter(**full).train()
    out = forced(model, batch(model.config))
    out.logits.retain_grad()
    out.logits[:, 0].logsumexp(-1).sum().backward()
    assert bool(out.logits.grad[:, 0].any())
    assert not bool(out.logits.grad[:, 1:].any())


def test_stop_gradient_and_a_head_trained_alone(drafter, batch, full):
    model = drafter(**full, stop_gradient=True).train()
    forced(model, batch(model.config)).confidence_logits.sum().backward()
    assert {n for n, p in model.named_parameters() if p.grad is not None} == {
        "confidence_head.proj.weight", "confidence_head.proj.bias",
    }  # fmt: skip
    model = drafter(**full).eval()
    model.confidence_head.train()
    data = batch(model.config)
    out = forced(model, data)
    assert not out.logits.requires_grad
    out.confidence_logits.sum().backward()
    assert {n.split(".")[0] for n, p in model.named_parameters() if p.grad is not None} == {"confidence_head"}


def test_foreign_target_is_refused(drafter):
    with pytest.raises(DsparkError, match=r"\[61, 24\].*\[61, 32\]"):
        drafter().bind(torch.zeros(61, 32), torch.zeros(61, 32))


def test_columns_and_ids(drafter):
    model = drafter(draft_vocab_size=20)
    assert torch.equal(model.vocab_ids(model.to_columns(model.draft_ids)), model.draft_ids)
    absent = torch.tensor([i for i in range(61) if i not in model.draft_ids.tolist()])
    assert bool((model.to_columns(absent) == -1).all())


def test_same_seed_same_weights(drafter):
    torch.manual_seed(0)
    one, two, other = drafter(seed=5), drafter(seed=5), drafter(seed=6)
    assert torch.equal(one.fc.weight, two.fc.weight)
    assert not torch.equal(one.fc.weight, other.fc.weight)
    assert torch.initial_seed() == 0


@pytest.mark.parametrize("convention", [True, False])
@pytest.mark.parametrize("fusion", [True, False])
def test_overfitting_one_sequence_drafts_it_whole(drafter, batch, full, convention, fusion):
    """Both conventions learn a sequence and then propose it; read the other way, the same weights fall apart."""
    full = {**full, "input_fusion": fusion}
    model = drafter(**full, sample_from_anchor=convention, block_size=4 if convention else 5).train()
    data = batch(model.config, lengths=(24,), per_sequence=0)
    anchors = torch.arange(2, 18)
    blocks = type(data.blocks)(
        data.ids[anchors], anchors, data.ids[anchors[:, None] + 1 + torch.arange(4)],
        torch.ones(16, 4, dtype=torch.bool), torch.zeros_like(anchors), anchors,
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        logits = forced(model, data, blocks).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), blocks.labels.flatten()).backward()
        optimizer.step()
    data = type(data)(data.ids, data.offsets, data.features, data.positions, blocks, data.sequence)
    assert torch.equal(propose(model.eval(), data)[0].token_ids, blocks.labels)
    if fusion:
        return  # its weights have the block size in their shape: read the other way, they do not load
    values = {**model.config.to_dict(), "sample_from_anchor": not convention}
    values["block_size"] = 5 if convention else 4
    wrong = drafter(**{k: v for k, v in values.items() if k in ("sample_from_anchor", "block_size")}, **full)
    wrong.load_state_dict(model.state_dict())
    wrong.bind(model._bound._embed, model._bound._head)
    tokens = propose(wrong.eval(), data)[0].token_ids
    width = min(tokens.shape[1], 4)
    assert (tokens[:, :width] == blocks.labels[:, :width]).float().mean() < 0.5
