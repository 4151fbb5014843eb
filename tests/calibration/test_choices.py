"""Thresholds, domain shift and drift, on heads whose truth is known."""

from __future__ import annotations

import itertools
import json

import pytest
import torch

from dspark.calibration.choices import domain_shift, threshold_sweep
from dspark.calibration.drift import compare, conversation_sums, refuse_other_slots
from dspark.calibration.events import Events
from dspark.calibration.fitting import fit
from dspark.calibration.measures import bin_index, ece
from dspark.calibration.record import survival
from dspark.calibration.report import build_report, format_table, load_report
from dspark.contracts import DsparkError
from dspark.slot_maps import identity


def test_sweep_by_hand(heads) -> None:
    """Survivals 0.9 0.45; 0.5 0.25; the third round was cut short and does not count."""
    z = torch.logit(torch.tensor([[0.9, 0.5], [0.5, 0.5], [0.9, 0.9]]))
    events = heads.plain_events(z.tolist(), [1, 2, 1], [2, 2, 1])
    rows = threshold_sweep(events, identity(2), [0.0, 0.4, 0.6, 0.95])
    assert [r["verified"] for r in rows] == [2.0, 1.5, 0.5, 0.0]
    assert [r["accepted"] for r in rows] == [1.5, 1.0, 0.5, 0.0]
    assert [r["acceptance"] for r in rows] == [0.75, pytest.approx(2 / 3), 1.0, None]
    assert [r["tokens"] for r in rows] == [2.5, 2.0, 1.5, 1.0]
    assert threshold_sweep(heads.plain_events([[0.0, 0.0]], [0], [1]), identity(2)) == []


def test_sweep_never_gains_by_verifying_less(heads) -> None:
    rows = threshold_sweep(heads.synthetic_head(500), identity(3))
    for key in ("verified", "tokens"):
        assert all(a[key] >= b[key] for a, b in itertools.pairwise(rows))
    assert rows[0]["verified"] == 3
    assert rows[-1]["acceptance"] > rows[0]["acceptance"]


def test_domain_shift_sees_a_domain_that_is_different(heads) -> None:
    """In `code` the head's scale is another: what the others teach does not carry there, and does elsewhere."""

    def mixed(seed: int) -> Events:
        true = heads.synthetic_head(3000, scale=1.0, seed=seed)
        scale = torch.tensor([5.0 if d == "code" else 1.0 for d in true.domain])[:, None]
        return Events(scale * true.confidence_logits, true.accepted, true.verified, true.domain, true.conversation)

    rows = domain_shift(mixed(0), mixed(1), fit(mixed(0), ""), 50, 0)
    found = {(r["domain"], r["estimator"]): r["ece"] for r in rows if (r["law"], r["slot"]) == ("cumulative", "mean")}
    assert found["code", "others"] > 0.1
    assert found["code", "none"] == pytest.approx(found["code", "others"], abs=0.03)
    assert found["chat", "others"] > found["chat", "none"]  # misled by code
    one = Events(torch.zeros(3, 2), [0] * 3, [2] * 3, ["code"] * 3, ["a", "b", "c"])
    assert domain_shift(one, one, fit(one, ""), 10, 0) == []


def test_sums_give_the_measures(heads) -> None:
    events = heads.synthetic_head(300)
    kept = json.loads(json.dumps(conversation_sums(events, identity(3))))
    row = compare(kept, kept, 3, 20)[1]
    a, y = survival(events.confidence_logits.double(), identity(3))[:, 1], events.labels[:, 1]
    assert row["events"] == [300, 300]
    assert row["gap"] == pytest.approx([float((a - y).mean())] * 2)
    assert row["ece"] == pytest.approx([ece(a, y, bin_index(a))] * 2)
    assert (row["domain"], row["slot"]) == ("all", 2)


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_drift_is_seen_when_there_is_some(heads, tmp_path, scale: float) -> None:
    """The same head on new conversations: no move. A head that has become overconfident: a move, named per slot."""
    before, now = heads.synthetic_head(3000, scale=1.0), heads.synthetic_head(3000, scale=scale, seed=8)
    calibration = fit(before, "drafter")
    old = build_report(before, calibration, tmp_path / "old", replicates=200)
    older = load_report(tmp_path / "old" / "report.json").data
    report = build_report(now, calibration, tmp_path / "new", against=older, replicates=200)
    rows = report.data["drift"]["rows"]
    assert report.data["drift"]["against"] == old.data["data_hash"]
    assert {r["domain"] for r in rows} == {"all", "math", "code", "chat"}
    mean = next(r for r in rows if (r["domain"], r["slot"]) == ("all", "mean"))
    low, high = mean["ece_chance"]
    assert low < 0 < high
    assert (mean["ece_moved"] > high) == mean["moved"] == (scale > 1)
    table = format_table(report)
    assert "Drift since the older report" in table
    assert max(map(len, table.splitlines())) <= 80
    assert "Drift since" in (tmp_path / "new" / "report.html").read_text()


def test_one_conversation_has_no_interval(heads) -> None:
    """Resampling one conversation gives it again: an interval of no width would call any difference a move."""
    kept = conversation_sums(heads.synthetic_head(300, conversations=1).select(torch.arange(300) % 3 == 0), identity(3))
    many = conversation_sums(heads.synthetic_head(300), identity(3))
    for old, new in ((kept, many), (many, kept)):
        for row in compare(old, new, 3, 20):
            assert row["gap_moved"] is not None
            assert row["gap_interval"] is None
            assert row["ece_chance"] is None
            assert not row["moved"]


