"""Anchors, slots, acceptance labels and the law on a reduced vocabulary."""

from __future__ import annotations

import math

import pytest
import torch

from dspark.training import labels


def toy() -> torch.Tensor:
    """Ten tokens: 3 of a prompt, 4 of an answer, 1 of a prompt, 2 of an answer."""
    return torch.tensor([0, 0, 0, 1, 1, 1, 1, 0, 1, 1], dtype=torch.bool)


def pairs(mask: torch.Tensor, slots: int) -> list[tuple[int, int]]:
    anchors = labels.anchor_candidates(mask)
    begin, end = torch.zeros_like(anchors), torch.full_like(anchors, len(mask))
    _, counted = labels.slot_mask(mask, begin, end, anchors, slots)
    return [(int(anchors[b]), k) for b, k in counted.nonzero().tolist()]


def test_pairs_of_the_ten_token_mask() -> None:
    assert pairs(toy(), 3) == [(3, 0), (3, 1), (3, 2), (4, 0), (4, 1), (5, 0), (8, 0)]


def test_pairs_equal_a_brute_force_list() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        mask = torch.rand(24, generator=generator) < 0.7
        expected = []
        for a in range(23):
            if not (mask[a] and mask[a + 1]):
                continue
            for k in range(4):
                if not all(a + j + 1 < 24 and mask[a + j + 1] for j in range(k + 1)):
                    break
                expected.append((a, k))
        assert pairs(mask, 4) == expected


def test_short_sequences_have_no_candidate() -> None:
    for mask in ([True], [False, True], [True, False]):
        assert len(labels.anchor_candidates(torch.tensor(mask))) == 0


def test_slots_never_reach_into_the_next_sequence() -> None:
    mask = torch.ones(8, dtype=torch.bool)
    begin, end = torch.tensor([0, 4]), torch.tensor([4, 8])
    rows, counted = labels.slot_mask(mask, begin, end, torch.tensor([2, 1]), 3)
    assert rows.tolist() == [[3, 3, 3], [6, 7, 7]]
    assert counted.tolist() == [[True, False, False], [True, True, False]]


def test_slot_weights_give_slot_zero_full_weight() -> None:
    counted = torch.tensor([[True, True, False]])
    assert torch.allclose(labels.slot_weights(counted, 4.0), torch.tensor([[1.0, math.exp(-0.25), 0.0]]))
    assert labels.slot_weights(counted, 0.0).tolist() == [[1.0, 1.0, 0.0]]


def test_reduced_law_keeps_the_outside_mass() -> None:
    logits = torch.randn(5, 11, generator=torch.Generator().manual_seed(1))
    ids = torch.tensor([0, 3, 4, 9])
    law, full = labels.target_law(logits, ids), torch.softmax(logits, -1)
    assert torch.allclose(law.inside, full[:, ids], atol=1e-7)
    assert torch.allclose(law.outside, 1 - full[:, ids].sum(-1), atol=1e-6)
    assert torch.equal(law.argmax, logits.argmax(-1))


def test_rejection_label_is_one_minus_tv_with_zero_draft_outside() -> None:
    generator = torch.Generator().manual_seed(2)
    logits, draft, ids = torch.randn(6, 11, generator=generator), torch.randn(6, 4, generator=generator), [1, 2, 5, 10]
    q = torch.zeros(6, 11)
    q[:, ids] = torch.softmax(draft, -1)
    tv = 0.5 * (q - torch.softmax(logits, -1)).abs().sum(-1)
    law = labels.target_law(logits, torch.tensor(ids))
    assert torch.allclose(labels.acceptance("rejection", draft, law, torch.tensor(ids)), 1 - tv, atol=1e-6)


def test_coupled_label_lies_between_its_bounds() -> None:
    generator = torch.Generator().manual_seed(3)
    logits, draft = torch.randn(16, 7, generator=generator), torch.randn(16, 5, generator=generator)
    ids = torch.tensor([0, 1, 3, 4, 6])
    law = labels.target_law(logits, ids)
    overlap = labels.acceptance("rejection", draft, law, ids)
    coupled = labels.acceptance("coupled", draft, law, ids)
    tv = 1 - overlap
    assert bool((coupled <= overlap + 1e-6).all())
    assert bool((coupled >= (1 - tv) / (1 + tv) - 1e-6).all())


def test_greedy_label_compares_vocabulary_ids_and_knows_the_outside() -> None:
    ids = torch.tensor([2, 5])
    logits = torch.tensor([[0.0, 0, 3, 0, 0, 1], [0.0, 9, 3, 0, 0, 1], [0.0, 0, 1, 0, 0, 3]])
    law = labels.target_law(logits, ids)
    draft = torch.tensor([[1.0, 0.0]]).expand(3, 2)
    assert labels.acceptance("greedy", draft, law, ids).tolist() == [1.0, 0.0, 0.0]


def test_laws_at_the_counted_rows_across_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each distinct row once, in chunks of 4 of which the last is not full; slots that do not count get row 0."""
    monkeypatch.setattr(labels, "LOGIT_ROWS", 4)
    draw = torch.Generator().manual_seed(4)
    hidden, head, ids = torch.randn(30, 6, generator=draw), torch.randn(11, 6, generator=draw), torch.tensor([0, 3, 9])
    rows, counted = torch.randint(30, (5, 4), generator=draw), torch.rand(5, 4, generator=draw) < 0.6
    law, index = labels.laws_at(lambda at: labels.target_law(hidden[at] @ head.T, ids, 0.8), rows, counted)
    assert len(law.inside) == len(set(rows[counted].tolist())) > 8 and len(law.inside) % 4
    assert not bool(index[~counted].any())
    expected = labels.target_law(hidden @ head.T, ids, 0.8).rows(rows)
    for got, want in zip(law.rows(index).parts(), expected.parts(), strict=True):
        torch.testing.assert_close(got[counted], want[counted])


def test_survival_weights() -> None:
    counted = torch.tensor([[True, True, True, False], [True, True, True, True]])
    rates = torch.tensor([[0.5, 0.5, 0.9, 0.9], [0.2, 0.3, 0.9, 1.0]], requires_grad=True)
    got = labels.survival_weights(counted, rates, 0.1)
    torch.testing.assert_close(got, torch.tensor([[1.0, 0.5, 0.25, 0.0], [1.0, 0.2, 0.1, 0.1]]))
    assert not got.requires_grad
    torch.testing.assert_close(labels.survival_weights(counted, rates, 0.0)[1], torch.tensor([1.0, 0.2, 0.06, 0.054]))
    assert torch.equal(labels.survival_weights(counted, rates, 1.0), counted.float())


def test_observed_events() -> None:
    verified, accepted = torch.tensor([3, 3, 2, 0]), torch.tensor([1, 3, 2, 0])
    label, observed = labels.observed_events(verified, accepted, 3)
    assert label.tolist() == [[1, 0, 0], [1, 1, 1], [1, 1, 0], [0, 0, 0]]
    assert observed.tolist() == [[True, True, False], [True, True, True], [True, True, False], [False] * 3]
