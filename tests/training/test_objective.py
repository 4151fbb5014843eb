"""Whole blocks to losses: fused against plain through a draft model, packs against their parts, settings refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from dspark.contracts import DsparkError
from dspark.drafter.blocks import blocks_at
from dspark.drafter.config import DrafterConfig
from dspark.drafter.model import Drafter
from dspark.training import fused
from dspark.training.labels import anchor_candidates, laws_at, slot_mask, target_law
from dspark.training.objective import Judged, Measured, alphas, counts, measure, weigh
from dspark.training.options import LossOptions

V, H, P = 40, 16, 4


def make_drafter(**shape: Any) -> Drafter:
    values = {
        "markov_rank": 5,
        "confidence_head": True,
        "confidence_with_markov": True,
        "draft_vocab_size": 30,
        **shape,
    }
    config = DrafterConfig(
        block_size=P, mask_token_id=0, target_layer_ids=(0, 1), sample_from_anchor=True, vocab_size=V, hidden_size=H,
        intermediate_size=24, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, num_target_layers=3, **values,
    )  # fmt: skip
    draw = torch.Generator().manual_seed(1)
    ids = torch.arange(0, V, 1)[torch.arange(V) % 4 != 3] if values["draft_vocab_size"] else None
    embed, head = torch.randn(2, V, H, generator=draw)
    return Drafter(config, ids).bind(embed, head).train()


def make_sequences(lengths: tuple[int, ...]) -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(sum(lengths))
    return [
        {"ids": torch.randint(V, (n,), generator=draw), "features": torch.randn(n, 2 * H, generator=draw),
         "states": torch.randn(n, H, generator=draw), "mask": torch.rand(n, generator=draw) < 0.85}
        for n in lengths
    ]  # fmt: skip


def judge(drafter: Drafter, sequences: list[dict[str, torch.Tensor]]) -> Judged:
    """The sequences as one pack."""
    pack = {name: torch.cat([s[name] for s in sequences]) for name in sequences[0]}
    lengths = torch.tensor([len(s["ids"]) for s in sequences])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    anchors = [anchor_candidates(s["mask"]) for s in sequences]
    sequence = torch.arange(len(sequences)).repeat_interleave(torch.tensor([len(a) for a in anchors]))
    blocks = blocks_at(pack["ids"], offsets, sequence, torch.cat(anchors), P)
    rows, counted = slot_mask(pack["mask"], blocks.begin, offsets[sequence + 1], torch.cat(anchors), P)
    head = drafter._vocabulary._head
    law, index = laws_at(lambda at: target_law(pack["states"][at] @ head.T, drafter.draft_ids), rows - 1, counted)
    context = drafter.encode(pack["features"], torch.cat([torch.arange(n) for n in lengths.tolist()]))
    states = drafter.block_states(*blocks.inputs(context))
    return Judged(states, drafter.to_columns(blocks.labels), law, index, counted)


def run(
    drafter: Drafter, sequences: list[dict[str, torch.Tensor]], options: LossOptions, how: Any = fused.fused
) -> tuple[Measured, torch.Tensor, list[torch.Tensor]]:
    """Sums, counts and gradients with every alpha as its share (no division by counts)."""
    drafter.zero_grad()
    judged, shares = judge(drafter, sequences), alphas(options, drafter.confidence_head is not None)
    weights = weigh(drafter, judged, options)
    found = measure(drafter, judged, options, weights, shares, how)
    found.loss.backward()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in drafter.parameters()]
    return found, counts(judged, weights, shares), gradients


EVERYTHING = {"ce": 0.2, "soft_ce": 0.3, "l1": 0.5, "coupled": 0.7}
SHAPES = [
    {},
    {"markov_head": "gated", "draft_vocab_size": 0},
    {"markov_head": "rnn"},
    {"markov_rank": 0, "confidence_with_markov": False},
    {"confidence_head": False, "confidence_with_markov": False},
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "-".join(map(str, s.values())) or "vanilla")
@pytest.mark.parametrize("kind", [{}, {"label": "coupled", "weighting": "survival", "temperature": 0.7}], ids=str)
def test_fused_equals_plain_through_a_draft_model(shape: dict[str, Any], kind: dict[str, Any]) -> None:
    """Loss, sums, acceptance, and the gradient of every parameter; fp32 rounding."""
    drafter, options = make_drafter(**shape), LossOptions(**EVERYTHING, **kind)
    sequences = make_sequences((17, 30))
    ours, _, mine = run(drafter, sequences, options)
    theirs, _, other = run(drafter, sequences, options, fused.reference)
    torch.testing.assert_close(ours.loss, theirs.loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.acceptance, theirs.acceptance, rtol=0, atol=1e-6)
    assert list(ours.sums) == list(theirs.sums) == list(alphas(options, drafter.confidence_head is not None))
    for name, total in ours.sums.items():
        torch.testing.assert_close(total, theirs.sums[name], rtol=1e-5, atol=1e-5)
    for (name, _), a, b in zip(drafter.named_parameters(), mine, other, strict=True):
        assert float((a - b).norm()) <= 1e-5 * float(b.norm()) + 1e-7, name


@pytest.mark.parametrize("weighting", ["decay", "survival"])
def test_a_pack_is_the_sum_of_its_parts(weighting: str) -> None:
    """Sums and gradients within fp32 rounding; counts exactly, where they are whole numbers."""
    drafter, sequences = make_drafter(), make_sequences((9, 23, 2, 14))
    options = LossOptions(**EVERYTHING, weighting=weighting, decay=0.0)
    whole, count, gradients = run(drafter, sequences, options)
    parts = [run(drafter, [s], options) for s in sequences if len(anchor_candidates(s["mask"]))]
    assert len(parts) >= 3
    summed = torch.stack([c for _, c, _ in parts]).sum(0)
    if weighting == "decay":
        assert torch.equal(count, summed) and torch.equal(count, count.round())
        assert float(count[0]) < float(count[1])  # some labels are outside the draft vocabulary
    else:
        torch.testing.assert_close(count, summed, rtol=1e-6, atol=1e-6)
    for name in whole.sums:
        expected = torch.stack([found.sums[name] for found, _, _ in parts]).sum()
        torch.testing.assert_close(whole.sums[name], expected, rtol=1e-5, atol=1e-5)
    for i, (name, _) in enumerate(drafter.named_parameters()):
        expected = torch.stack([g[i] for _, _, g in parts]).sum(0)
        assert float((gradients[i] - expected).norm()) <= 1e-5 * float(expected.norm()) + 1e-7, name


def test_survival_weights_are_the_drafts_own_acceptance_and_stay_constant() -> None:
    """Weights from the acceptance that the fused pass reports; the loss' gradient treats them as numbers."""
    drafter, sequences = make_drafter(), make_sequences((30,))
    options = LossOptions(l1=1.0, ce=0.0, confidence=0.0, weighting="survival", survival_floor=0.0)
    judged = judge(drafter, sequences)
    weights = weigh(drafter, judged, options)
    found = measure(drafter, judged, options, weights, {"l1": 1.0})
    survival = torch.cat([torch.ones(len(weights), 1), found.acceptance[:, :-1].cumprod(-1)], -1)
    torch.testing.assert_close(weights, survival * judged.counted)
    assert not weights.requires_grad and bool(((weights > 0) == judged.counted).all())


