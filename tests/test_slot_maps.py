"""From logits to probabilities: by hand, monotone, scalar and tensor alike, and what is refused."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dspark.calibration.record import survival
from dspark.contracts import DsparkError
from dspark.slot_maps import SlotMap, identity, of_temperatures, rates, read_maps

KNOTS = SlotMap(knots=((-1.0, 0.2), (0.0, 0.2), (2.0, 0.6)))


def test_by_hand() -> None:
    logits = torch.tensor([[0.0, 2.0, 50.0]], dtype=torch.bfloat16)
    c = rates(logits, of_temperatures([1.0, 2.0, 1.0]))
    assert c.dtype == torch.float32
    assert c[0].tolist() == pytest.approx([0.5, 0.7310586, 1.0])
    assert survival(logits, of_temperatures([1.0, 2.0, 1.0]))[0].tolist() == pytest.approx([0.5, 0.3655293, 0.3655293])
    assert SlotMap(2.0, -1.0).rate(2.0) == 0.5


@pytest.mark.parametrize(
    ("z", "p"), [(-9, 0.2), (-1, 0.2), (-0.5, 0.2), (0, 0.2), (0.5, 0.3), (1, 0.4), (2, 0.6), (9, 0.6)]
)
def test_knots_by_hand(z: float, p: float) -> None:
    assert KNOTS.rate(z) == pytest.approx(p)
    assert float(rates(torch.tensor([[float(z)]]), [KNOTS])) == pytest.approx(p)
    assert SlotMap(knots=((1.0, 0.25),)).rate(z) == 0.25
    assert float(rates(torch.tensor([[float(z)]]), [SlotMap(knots=((1.0, 0.25),))])) == 0.25


@st.composite
def maps(draw: st.DrawFn) -> SlotMap:
    if draw(st.booleans()):
        return SlotMap(draw(st.floats(0.05, 20.0)), draw(st.floats(-5, 5)))
    z = sorted(draw(st.lists(st.integers(-40, 40), min_size=1, max_size=6, unique=True)))
    p = sorted(draw(st.lists(st.floats(0, 1), min_size=len(z), max_size=len(z))))
    return SlotMap(knots=tuple(zip(map(float, z), p, strict=True)))


finite = st.floats(-1e4, 1e4, width=32)


@given(st.lists(st.lists(finite, min_size=3, max_size=3), min_size=1, max_size=8), st.tuples(maps(), maps(), maps()))
def test_probabilities_survival_and_order(rows: list[list[float]], chosen: tuple[SlotMap, ...]) -> None:
    logits = torch.tensor(rows)
    c, a = rates(logits, chosen), survival(logits, chosen)
    assert ((c >= 0) & (c <= 1)).all()
    assert ((a >= 0) & (a <= 1)).all()
    assert (a.diff(dim=1) <= 0).all()
    for slot in range(3):  # equal where fp32 saturates or a map is flat, never the other way round
        assert (c[logits[:, slot].argsort(), slot].diff() >= -1e-6).all()
    for row, said in zip(rows, rates(logits.double(), chosen).tolist(), strict=True):
        scalar = [m.rate(z) for m, z in zip(chosen, row, strict=True)]
        assert scalar == pytest.approx(said, abs=1e-12)
        assert all(0 <= p <= 1 for p in scalar)
    assert read_maps(json.loads(json.dumps([m.to_dict() for m in chosen]))) == chosen


@pytest.mark.parametrize("z", [-800.0, 800.0])
def test_extreme_logits(z: float) -> None:
    for chosen in (SlotMap(), SlotMap(0.1, 3.0), KNOTS):
        assert math.isfinite(chosen.rate(z))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": 0.0}, "temperatures from"),
        ({"temperature": float("inf")}, "temperatures from"),
        ({"temperature": True}, "temperatures from"),
        ({"shift": float("nan")}, "finite shifts"),
        ({"shift": "1"}, "finite shifts"),
        ({"shift": 10**400}, "finite shifts"),
        ({"temperature": 1e-300}, "temperatures from"),
        ({"knots": ((0.0, 0.5), (0.0, 0.6))}, "ascending"),
        ({"knots": ((0.0, 0.5), (1.0, 0.4))}, "ascending"),
        ({"knots": ((0.0, 1.5),)}, "in \\[0, 1\\]"),
        ({"knots": ((0.0,),)}, "pairs"),
    ],
)
def test_no_map(values: dict, message: str) -> None:
    with pytest.raises(DsparkError, match=message):
        SlotMap(**values)


@pytest.mark.parametrize("values", [None, 3, [1.0], [{}], [{"temperature": 1.0, "shift": 0.0, "knots": [1]}]])
def test_what_is_no_record(values: object) -> None:
    with pytest.raises(DsparkError, match="Calibrate this draft model again"):
        read_maps(values)


def test_another_number_of_slots() -> None:
    with pytest.raises(DsparkError, match="2 maps, one per slot"):
        rates(torch.zeros(4, 2), identity(3))
