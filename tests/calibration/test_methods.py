"""Platt scaling and isotonic regression: against the definition, on heads whose miscalibration is known."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.calibration.events import Events
from dspark.calibration.fitting import fit
from dspark.calibration.isotonic import pools
from dspark.calibration.measures import nll
from dspark.calibration.record import METHODS, survival_ece
from dspark.contracts import DsparkError
from dspark.slot_maps import SlotMap, identity, rates


def shifted(heads, rounds: int, seed: int = 0) -> Events:
    """A head whose logits are 2 z + 1.5 where z is right: no temperature can mend it."""
    true = heads.synthetic_head(rounds, scale=1.0, seed=seed)
    return Events(2 * true.confidence_logits + 1.5, true.accepted, true.verified, true.domain, true.conversation)


def mean(values: tuple[float | None, ...]) -> float:
    known = [v for v in values if v is not None]
    return sum(known) / len(known)


def test_platt_finds_slope_and_shift(heads) -> None:
    for fitted in fit(shifted(heads, 12000), "d", "platt").maps:
        assert fitted.temperature == pytest.approx(2.0, rel=0.15)
        assert fitted.shift == pytest.approx(-0.75, abs=0.12)


def test_a_shift_is_beyond_temperatures_and_mended_by_the_others(heads) -> None:
    fitted_on, held_out = shifted(heads, 4000), shifted(heads, 8000, seed=5)
    error = {m: mean(survival_ece(held_out, fit(fitted_on, "d", m).maps)) for m in METHODS}
    assert mean(survival_ece(held_out, identity(3))) > error["temperature"] > 0.03
    assert error["platt"] < 0.02
    assert error["isotonic"] < 0.03


def test_isotonic_mends_what_is_no_sigmoid(heads) -> None:
    """Probabilities squashed to a step: right only where the map bends twice."""
    true = heads.synthetic_head(6000, scale=1.0)

    def bent(events: Events) -> Events:
        z = events.confidence_logits
        return Events(torch.where(z > 0.8, z + 4, z - 4), events.accepted, events.verified, events.domain,
                      events.conversation)  # fmt: skip

    held_out = bent(heads.synthetic_head(9000, scale=1.0, seed=3))
    error = {m: mean(survival_ece(held_out, fit(bent(true), "d", m).maps)) for m in METHODS}
    assert error["isotonic"] < min(error["platt"], error["temperature"])
    assert error["isotonic"] < 0.03


@given(st.lists(st.tuples(st.integers(-5, 5), st.booleans()), min_size=1, max_size=12))
def test_pools_are_the_isotonic_regression(points: list[tuple[int, bool]]) -> None:
    """Against the max-min formula: max over i <= k of min over j >= k of the mean of y[i..j] (over distinct z)."""
    z, y = (torch.tensor(column, dtype=torch.float64) for column in zip(*points, strict=True))
    found = pools(z, y)
    assert all(a[1] < b[0] and a[2] < b[2] for a, b in itertools.pairwise(found))
    values = z.unique().tolist()
    for k, at in enumerate(values):
        wanted = max(
            min(float(y[(z >= values[i]) & (z <= values[j])].mean()) for j in range(k, len(values)))
            for i in range(k + 1)
        )  # fmt: skip
        mine = next(mean for first, last, mean in found if first <= at <= last)
        assert mine == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("accepted", [0, 3])
def test_all_or_none_accepted_stays_inside(heads, method: str, accepted: int) -> None:
    logits = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    events = heads.plain_events(logits.tolist(), [accepted] * 50, [3] * 50)
    calibration = fit(events, "d", method)
    c = rates(events.confidence_logits.double(), calibration.maps)
    assert bool(((c > 0) & (c < 1)).all())
    if accepted == 0:
        assert calibration.maps[1:] == (SlotMap(), SlotMap())


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.tuples(st.floats(-30, 30, width=32), st.booleans()), min_size=1, max_size=15), st.sampled_from(METHODS)
)
def test_any_slot_gets_a_monotone_map(points: list[tuple[float, bool]], method: str) -> None:
    logits = torch.tensor([[z] for z, _ in points])
    events = Events(logits, [int(y) for _, y in points], [1] * len(points), ["d"] * len(points), ["c"] * len(points))
    chosen = fit(events, "d", method).maps
    order = logits.double()[logits[:, 0].argsort()]
    assert bool((rates(order, chosen)[:, 0].diff() >= 0).all())
    assert chosen == fit(events, "d", method).maps


@pytest.mark.parametrize(("middle", "spread"), [(88.0, 5.0), (88.0, 0.0), (-300.0, 40.0), (0.0, 1000.0), (1e30, 0.0)])
@pytest.mark.parametrize("follows", [False, True])
def test_platt_on_saturated_logits(heads, middle: float, spread: float, follows: bool) -> None:
    """Where every sigmoid is 0 or 1 there is no slope to follow: never worse than leaving them, near the best there is
    where slopes within the limits can say it."""
    generator = torch.Generator().manual_seed(0)
    z = middle + spread * torch.randn(400, generator=generator)
    chance = torch.sigmoid((z - middle) / max(spread, 1.0)) if follows else torch.full((400,), 0.6)
    accepted = (torch.rand(400, generator=generator) < chance).long()
    events = heads.plain_events(z[:, None].tolist(), accepted.tolist(), [1] * 400)
    (fitted,) = fit(events, "drafter", "platt").maps

    def cost(chosen: SlotMap) -> float:
        return float(nll(rates(events.confidence_logits.double(), (chosen,)), events.labels).mean())

    assert cost(fitted) <= cost(SlotMap()) + 1e-9
    if spread <= 40.0 and abs(middle) < 1e6:
        assert cost(fitted) < 0.75 if spread <= 5.0 else cost(fitted) < cost(SlotMap())


def test_an_unknown_method(heads) -> None:
    with pytest.raises(DsparkError, match="temperature, platt, isotonic"):
        fit(heads.synthetic_head(20), "d", "beta")