@pytest.mark.parametrize("sizes", [(1500, 150), (150, 1500), (400, 400)])
def test_a_head_that_did_not_move_is_seldom_said_to_have(heads, sizes: tuple[int, int]) -> None:
    """On few rounds ECE is larger by noise alone: of 60 pairs of unequal size, about 3 lie outside of 95 %."""
    false = 0
    for trial in range(60):
        sides = [heads.synthetic_head(n, scale=1.5, seed=1000 * i + trial, conversations=max(30, n // 10))
                 for i, n in enumerate(sizes)]  # fmt: skip
        old, new = (conversation_sums(side, identity(3)) for side in sides)
        row = next(r for r in compare(old, new, 3, 100, trial) if r["slot"] == "mean")
        low, high = row["ece_chance"]
        false += not low <= row["ece_moved"] <= high
    assert false <= 9


def test_of_reports_in_which_nothing_moved_one_in_twenty_marks_anything(heads) -> None:
    """One test for the whole table: 4 slots' rows times 4 domains times two measures, 40 pairs of reports."""
    alarms = 0
    for trial in range(40):
        sides = [heads.synthetic_head(n, scale=1.5, seed=1000 * i + trial, conversations=n // 8)
                 for i, n in enumerate((600, 300))]  # fmt: skip
        old, new = (conversation_sums(side, identity(3)) for side in sides)
        alarms += any(row["moved"] for row in compare(old, new, 3, 100, trial))
    assert alarms <= 7


def test_only_domains_of_both_reports_are_compared(heads, tmp_path) -> None:
    """Else `all` would call another mix of domains a move."""
    before, now = heads.synthetic_head(900), heads.synthetic_head(900, seed=4)
    math = now.select(torch.tensor([d == "math" for d in now.domain]))
    calibration = fit(before, "drafter")
    older = build_report(before, calibration, tmp_path / "old", replicates=40).data
    drift = build_report(math, calibration, tmp_path / "new", against=older, replicates=40).data["drift"]
    assert {row["domain"] for row in drift["rows"]} == {"math"}
    assert drift["left_out"] == ["chat", "code"]
    assert "has not moved" in drift["verdict"]
    poems = Events(math.confidence_logits, math.accepted, math.verified, ["poems"] * 300, math.conversation)
    with pytest.raises(DsparkError, match="a domain that both reports have"):
        build_report(poems, calibration, tmp_path / "new", against=older, replicates=40)


def test_too_sure_at_both_ends_is_a_move_that_the_gap_does_not_see(heads) -> None:
    """Survival of one slot, true probabilities 0.2 and 0.8, then said to be 0.02 and 0.98: the mean stays right."""
    true = torch.tensor([0.2, 0.8]).repeat(600)
    accepted = (torch.rand(1200, generator=torch.Generator().manual_seed(3)) < true).long()
    names = [str(i // 10) for i in range(1200)]
    sides = []
    for said in ((0.2, 0.8), (0.02, 0.98)):
        logits = torch.logit(torch.tensor(said)).repeat(600)[:, None]
        sides.append(conversation_sums(Events(logits, accepted, [1] * 1200, ["math"] * 1200, names), identity(1)))
    row = compare(*sides, 1, 200)[0]
    assert row["gap_interval"][0] <= 0 <= row["gap_interval"][1]
    assert row["ece_moved"] > row["ece_chance"][1]
    assert row["moved"]


def test_a_calibration_fitted_anew_does_not_hide_the_drift(heads, tmp_path) -> None:
    """The older one is what is judged, as long as the draft model is the same; else each report's own."""
    before, now = heads.synthetic_head(2000, scale=1.0), heads.synthetic_head(2000, scale=4.0, seed=5)
    older = build_report(before, fit(before, "drafter"), tmp_path / "old", replicates=60).data
    for drafter, same in (("drafter", True), ("another", False)):
        report = build_report(now, fit(now, drafter), tmp_path / drafter, against=older, replicates=60)
        drift = report.data["drift"]
        assert drift["same_draft_model"] == same
        assert any(row["moved"] for row in drift["rows"] if row["domain"] == "all") == same
        assert ("another draft model" in format_table(report)) == (not same)


def test_joined_conversations_stay_in_their_domain(heads, monkeypatch) -> None:
    """Else a domain's rounds are counted as another's, once there are more conversations than clusters."""
    monkeypatch.setattr("dspark.calibration.bootstrap.MAX_CLUSTERS", 12)
    events = heads.synthetic_head(900, conversations=300)
    kept = conversation_sums(events, identity(3))
    rounds = dict.fromkeys(("math", "code", "chat"), 0)
    for cluster, slot, _, n, _, _ in kept["cells"]:
        rounds[kept["domains"][cluster]] += n if slot == 0 else 0
    assert rounds == dict.fromkeys(("math", "code", "chat"), 300)
    assert len(kept["domains"]) == 12


def test_other_blocks_do_not_compare(heads) -> None:
    with pytest.raises(DsparkError, match="3 slots, but got one of 2"):
        refuse_other_slots({"num_slots": 2}, 3)
