"""Convolution, candidates and features per layer: alone and together, with every head, what holds for the plain draft
model holds; and each does what its docstring says."""

from __future__ import annotations

import json

import pytest
import torch

from dspark.drafter.candidates import keep_candidates
from dspark.drafter.config import DrafterConfig
from dspark.drafter.convolution import Convolution
from dspark.drafter.model import Drafter
from tests.drafter.checks import (
    assert_all_get_gradients,
    assert_alone,
    assert_paths_agree,
    assert_proposes_as_forced,
    forced,
)

ALL = {"convolution": True, "candidates": 5, "layer_fusion": True}
OPTIONS = [*({name: value} for name, value in ALL.items()), ALL]
HEADS = ("none", "vanilla", "gated", "rnn", "pair")
each_head = pytest.mark.parametrize("head", HEADS)
each_option = pytest.mark.parametrize("option", OPTIONS, ids="+".join)


def fields_of(head: str, **more) -> dict:
    heads = {"markov_head": head, "markov_rank": 6, "confidence_with_markov": True} if head != "none" else {}
    return {"hidden_size": 32, "confidence_head": True, **heads, **more}


@each_head
@each_option
@pytest.mark.parametrize("fusion", [False, True], ids=["masks", "fused"])
@pytest.mark.parametrize("convention", [True, False], ids=["anchor", "after"])
def test_teacher_forced_equals_propose_bit_for_bit(drafter, batch, head, option, fusion, convention):
    model = drafter(**fields_of(head, **option, input_fusion=fusion, sample_from_anchor=convention)).eval()
    assert_proposes_as_forced(model, batch(model.config))


@each_head
@pytest.mark.parametrize(
    "extra",
    [
        {"draft_vocab_size": 20},
        {"sliding_window": 5},
        {"num_layers": 1, "layer_fusion": False},
        {"num_layers": 3},
    ],
    ids=str,
)
def test_so_it_does_in_bf16_and_other_shapes(drafter, batch, head, extra):
    model = drafter(torch.bfloat16, **fields_of(head, **{**ALL, **extra})).eval()
    assert_proposes_as_forced(model, batch(model.config, dtype=torch.bfloat16))


@each_head
@each_option
@pytest.mark.parametrize("fusion", [False, True], ids=["masks", "fused"])
def test_a_block_does_not_depend_on_its_batch(drafter, batch, head, option, fusion):
    model = drafter(**fields_of(head, **option, input_fusion=fusion)).eval()
    assert_alone(model, batch(model.config))


@each_head
def test_nor_in_bf16(drafter, batch, head):
    model = drafter(torch.bfloat16, **fields_of(head, **ALL, input_fusion=True)).eval()
    assert_alone(model, batch(model.config, dtype=torch.bfloat16))


@each_head
@each_option
def test_both_paths_agree_and_every_parameter_gets_a_gradient(drafter, batch, head, option):
    """Taps multiply states four times a layer, and rounding with them: in fp32 either path is up to 1e-4 from fp64."""
    atol = 2e-4 if "convolution" in option else 3e-5
    for fusion in (False, True):
        model = drafter(**fields_of(head, **option, input_fusion=fusion))
        data = batch(model.config)
        assert_paths_agree(model, data, atol)
        assert_all_get_gradients(model, data)


@each_head
@each_option
def test_config_and_weights_round_trip(drafter, batch, head, option):
    model = drafter(**fields_of(head, **option)).eval()
    again = DrafterConfig.from_dict(json.loads(json.dumps(model.config.to_dict())))
    assert again == model.config
    other = Drafter(again, seed=9).bind(model._bound._embed, model._bound._head).eval()
    other.load_state_dict(model.state_dict())
    data = batch(model.config)
    assert torch.equal(forced(other, data).logits, forced(model, data).logits)


# Fresh weights


@each_head
def test_options_add_tensors_and_change_none(config, head):
    """The same seed, with and without: the shared tensors are equal, so an option alone tells two runs apart."""
    plain = Drafter(config(**fields_of(head)), seed=3).state_dict()
    assert not [name for name in plain if "taps" in name or "layer_features" in name]
    rich = Drafter(config(**fields_of(head, **ALL)), seed=3).state_dict()
    assert all(torch.equal(rich[name], tensor) for name, tensor in plain.items())
    taps = {f"layers.{i}.{where}.taps" for i in (0, 1) for where in
            ("before_attention", "after_attention", "before_mlp", "after_mlp")}  # fmt: skip
    new = {f"{name}.{part}" for name in taps for part in ("weight", "bias")}
    new |= {"layer_features.0.fc.weight", "layer_features.0.hidden_norm.weight"}
    assert rich.keys() - plain.keys() == new
    assert not torch.equal(rich["layer_features.0.fc.weight"], rich["fc.weight"])
    again = Drafter(config(**fields_of(head, **ALL)), seed=3).state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in rich.items())


@pytest.mark.parametrize("training", [True, False])
def test_convolutions_start_as_the_identity(config, batch, training):
    fields = fields_of("vanilla")
    models = [Drafter(config(**fields, convolution=on), seed=3).train(training) for on in (False, True)]
    vocabulary = [torch.randn(61, 32, generator=torch.Generator().manual_seed(i)) for i in (0, 1)]
    data = batch(models[0].config)
    plain, convolved = (forced(model.bind(*vocabulary), data).logits for model in models)
    assert torch.equal(plain, convolved)