def test_validation_needs_no_gradient_and_gives_the_same_numbers() -> None:
    drafter, sequences, options = make_drafter(), make_sequences((20, 11)), LossOptions(**EVERYTHING)
    trained, _, _ = run(drafter, sequences, options)
    drafter.eval()
    with torch.no_grad():
        judged = judge(drafter, sequences)
        weights = weigh(drafter, judged, options)
        found = measure(drafter, judged, options, weights, dict.fromkeys(alphas(options, True), 0.0))
    torch.testing.assert_close(found.acceptance, trained.acceptance, rtol=0, atol=1e-5)
    assert not bool(found.acceptance[~judged.counted].any())
    for name, total in found.sums.items():
        torch.testing.assert_close(total, trained.sums[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("field", "value"),
    [("ce", -0.1), ("coupled", math.nan), ("decay", math.inf), ("weighting", "depth"), ("survival_floor", 1.5),
     ("survival_floor", math.nan), ("label", "observed"), ("temperature", 0.0), ("temperature", math.inf)],
)  # fmt: skip
def test_settings_that_mean_nothing_are_refused(field: str, value: Any) -> None:
    with pytest.raises(DsparkError, match=f"losses: expected.*{field}"):
        LossOptions(**{field: value})


def test_reported_losses() -> None:
    assert alphas(LossOptions(), True) == {"ce": 0.1, "l1": 0.9, "confidence": 1.0}
    assert list(alphas(LossOptions(l1=0.0, coupled=0.9), False)) == ["ce", "l1", "coupled"]
