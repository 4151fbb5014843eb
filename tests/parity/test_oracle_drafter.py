"""Our draft model against the reference's recorded numbers, on both arithmetic paths (the oracle's tolerances)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dspark.drafter.attention import Spans
from dspark.drafter.model import Drafter
from dspark.training.labels import target_law
from dspark.training.objective import Judged, alphas, counts, measure, weigh
from dspark.training.options import LossOptions

PATHS = ("train", "eval")


def run(case, path: str):
    drafter = case.drafter().train(path == "train")
    blocks = case.blocks(drafter.config.num_predictions)
    features = case.features(drafter.config.target_layer_ids)
    rows, length = case.train["input_ids"].shape
    positions = torch.arange(length).repeat(rows)
    return drafter, blocks, drafter.teacher_forced(*blocks.inputs(drafter.encode(features, positions)))


def close(got, expected, tolerance: float) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("path", PATHS)
def test_outputs(case, path):
    drafter, blocks, out = run(case, path)
    keep, train = case.keep, case.train
    assert torch.equal(blocks.labels, train["target_ids"][keep])
    close(out.hidden, train["backbone_hidden"][keep], 1e-4)
    if "draft_logits" in train:
        close(out.logits, train["draft_logits"][keep], 2e-4)
    if drafter.config.confidence_head:
        close(out.confidence_logits, train["confidence_logits"][keep], 1e-4)
    else:
        assert out.confidence_logits is None
        assert "confidence_logits" not in train


def test_mask(case):
    """Which keys each kept slot sees, against the reference's packed boolean mask."""
    config = case.drafter().config
    rows, length = case.train["input_ids"].shape
    blocks, anchors, size = case.blocks(config.num_predictions), case.keep.shape[1], config.block_size
    packed = case.train["attn_mask_packed"].numpy()
    expected = torch.from_numpy(np.unpackbits(packed, axis=-1)[..., : length + anchors * size]).bool()
    groups = Spans(blocks.begin, blocks.end).groups
    for row, group in zip(range(rows), groups, strict=True):
        kept = case.keep[row].nonzero().flatten()
        mask = torch.zeros(anchors, size, length + anchors * size, dtype=torch.bool)
        for i, slot in enumerate(kept.tolist()):
            mask[slot, :, group.low - row * length : group.high - row * length] = ~group.hidden[i]
            mask[slot, :, length + slot * size : length + (slot + 1) * size] = True
        assert torch.equal(mask.flatten(0, 1), expected[row])


def test_gradients(case):
    """Per parameter: norm, sum and largest magnitude of the total loss's gradient."""
    if "aligned_target_logits" not in case.train:
        pytest.skip("this case records no target logits")
    expected = case.meta["train"]
    drafter, loss = trained_on(case, expected["loss"]["settings"])
    torch.testing.assert_close(loss.item(), expected["loss"]["total"], rtol=1e-5, atol=1e-7)
    loss.backward()
    parameters = dict(drafter.named_parameters())
    for name, stats in expected["grad_stats_dense_sdpa"].items():
        grad = parameters.pop(name).grad
        grad = torch.zeros(()) if grad is None else grad
        l2, total, largest = stats["norm"], stats["sum"], stats["absmax"]
        torch.testing.assert_close(grad.norm().item(), l2, rtol=1e-4, atol=1e-6, msg=name)
        torch.testing.assert_close(grad.sum().item(), total, rtol=0, atol=1e-3, msg=name)
        torch.testing.assert_close(grad.abs().max().item(), largest, rtol=1e-3, atol=1e-6, msg=name)
    assert not parameters, f"parameters the reference does not have: {list(parameters)}"


def trained_on(case, settings) -> tuple[Drafter, torch.Tensor]:
    """(draft model, loss with gradient) by the calls of a training step."""
    drafter, keep, train = case.drafter().train(), case.keep, case.train
    blocks, counted = case.blocks(drafter.config.num_predictions), train["eval_mask"][case.keep].bool()
    rows, length = train["input_ids"].shape
    context = drafter.encode(case.features(drafter.config.target_layer_ids), torch.arange(length).repeat(rows))
    states, law = (
        drafter.block_states(*blocks.inputs(context)),
        target_law(train["aligned_target_logits"][keep].flatten(0, 1), None),
    )
    judged = Judged(
        states, drafter.to_columns(blocks.labels), law, torch.arange(counted.numel()).view(counted.shape), counted
    )
    alpha = {"ce": settings["ce_loss_alpha"], "l1": settings["l1_loss_alpha"]}
    options = LossOptions(
        **alpha, soft_ce=0.0, confidence=settings["confidence_head_alpha"], decay=settings["loss_decay_gamma"] or 0.0
    )
    names = alphas(options, drafter.config.confidence_head)
    weights = weigh(drafter, judged, options)
    totals = counts(judged, weights, names) + 1e-6
    shares = {name: a / total for (name, a), total in zip(names.items(), totals.tolist(), strict=True)}
    return drafter, measure(drafter, judged, options, weights, shares).loss


def test_decoding_rounds(case, decode):
    """Greedy proposals and confidences of every recorded decoding round, from the draft loop."""
    drafter, target = case.drafter().eval(), case.target()
    lengths, taps = decode["prompt_lens"].tolist(), drafter.config.target_layer_ids
    sequences = [
        torch.cat([p[:n], o]) for p, n, o in zip(decode["prompt_ids"], lengths, decode["output_ids"], strict=True)
    ]
    _, features, offsets = target.forward_sequences(sequences, taps)
    positions = torch.cat([torch.arange(len(s)) for s in sequences])
    begin, start = offsets[decode["round_prompt"]], decode["round_start"]
    within = start < (offsets[1:] - offsets[:-1])[decode["round_prompt"]]  # a last round may start past the cut output
    begin, start = begin[within], start[within]
    seen: list[torch.Tensor] = []

    def choose(slot: int, logits: torch.Tensor) -> torch.Tensor:
        seen.append(logits)
        return logits.argmax(-1)

    context = drafter.encode(features, positions)
    proposal = drafter.propose(torch.cat(sequences)[begin + start], start, context, begin, begin + start, choose)
    assert torch.equal(proposal.token_ids, decode["round_proposal"][within])
    if drafter.config.confidence_head:
        close(proposal.confidence_logits, decode["round_confidence_logits"][within], 1e-4)
    check_debug_rows(decode, within, torch.stack(seen, dim=1))


def check_debug_rows(decode, within, logits) -> None:
    """The recorded logits of a few (prompt, round of that prompt) pairs."""
    prompts = decode["round_prompt"]
    for (prompt, number), expected in zip(
        decode["debug_prompt_round"].tolist(), decode["debug_draft_logits"], strict=True
    ):
        row = (prompts == prompt).nonzero().flatten()[number]
        if within[row]:
            close(logits[within[:row].sum()], expected, 2e-4)
