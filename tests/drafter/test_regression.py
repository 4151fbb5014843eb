"""The least-squares start: it finds maps that are there, agrees with a plain solver, and says so when it cannot."""

from __future__ import annotations

import pytest
import torch

from dspark.contracts import DsparkError
from dspark.drafter.context import Context
from dspark.drafter.regression import Observations, _ridge, start_by_regression

B = 600
OPTIONS = {"hidden_size": 32, "convolution": True, "layer_fusion": True, "candidates": 7}


def observations(model, seed=4, noise=0.0) -> Observations:
    """What a target would say whose hidden state is linear in the tap before the anchor and in the previous token."""
    config, g = model.config, torch.Generator().manual_seed(seed)
    width, slots = len(config.target_layer_ids) * config.hidden_size, config.num_predictions
    features = torch.randn(B, width, generator=g) * torch.tensor([1.0, 50.0]).repeat_interleave(config.hidden_size)
    ids = torch.randint(config.vocab_size, (B, slots), generator=g)
    maps = torch.randn(slots, width, config.hidden_size, generator=g) / features.std(dim=0)[:, None]
    shared = torch.randn(config.hidden_size, 3, generator=g) @ torch.randn(3, config.hidden_size, generator=g)
    embedded = torch.nn.functional.rms_norm(model.embed(ids), (config.hidden_size,))
    hidden = torch.einsum("bw,swh->bsh", features, maps[:1].expand(slots, -1, -1)) + embedded @ shared
    hidden = hidden + noise * torch.randn(hidden.shape, generator=g)
    return Observations(features, ids[:, 0], ids, torch.ones(B, slots, dtype=torch.bool), hidden)


def logits_of(model, seen: Observations) -> torch.Tensor:
    """The training path's logits of every block: one context row each, the anchor right after it."""
    rows = torch.arange(B)
    context = model.encode(seen.features, torch.zeros_like(rows))
    labels = torch.cat([seen.previous_ids[:, 1:], seen.previous_ids[:, :1]], dim=1)
    return model.teacher_forced(seen.anchor_ids, torch.ones_like(rows), labels, context, rows, rows + 1).logits


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn", "pair"])
@pytest.mark.parametrize("convention", [True, False])
@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["plain", "options"])
def test_a_linear_target_is_found(drafter, head, convention, options):
    fields = {"markov_head": head, "markov_rank": 6, "input_fusion": True, "sample_from_anchor": convention, **options}
    model = drafter(**fields, block_size=4 if convention else 5).train()
    seen = observations(model)
    wanted = (seen.hidden @ model.head_columns().T).argmax(-1)
    before = (logits_of(model, seen).argmax(-1) == wanted).float().mean(0)
    start_by_regression(model, seen, ridge=1e-3)
    after = (logits_of(model, seen).argmax(-1) == wanted).float().mean(0)
    assert bool((before < 0.2).all())
    assert bool((after > 0.6).all()), after  # not 1: a context feature is normed, and lengths are lost


def test_rows_that_do_not_count_do_not_matter(drafter):
    model = drafter(markov_rank=6, input_fusion=True)
    seen = observations(model, noise=0.5)
    seen.counted[100:, 2:] = False
    start_by_regression(model, seen)
    weights = {n: t.clone() for n, t in model.state_dict().items()}
    seen.hidden[100:, 2:] = float("nan")
    start_by_regression(model, seen)
    assert all(torch.equal(t, weights[n]) for n, t in model.state_dict().items())
    assert all(bool(t.isfinite().all()) for t in weights.values())


@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["plain", "options"])
def test_draft_layers_start_as_the_identity(drafter, options):
    model = drafter(markov_rank=6, input_fusion=True, **options).train()
    seen = observations(model)
    start_by_regression(model, seen)
    context = model.encode(seen.features, torch.zeros(B, dtype=torch.long))
    x = torch.randn(2, 4, model.config.hidden_size)
    spans = _spans()
    rotary = model.rope(torch.ones(2, 4, dtype=torch.long))
    for layer, kv in zip(model.draft_layers, context.layers, strict=True):
        assert torch.equal(layer(x, rotary, kv, spans), x)
    assert all(torch.equal(fc.weight, model.fc.weight) for fc, _ in model.feature_maps)


def _spans():
    from dspark.drafter.attention import Spans

    return Spans(torch.tensor([0, 3]), torch.tensor([1, 5]))


def test_ridge_is_the_plain_solution():
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(50, 7, generator=g), torch.randn(50, 3, generator=g)
    padded = torch.cat([x.double(), 2.0 * torch.eye(7, dtype=torch.float64)])
    wanted = torch.linalg.lstsq(padded, torch.cat([y.double(), torch.zeros(7, 3, dtype=torch.float64)])).solution
    torch.testing.assert_close(_ridge(x, y, 4.0), wanted.float(), rtol=0, atol=1e-5)


def test_refusals(drafter):
    plain = drafter(markov_rank=6)
    with pytest.raises(DsparkError, match="input_fusion"):
        start_by_regression(plain, observations(plain))
    model = drafter(input_fusion=True)
    seen = observations(model)
    seen.counted[:, 3] = False
    with pytest.raises(DsparkError, match="every slot"):
        start_by_regression(model, seen)


def test_a_block_without_context_starts_from_its_anchor_alone(drafter):
    """begin == end, in the first row or later, in an empty arena or not: the same bits."""
    model = drafter(input_fusion=True).eval()
    anchor, position, labels = torch.tensor([5]), torch.tensor([0]), torch.tensor([[1, 2, 3, 4]])
    out = []
    for rows, at in ((0, 0), (6, 0), (6, 6), (6, 3)):
        context = model.encode(torch.randn(rows, 48), torch.arange(rows))
        out.append(model.teacher_forced(anchor, position, labels, context, torch.tensor([at]), torch.tensor([at])))
    assert all(torch.equal(o.logits, out[0].logits) for o in out)
    assert Context.empty(model.config, 3, torch.float32).features.shape == (3, 24)
