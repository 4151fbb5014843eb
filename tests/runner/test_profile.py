"""The capacity curve: measured over the sizes that run, monotone, whole in its file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dspark.contracts import DsparkError
from dspark.runner import engine, profile
from dspark.runner.batch import FlatBatch
from dspark.runner.curve import CapacityCurve
from dspark.runner.profile import ProfileOptions, measure


def test_every_size_of_batch_and_width_is_a_size(target, drafter) -> None:
    told: list[int] = []
    options = ProfileOptions(requests=(3, 1), context=6, repeats=2)
    curve = measure(target, drafter, options, {"machine": "tiny"}, told.append)
    assert curve.rows == (1, 2, 3, 4, 5, 6, 9, 12, 15)  # one and three requests, widths 0 ... 4
    assert curve.requests == (1, 3)
    assert told == [1, 3]
    assert list(curve.seconds) == sorted(curve.seconds)
    assert curve.facts == {"machine": "tiny", "context": 6}
    assert curve.prompt_rows == (16, 64)  # 256 of a prompt do not fit this target's context of 256
    plain = measure(target, None, options)
    assert plain.rows == (1, 3)
    assert plain.requests == ()
    assert plain.drafting(3) == 0.0


@pytest.mark.parametrize("widths", [5, 1])
def test_long_prompts_leave_every_request_alive_until_the_last_round(target, drafter, monkeypatch, widths) -> None:
    """Eight prompts of 150 tokens are five chunks of 256: the first ones decode meanwhile. Then three turns of every
    width (one where there is no draft model), all eight in every round and each with all its drafts."""
    passes: list[tuple[int, int, int]] = []
    build = FlatBatch.build

    def noted(decoding, predictions, lengths, chunks):
        passes.append((len(decoding), sum(lengths), sum(take for _, take in chunks)))
        return build(decoding, predictions, lengths, chunks)

    monkeypatch.setattr(engine.FlatBatch, "build", staticmethod(noted))
    monkeypatch.setattr(profile, "PROMPT_ROWS", ())
    curve = measure(target, drafter if widths > 1 else None, ProfileOptions(requests=(8,), context=150, repeats=2))
    prefill = [p for p in passes if p[2]]
    assert [p[2] for p in prefill] == [256] * 4 + [176]
    assert [p[0] for p in prefill] == [0, 1, 3, 5, 6]
    assert {p[1] for p in prefill} == {0}  # nothing is verified meanwhile, so that no budget is used up
    assert passes[5:] == [(8, 8 * width, 0) for width in range(widths)] * 3
    assert curve.rows == (8, 16, 24, 32, 40)[:widths]
    assert curve.prompt_rows == ()


def test_chunks_of_prompts_are_timed_beside_no_decoding(target, drafter, monkeypatch) -> None:
    passes: list[tuple[int, int]] = []
    build = FlatBatch.build

    def noted(decoding, predictions, lengths, chunks):
        batch = build(decoding, predictions, lengths, chunks)
        passes.append((len(batch.ids), len(batch.logit_rows)))
        return batch

    monkeypatch.setattr(engine.FlatBatch, "build", staticmethod(noted))
    assert len(profile._chunks(target, drafter, ProfileOptions(repeats=3), 16)) == 3
    assert passes == [(16, 0), (1, 1)] * 4  # the first is warm-up; only the others' one row has logits


def test_a_pass_with_prompt_rows_by_hand() -> None:
    """A pass of 16 prompt rows takes 1.5 s, half a second more than the smallest pass: that is what they add."""
    curve = CapacityCurve((1, 5), (1.0, 2.0), prompt_rows=(16, 32), prompt_seconds=(1.5, 3.5))
    assert curve.mixed(5, 0) == 2.0
    assert curve.mixed(0, 16) == 1.5
    assert curve.mixed(5, 16) == 2.5
    assert curve.mixed(5, 8) == 2.25
    assert curve.mixed(1, 24) == 2.5
    cheap = CapacityCurve((1, 5), (1.0, 2.0), prompt_rows=(16,), prompt_seconds=(0.5,))
    assert cheap.mixed(5, 16) == 2.0  # never less than without them
    plain = CapacityCurve((1, 5), (1.0, 2.0))
    assert plain.mixed(1, 4) == 2.0  # priced as any row


def test_break_even_by_hand() -> None:
    """One request: a plain pass 1 s; a block of 3 costs 1.6 s and 0.2 s of drafting, so 0.8 accepted drafts pay."""
    curve = CapacityCurve((1, 2, 4), (1.0, 1.2, 1.6), (1,), (0.2,))
    assert curve.break_even(1, 3) == pytest.approx(0.8)
    assert curve.break_even(1, 1) == pytest.approx(0.4)
    assert CapacityCurve((1, 64), (1.0, 1.0)).break_even(8, 5) == 0.0


def test_file_round_trip_and_what_is_no_curve(tmp_path: Path) -> None:
    curve = CapacityCurve((1, 8), (0.1, 0.05), (1,), (0.01,), padded=True, facts={"a": [1]})
    assert curve.seconds == (0.1, 0.1)  # a larger batch that seemed faster was noise
    curve.save(tmp_path / "curve.json")
    assert CapacityCurve.load(tmp_path / "curve.json") == curve
    good = curve.to_dict()
    older = {key: value for key, value in good.items() if not key.startswith("prompt_")}
    assert CapacityCurve.from_dict(older) == curve
    for change in (
        {"rows": []}, {"rows": [8, 1]}, {"rows": [0, 8]}, {"rows": [1, 2, 3]}, {"seconds": [1.0, float("inf")]},
        {"seconds": [1.0, 0]}, {"seconds": ["1", 2]}, {"padded": 1}, {"facts": None}, {"format": "x"}, {"more": 1},
        {"rows": [1, 2**70]}, {"seconds": [1, 10**400]}, {"seconds": [1e-300, 1.0]}, {"facts": {"x": float("nan")}},
        {"facts": {"x": "\ud800"}}, {"rows": 3}, {"prompt_rows": [16]}, {"prompt_rows": [16], "prompt_seconds": [-1.0]},
    ):  # fmt: skip
        (tmp_path / "bad.json").write_text(json.dumps(good | change))
        with pytest.raises(DsparkError, match=r"capacity curve: expected .*dspark profile"):
            CapacityCurve.load(tmp_path / "bad.json")
    (tmp_path / "bad.json").write_text("[]")
    with pytest.raises(DsparkError, match="format"):
        CapacityCurve.load(tmp_path / "bad.json")
    with pytest.raises(DsparkError, match="at least 1"):
        ProfileOptions(requests=())
    with pytest.raises(DsparkError, match="at least 1"):
        ProfileOptions(context=0)
