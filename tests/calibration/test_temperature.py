"""Sequential temperature scaling on heads whose miscalibration is known."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.calibration.events import Events
from dspark.calibration.fitting import fit
from dspark.calibration.record import Calibration, survival_ece
from dspark.contracts import DsparkError
from dspark.sealed import sealed
from dspark.slot_maps import SlotMap, identity


def temperatures(calibration: Calibration) -> tuple[float, ...]:
    assert all(m.shift == 0 and not m.knots for m in calibration.maps)
    return tuple(m.temperature for m in calibration.maps)


def mean(values: tuple[float | None, ...]) -> float:
    known = [v for v in values if v is not None]
    return sum(known) / len(known)


@pytest.mark.parametrize("scale", [0.5, 1.0, 2.0])
def test_finds_the_true_temperature(heads, scale: float) -> None:
    calibration = fit(heads.synthetic_head(6000, scale=scale), "drafter")
    assert temperatures(calibration) == pytest.approx([scale] * 3, rel=0.12)


def test_helps_on_held_out_events(heads) -> None:
    calibration = fit(heads.synthetic_head(3000), "drafter")
    held_out = heads.synthetic_head(6000, seed=7)
    before, after = (survival_ece(held_out, m) for m in (identity(3), calibration.maps))
    assert all(b > 0.07 for b in before)
    assert all(a < 0.025 for a in after)


def test_does_no_harm_to_a_calibrated_head(heads) -> None:
    for seed in range(3):
        calibration = fit(heads.synthetic_head(150, scale=1.0, seed=seed), "drafter")
        held_out = heads.synthetic_head(4000, scale=1.0, seed=90)
        assert mean(survival_ece(held_out, calibration.maps)) < 0.05


@pytest.mark.parametrize("rounds", [1, 4, 30, 300])
def test_never_worse_on_the_fit_split(heads, rounds: int) -> None:
    for seed, scale in ((0, 2.0), (1, 0.6), (2, 1.0)):
        calibration = fit(heads.synthetic_head(rounds, scale=scale, seed=seed), "drafter")
        assert mean(calibration.ece_after) <= mean(calibration.ece_before)
        assert calibration.ece_after[0] <= calibration.ece_before[0]


def test_one_slot(heads) -> None:
    events = heads.synthetic_head(3000, slots=1)
    calibration = fit(events, "drafter")
    assert temperatures(calibration) == pytest.approx([2.0], rel=0.15)
    assert calibration.num_events == 3000


def test_is_deterministic_and_describes_its_data(heads) -> None:
    events = heads.synthetic_head(200)
    first, second = fit(events, "drafter"), fit(events, "drafter")
    assert first == second
    assert first.data_hash == events.data_hash()
    assert first.slot_events == tuple(events.conditional_observed.sum(0).tolist())
    assert fit(events, "drafter", data_hash="given").data_hash == "given"


@pytest.mark.parametrize("accepted", [0, 3])
def test_all_or_none_accepted(heads, accepted: int) -> None:
    logits = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    events = heads.plain_events(logits.tolist(), [accepted] * 50, [3] * 50)
    calibration = fit(events, "drafter")
    assert all(0.1 <= t <= 10 and math.isfinite(t) for t in temperatures(calibration))
    assert mean(calibration.ece_after) <= mean(calibration.ece_before)
    if accepted == 0:  # nobody reached the later slots: there is nothing to fit them to
        assert temperatures(calibration)[1:] == (1.0, 1.0)
        assert calibration.slot_events == (50, 0, 0)


def test_slot_without_events_is_no_data(heads) -> None:
    events = heads.plain_events([[1.0, 2.0, 3.0]] * 20, [1, 2] * 10, [2] * 20)
    calibration = fit(events, "drafter")
    assert temperatures(calibration)[2] == 1.0
    assert calibration.slot_events[2] == 0
    assert calibration.ece_before[2] is None
    assert calibration.ece_after[2] is None
    assert "NaN" not in json.dumps(calibration.to_dict())


def test_constant_head_keeps_temperature_one(heads) -> None:
    events = heads.plain_events([[0.0, 0.0]] * 30, [0, 1, 2] * 10, [2] * 30)
    assert temperatures(fit(events, "drafter")) == (1.0, 1.0)


def test_json_round_trip(heads, tmp_path) -> None:
    calibration = fit(heads.plain_events([[1.0, 2.0, 3.0]] * 20, [1, 2] * 10, [2] * 20), "drafter")
    calibration.save(tmp_path / "calibration.json")
    assert Calibration.load(tmp_path / "calibration.json", drafter_hash="drafter", num_slots=3) == calibration


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "calibration of format"),
        ({"unknown": 1}, "the keys"),
        ({"maps": [{"temperature": -1.0, "shift": 0.0, "knots": []}] * 3}, "temperatures from"),
        ({"maps": [{"temperature": 1.0, "shift": 0.0}] * 3}, "keys"),
        ({"maps": []}, "one per slot"),
        ({"maps": 1.0}, "a list"),
        ({"maps": [SlotMap().to_dict()] * 2}, "2 entries"),
        ({"method": "other"}, "one of temperature, platt, isotonic"),
        ({"ece_after": [0.1, "0.2", 0.1]}, "finite numbers or null"),
        ({"drafter_hash": None}, "a string"),
        ({"num_events": -1}, "whole number"),
        ({"slot_events": [1, 2]}, "3 whole numbers"),
    ],
)
def test_broken_record_is_refused(heads, tmp_path, change: dict, message: str) -> None:
    good = fit(heads.synthetic_head(20), "drafter").to_dict()
    (tmp_path / "calibration.json").write_text(json.dumps(sealed(good | change)))
    with pytest.raises(DsparkError, match=message):
        Calibration.load(tmp_path / "calibration.json")


def test_an_edited_record_is_refused(heads, tmp_path) -> None:
    path = tmp_path / "calibration.json"
    fit(heads.synthetic_head(60), "drafter").save(path)
    text = path.read_text()
    path.write_text(text.replace('"num_events": 60', '"num_events": 61'))
    with pytest.raises(DsparkError, match="edited or damaged"):
        Calibration.load(path)


def test_stale_and_missing_records_are_refused(heads, tmp_path) -> None:
    path = tmp_path / "calibration.json"
    with pytest.raises(DsparkError, match="calibration: expected a JSON file"):
        Calibration.load(path)
    fit(heads.synthetic_head(20), "drafter").save(path)
    with pytest.raises(DsparkError, match="expected drafter_hash to be 'newer'"):
        Calibration.load(path, drafter_hash="newer")
    with pytest.raises(DsparkError, match="5 slots"):
        Calibration.load(path, num_slots=5)
    path.write_text("[]")
    with pytest.raises(DsparkError, match="expected a calibration of format"):
        Calibration.load(path)


@st.composite
def some_events(draw: st.DrawFn) -> Events:
    rounds, slots = draw(st.integers(1, 12)), draw(st.integers(1, 3))
    logits = draw(
        st.lists(
            st.lists(st.floats(-30, 30, width=32), min_size=slots, max_size=slots), min_size=rounds, max_size=rounds
        )
    )
    verified = draw(st.lists(st.integers(0, slots), min_size=rounds, max_size=rounds))
    accepted = [draw(st.integers(0, v)) for v in verified]
    return Events(torch.tensor(logits), accepted, verified, ["d"] * rounds, ["c"] * rounds)


@settings(max_examples=12, deadline=None)
@given(some_events())
def test_any_events_fit_safely(events: Events) -> None:
    calibration = fit(events, "drafter")
    assert all(0.1 - 1e-12 <= t <= 10 + 1e-12 for t in temperatures(calibration))
    pairs = [(b, a) for b, a in zip(calibration.ece_before, calibration.ece_after, strict=True) if b is not None]
    assert sum(a for _, a in pairs) <= sum(b for b, _ in pairs)
    assert Calibration.from_dict(json.loads(json.dumps(calibration.to_dict(), allow_nan=False))) == calibration
