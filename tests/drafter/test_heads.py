"""The sequential and confidence heads against their formulas, and functions whose bits do not depend on the place."""

from __future__ import annotations

import pytest
import torch

from dspark.contracts import DsparkError
from dspark.drafter.confidence import ConfidenceHead, law_features, log_odds
from dspark.drafter.layers import sigmoid, tanh
from dspark.drafter.model import Drafter
from dspark.slot_maps import identity, of_temperatures

VALUES = torch.cat([torch.linspace(-12, 12, 5003), torch.tensor([0.0, -0.0, 1e-8, -200.0, 200.0])])


@pytest.mark.parametrize(("ours", "theirs"), [(sigmoid, torch.sigmoid), (tanh, torch.tanh)])
def test_values_and_bits(ours, theirs):
    exact = theirs(VALUES.double())
    got = ours(VALUES, False)
    assert (got.double() - exact).abs().max() < 2e-7
    for i in (0, 7, 4999, 5004):
        assert torch.equal(ours(VALUES[i : i + 1], False)[0], got[i])
    assert torch.equal(ours(VALUES, True), theirs(VALUES))


def test_gated_and_rnn_formulas(drafter):
    generator = torch.Generator().manual_seed(3)
    hidden, ids = torch.randn(5, 24, generator=generator), torch.tensor([0, 60, 7, 7, 1])
    gated = drafter(markov_rank=6, markov_head="gated").train()
    head = gated.markov_head
    e = head.markov_w1.weight[ids]
    gate = torch.sigmoid(torch.cat([hidden, e], 1) @ head.gate_proj.weight.T + head.gate_proj.bias)
    bias, state, embedding = gated.slot_bias(None, hidden, ids)
    torch.testing.assert_close(bias, (gate * e) @ head.markov_w2.weight.T)
    assert state is None
    assert torch.equal(embedding, e)

    rnn = drafter(markov_rank=6, markov_head="rnn").train()
    head, s = rnn.markov_head, torch.zeros(5, 6)
    e = head.markov_w1.weight[ids]
    state = None
    for _ in range(3):
        joint = torch.cat([s, e, hidden], 1) @ head.joint_proj.weight.T + head.joint_proj.bias
        g, c, o = joint.chunk(3, dim=1)
        bias, state, _ = rnn.slot_bias(state, hidden, ids)
        torch.testing.assert_close(bias, torch.tanh(o) @ head.markov_w2.weight.T)
        s = torch.sigmoid(g) * s + (1 - torch.sigmoid(g)) * torch.tanh(c)
        torch.testing.assert_close(state, s)


def test_pair_formula_and_its_vanilla_start(drafter, config):
    hidden, ids = torch.randn(5, 24, generator=torch.Generator().manual_seed(3)), torch.tensor([0, 60, 7, 7, 1])
    pair = drafter(markov_rank=6, markov_head="pair").train()
    head = pair.markov_head
    e = head.markov_w1.weight[ids]
    phi = (hidden @ head.pair_proj.weight.T + head.pair_proj.bias) * e
    bias, state, embedding = pair.slot_bias(None, hidden, ids)
    torch.testing.assert_close(bias, phi @ head.markov_w2.weight.T)
    assert state is None
    assert torch.equal(embedding, e)
    fresh, vanilla = (Drafter(config(markov_rank=6, markov_head=kind), seed=3) for kind in ("pair", "vanilla"))
    for mode in (True, False):
        biases = [model.train(mode).slot_bias(None, hidden, ids)[0] for model in (fresh, vanilla)]
        assert torch.equal(*biases)


@pytest.mark.parametrize("columns", [2, 61, 4096])
def test_log_odds_are_those_of_the_law(columns):
    """Against fp64 softmax; rows with -inf off a few candidates, and a token that is nearly sure."""
    logits = torch.randn(40, columns, generator=torch.Generator().manual_seed(columns)) * 4
    logits[:9, 2:] = -torch.inf
    logits[9, 0] = 90.0
    ids = torch.arange(40) % columns
    p = logits.double().softmax(-1).gather(-1, ids[:, None]).squeeze(-1)
    expected = (p.log() - (-p).log1p()).clamp(-16, 16)
    found = log_odds(logits, ids)
    torch.testing.assert_close(found[10:].double(), expected[10:], rtol=0, atol=2e-5)
    torch.testing.assert_close(found[:9].double(), expected[:9], rtol=0, atol=2e-5)
    assert found[9].abs() == 16
    for row in (0, 9, 17):
        assert torch.equal(log_odds(logits[row : row + 1], ids[row : row + 1]), found[row : row + 1])


def test_law_features_tell_the_likeliest_and_the_drafted_token():
    logits, columns = torch.tensor([[[0.0, 2.0, 1.0], [0.0, 2.0, 1.0]]]), torch.tensor([[1, -1]])
    found = law_features(logits, columns)
    odds = 2.0 - torch.tensor([0.0, 1.0]).logsumexp(0)
    torch.testing.assert_close(found[0, 0], odds.expand(2))
    torch.testing.assert_close(found[0, 1], torch.stack([odds, torch.tensor(-16.0)]))


def test_law_features_are_those_of_either_token():
    """Where the drafted token is the likeliest, where it is not, and off the vocabulary; a row's bits are its own."""
    logits = torch.randn(4, 3, 50, generator=torch.Generator().manual_seed(0))
    columns = torch.randint(-1, 50, (4, 3), generator=torch.Generator().manual_seed(1))
    columns[:, 0] = logits[:, 0].argmax(-1)
    found = law_features(logits, columns)
    flat, at = logits.flatten(0, 1), columns.flatten()
    assert torch.equal(found[..., 0].flatten(), log_odds(flat, flat.argmax(-1)))
    wanted = torch.where(at < 0, -16.0, log_odds(flat, at.clamp_min(0)))
    assert torch.equal(found[..., 1].flatten(), wanted)
    assert (found[:, 0, 0] == found[:, 0, 1]).all()
    for block in range(4):
        assert torch.equal(
            law_features(logits[block : block + 1], columns[block : block + 1]), found[block : block + 1]
        )


def test_confidence_head_is_findable_and_has_a_map_per_slot():
    head = ConfidenceHead(n_embed=8, markov_rank=3, num_steps=4).train()
    torch.nn.init.normal_(head.proj.weight, generator=torch.Generator().manual_seed(0))
    logits = head(torch.ones(2, 4, 8), torch.ones(2, 4, 3))
    assert head.maps == identity(4)
    assert logits.shape == (2, 4)
    head.set_maps(of_temperatures([1.0, 2.0, 4.0, 8.0]))
    assert [m.temperature for m in head.maps] == [1.0, 2.0, 4.0, 8.0]
    assert set(head.state_dict()) == {"proj.weight", "proj.bias"}
    with pytest.raises(DsparkError, match="expected 4 maps"):
        head.set_maps(identity(3))
