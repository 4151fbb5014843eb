"""Labels from accepted counts, by hand, and what is refused."""

from __future__ import annotations

import pytest
import torch

from dspark.calibration.events import Events, events_from_rounds
from dspark.contracts import DsparkError, Round


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


def test_from_rounds_drops_the_truncated_and_undoes_a_calibration() -> None:
    whole = Round(anchor=4, drafted=(7, 8, 9), verified=3, accepted=1, confidences=(0.9, 0.5, 0.1))
    short = Round(anchor=6, drafted=(7,), verified=1, accepted=1, confidences=(1.0,))
    cut = Round(anchor=8, drafted=(7, 8, 9), verified=2, accepted=2, confidences=(0.9, 0.9, 0.1))
    nothing = Round(anchor=9, drafted=(), verified=0, accepted=0)
    records = [(r, "code", f"t{i}") for i, r in enumerate((whole, short, cut, nothing))]
    events = events_from_rounds(records, applied_temperatures=(2.0, 1.0, 1.0))
    assert events.conversation == ("t0", "t1")
    assert events.verified.tolist() == [3, 1]
    torch.testing.assert_close(
        events.confidence_logits[0], 2.0 ** torch.tensor([1.0, 0, 0]) * torch.logit(torch.tensor([0.9, 0.5, 0.1]))
    )
    assert events.confidence_logits.isfinite().all()  # a confidence of exactly 1 is a large logit, not infinity


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


def test_no_round_left_is_refused() -> None:
    with pytest.raises(DsparkError, match="at least one each"):
        events_from_rounds([])
    with pytest.raises(DsparkError, match="one confidence per drafted token"):
        events_from_rounds([(Round(anchor=1, drafted=(3, 4), verified=2, accepted=0), "chat", "t")])
