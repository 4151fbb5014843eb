"""Labels from accepted counts, by hand, and what is refused."""

from __future__ import annotations

import pytest
import torch

from dspark.calibration.events import Events
from dspark.contracts import DsparkError


def test_labels_by_hand(heads) -> None:
    # Rejected at slot 1; all three accepted; two verified and both accepted; none verified.
    events = heads.plain_events([[0.0] * 3] * 4, accepted=[1, 3, 2, 0], verified=[3, 3, 2, 0])
    assert events.labels.tolist() == [[1, 0, 0], [1, 1, 1], [1, 1, 0], [0, 0, 0]]
    assert events.conditional_observed.tolist() == [[True, True, False], [True] * 3, [True, True, False], [False] * 3]
    assert events.cumulative_observed.tolist() == [[True] * 3, [True] * 3, [True, True, False], [False] * 3]


def test_slot_zero_is_counted(heads) -> None:
    """A metric that skips slot 0 under-reports (a known bug of others): two rounds, slot 0 accepted once."""
    events = heads.plain_events([[0.0, 0.0]] * 2, accepted=[1, 0], verified=[2, 2])
    seen = events.conditional_observed
    assert ((events.labels * seen).sum(0) / seen.sum(0)).tolist() == [0.5, 0.0]


def test_hash_sees_labels_logits_and_order(heads) -> None:
    one = heads.synthetic_head(20)
    again, other = heads.synthetic_head(20), heads.synthetic_head(20, seed=1)
    assert one.data_hash() == again.data_hash()
    assert len({one.data_hash(), other.data_hash(), one.select(torch.arange(20) < 19).data_hash()}) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"confidence_logits": torch.zeros(0, 2)}, "at least one each"),
        ({"confidence_logits": torch.zeros(2, 0)}, "at least one each"),
        ({"confidence_logits": torch.full((2, 2), float("nan"))}, "finite"),
        ({"accepted": [1, 3]}, "0 <= accepted <= verified <= 2"),
        ({"accepted": [-1, 0]}, "in round 0"),
        ({"verified": [2, 5]}, "in round 1"),
        ({"domain": ["math"]}, "one per round"),
        ({"domain": ["math", "all"]}, "stands for every domain"),
        ({"draft_max_prob": torch.full((2, 2), 1.5)}, "probabilities in"),
        ({"draft_max_prob": torch.zeros(2, 3)}, "draft_max_prob"),
    ],
)
def test_refused(change: dict, message: str) -> None:
    good = {
        "confidence_logits": torch.zeros(2, 2),
        "accepted": [1, 2],
        "verified": [2, 2],
        "domain": ["a", "b"],
        "conversation": ["c", "d"],
    }
    Events(**good)
    with pytest.raises(DsparkError, match=message):
        Events(**(good | change))