# Convolution


def random_convolution(config) -> Convolution:
    part = Convolution(config(hidden_size=32, convolution=True))
    with torch.no_grad():
        for parameter in part.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    return part


@pytest.mark.parametrize("training", [True, False])
def test_convolution_formula(config, training):
    """Written out channel by channel, two blocks."""
    part = random_convolution(config).train(training)
    x = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        got, taps = part(x), x @ part.taps.weight.T + part.taps.bias
    for block in range(2):
        for slot in range(3):
            for channel in range(32):
                own, before = taps[block, slot, channel // 16], taps[block, slot, 2 + channel // 16]
                past = x[block, slot - 1, channel] if slot else 0.0
                wanted = own * x[block, slot, channel] + before * past
                assert abs(float(got[block, slot, channel] - wanted)) < 1e-5


def test_convolution_never_crosses_a_blocks_edge(config):
    """Nor looks ahead: the derivative of every output slot by every input slot."""
    part = random_convolution(config).train()
    x = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(2))
    reads = torch.autograd.functional.jacobian(part, x).abs().amax(dim=(2, 5)) > 0  # [2,3,2,3]
    wanted = torch.zeros(2, 3, 2, 3, dtype=torch.bool)
    for block in range(2):
        for slot in range(3):
            wanted[block, slot, block, max(slot - 1, 0) : slot + 1] = True
    assert torch.equal(reads, wanted)
    poisoned = x.clone()
    poisoned[0] = float("nan")
    part.eval()
    with torch.no_grad():
        assert torch.equal(part(poisoned)[1], part(x)[1])


# Candidates


@pytest.mark.parametrize("count", [1, 2, 5, 12, 13])
def test_candidates_are_the_first_of_a_stable_sort(count):
    """Many ties: values from a small set; the lowest columns win."""
    logits = torch.randint(-2, 3, (200, 13), generator=torch.Generator().manual_seed(0)).float()
    order = logits.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    wanted = torch.full_like(logits, -torch.inf).scatter(-1, order, logits.gather(-1, order))
    got = keep_candidates(logits, count)
    assert torch.equal(got, wanted)
    assert torch.equal(keep_candidates(logits[77], count), got[77])
    assert bool((logits[:, :-1] == logits[:, 1:]).any())


def test_candidates_of_all_or_of_broken_rows():
    row = torch.tensor([[1.0, float("nan"), 3.0, 2.0, 0.0]])
    assert torch.equal(keep_candidates(row[:, 2:], 0), row[:, 2:])
    for count in (1, 2, 4):
        assert bool(keep_candidates(row, count)[0, 1].isnan())
    low = torch.tensor([[-torch.inf, 1.0, -torch.inf, -torch.inf]])
    assert torch.equal(keep_candidates(low, 2), low)


@each_head
def test_the_bias_reorders_inside_the_candidates_of_the_base_logits(drafter, batch, head):
    """The support is the base logits' own, every other column is out whatever its bias; training keeps them all."""
    model = drafter(**fields_of(head, candidates=3)).eval()
    plain = drafter(**fields_of(head)).eval()
    if model.markov_head is not None:
        with torch.no_grad():
            model.markov_head.markov_w2.weight.mul_(300.0)  # a bias that would lift others above the candidates
    plain.load_state_dict(model.state_dict())
    data = batch(model.config)
    cut, whole = forced(model, data), forced(plain, data)
    base = plain.base_logits(whole.hidden)
    support = base.topk(3, dim=-1).indices.sort(dim=-1).values
    assert torch.equal(cut.logits.isfinite().nonzero()[:, 2].view(support.shape), support)
    assert torch.equal(cut.logits.gather(-1, support), whole.logits.gather(-1, support))
    assert torch.equal(cut.confidence_logits, whole.confidence_logits)
    assert not torch.equal(whole.logits.argmax(-1), cut.logits.argmax(-1)) or head == "none"
    assert torch.equal(forced(model.train(), data).logits, forced(plain.train(), data).logits)


# Features per layer


def test_each_layer_reads_its_own_features_and_fusion_the_first(drafter, batch):
    model = drafter(**fields_of("vanilla", layer_fusion=True, input_fusion=True, num_layers=3)).eval()
    data = batch(model.config)
    before = model.encode(data.features, data.positions)
    for changed, (fc, _) in enumerate(model.feature_maps):
        with torch.no_grad():
            fc.weight.mul_(-1.0)
        after = model.encode(data.features, data.positions)
        moved = [not torch.equal(a[1], b[1]) for a, b in zip(before.layers, after.layers, strict=True)]
        assert moved == [layer == changed for layer in range(3)]
        assert torch.equal(before.features, after.features) == (changed > 0)
        before = after


def test_copied_features_are_the_shared_ones(drafter, batch):
    """With every map equal to the first, the model is the one without the option, bit for bit."""
    model, plain = (drafter(**fields_of("pair", layer_fusion=on)).eval() for on in (True, False))
    plain.bind(model._bound._embed, model._bound._head)
    state = model.state_dict()
    plain.load_state_dict({name: state[name] for name in plain.state_dict()})
    with torch.no_grad():
        for fc, norm in model.feature_maps:
            fc.weight.copy_(plain.fc.weight)
            norm.weight.copy_(plain.hidden_norm.weight)
    data = batch(model.config)
    assert torch.equal(forced(model, data).logits, forced(plain, data).logits)
