"""The training losses on the reference's recorded outputs: numerators, denominators and totals of every setting."""

from __future__ import annotations

import pytest
import torch

losses, labels = pytest.importorskip("dspark.training.losses"), pytest.importorskip("dspark.training.labels")


def close(got, expected) -> None:
    torch.testing.assert_close(float(got), float(expected), rtol=1e-5, atol=1e-5)


def test_losses(case):
    if "aligned_target_logits" not in case.train:
        pytest.skip("this case records no target logits")
    keep, train = case.keep, case.train
    logits, counted = train["draft_logits"][keep], train["eval_mask"][keep].bool()
    law = labels.target_law(train["aligned_target_logits"][keep].flatten(0, 1), None)
    law = labels.TargetLaw(*(t.view(*counted.shape, *t.shape[1:]) for t in (law.inside, law.outside, law.argmax)))
    log_draft = logits.log_softmax(-1)
    distance = losses.l1_distance(log_draft.exp(), law)
    for expected in (case.meta["train"]["loss"], *case.meta["train"]["loss_variants"]):
        settings = expected["settings"]
        weights = labels.slot_weights(counted, settings["loss_decay_gamma"] or 0.0)
        terms = {
            "ce": (losses.cross_entropy(log_draft, train["target_ids"][keep], weights), settings["ce_loss_alpha"]),
            "l1": (losses.weighted(distance, weights), settings["l1_loss_alpha"]),
        }
        if "confidence_logits" in train:
            label = labels.overlap_from_l1(distance)
            bce = losses.confidence_bce(train["confidence_logits"][keep], label, weights)
            terms["confidence"] = (bce, settings["confidence_head_alpha"])
        for name, ((total, count), alpha) in terms.items():
            if alpha and expected[f"{name}_loss_den"]:
                close(total, expected[f"{name}_loss_num"])
                close(count, expected[f"{name}_loss_den"])
        close(sum(alpha * losses.mean(term) for term, alpha in terms.values()), expected["total"])


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
