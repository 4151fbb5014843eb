"""The training losses on the reference's recorded outputs: numerators, denominators and totals of every setting, by the
formulas that training computes with."""

from __future__ import annotations

import pytest
import torch

from dspark.training import labels, losses, slopes


def close(got, expected) -> None:
    torch.testing.assert_close(float(got), float(expected), rtol=1e-5, atol=1e-5)


def test_losses(case):
    if "aligned_target_logits" not in case.train:
        pytest.skip("this case records no target logits")
    keep, train = case.keep, case.train
    logits, counted = train["draft_logits"][keep], train["eval_mask"][keep].bool()
    law = labels.target_law(train["aligned_target_logits"][keep].flatten(0, 1), None)
    law = labels.TargetLaw(*(t.view(*counted.shape, *t.shape[1:]) for t in (law.inside, law.outside, law.argmax)))
    flat = labels.TargetLaw(*(getattr(law, n).flatten(0, 1) for n in ("inside", "outside", "argmax")))
    columns = train["target_ids"][keep].flatten().long()
    values, _ = slopes.values_and_slope(logits.flatten(0, 1), flat, columns, ("ce", "l1"), {}, 1.0)
    for expected in (case.meta["train"]["loss"], *case.meta["train"]["loss_variants"]):
        settings = expected["settings"]
        weights = labels.slot_weights(counted, settings["loss_decay_gamma"] or 0.0)
        count, total = weights.sum(), 0.0
        sums = {name: (weights.flatten() * values[name]).sum() for name in ("ce", "l1")}
        if "confidence_logits" in train:
            label = labels.overlap_from_l1(values["l1"]).view(counted.shape)
            sums["confidence"], _ = losses.confidence_bce(train["confidence_logits"][keep], label, weights)
        for name, found in sums.items():
            alpha = settings["confidence_head_alpha" if name == "confidence" else f"{name}_loss_alpha"]
            total = total + alpha * found / count.clamp_min(1e-6)
            if alpha and expected[f"{name}_loss_den"]:
                close(found, expected[f"{name}_loss_num"])
                close(count, expected[f"{name}_loss_den"])
        close(total, expected["total"])


def test_labels_and_anchors(case):
    """Which slots count, and that every recorded anchor is a candidate of ours."""
    train, keep = case.train, case.keep
    rows, length = train["input_ids"].shape
    mask, anchors = train["loss_mask"].bool(), train["anchor_positions"]
    begin = (torch.arange(rows)[:, None] * length).expand_as(anchors)[keep]
    slots = train["target_ids"].shape[-1]
    label_rows, counted = labels.slot_mask(mask.flatten(), begin, begin + length, anchors[keep], slots)
    assert torch.equal(counted, train["eval_mask"][keep].bool())
    assert torch.equal(train["input_ids"].flatten()[label_rows], train["target_ids"][keep])
    for row in range(rows):
        candidates = labels.anchor_candidates(mask[row])
        assert set(anchors[row][keep[row]].tolist()) <= set(candidates.tolist())
        assert int(keep[row].sum()) == min(len(candidates), anchors.shape[1])
