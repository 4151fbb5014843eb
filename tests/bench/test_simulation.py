"""The simulation against what can be counted by hand, and the verb around it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dspark.bench.simulated import as_lines, pictures, predict, ways
from dspark.bench.simulation import NONE, Job, Way, pools_of, simulate
from dspark.calibration.figures import png
from dspark.contracts import DsparkError, Round
from dspark.runner.curve import CapacityCurve

FLAT = CapacityCurve((1, 1000), (1.0, 1.0), (1, 64), (0.5, 0.5))
STEEP = CapacityCurve((1, 8, 1000), (1.0, 1.1, 200.0), (1, 64), (0.1, 0.2))
SURE = Round(anchor=3, drafted=(1, 2, 3), verified=3, accepted=3, confidences=(0.99, 0.99, 0.99))
NEVER = Round(anchor=3, drafted=(1, 2, 3), verified=3, accepted=0, confidences=(0.02, 0.5, 0.5))
MIXED = {"chat": [SURE, NEVER, NEVER], "math": [SURE, SURE, NEVER]}


def test_rounds_by_hand() -> None:
    """Ten tokens: one of the prompt's own pass, then 4 + 4, then the last alone (nothing is worth drafting behind it).
    Four passes of a second, three of them drafted for half a second."""
    done = simulate({"chat": [SURE]}, FLAT, Way("fixed", 3), [Job("chat", 5, 10)], users=1)
    assert (done.tokens, done.rounds, done.verified, done.accepted) == (10, 3, 6, 6)
    assert done.seconds == pytest.approx(4 + 3 * 0.5)
    assert done.user_rate == pytest.approx(10 / done.seconds)
    plain = simulate({"chat": [SURE]}, FLAT, Way(NONE), [Job("chat", 5, 10)], users=1)
    assert (plain.rounds, plain.verified) == (9, 0)
    assert plain.seconds == pytest.approx(10)


def test_prompts_are_read_in_chunks_and_users_wait() -> None:
    jobs = [Job("chat", 600, 1)] * 3
    done = simulate({"chat": [SURE]}, FLAT, Way(NONE), jobs, users=2, prefill_chunk=256)
    assert done.seconds == pytest.approx(8)  # 5 chunks for the first two, 3 for the third, which waited for a place
    assert done.rounds == 0


def test_prompt_rows_are_priced_by_their_own_table() -> None:
    """600 tokens in chunks of 256, 256 and 88, the last of which writes the one token. 256 cost 4 s, 88 on the line
    from 1 s (the smallest pass) at none 1 + 3 * 88 / 256."""
    curve = CapacityCurve((1, 1000), (1.0, 1000.0), prompt_rows=(256,), prompt_seconds=(4.0,))
    done = simulate({"chat": [SURE]}, curve, Way(NONE), [Job("chat", 600, 1)], users=1)
    assert done.seconds == pytest.approx(4 + 4 + 1 + 3 * 88 / 256)


def test_a_block_of_one_is_one_way() -> None:
    titles = [way.title for way in ways(1, 0.3)]
    assert len(set(titles)) == len(titles) == 6


def test_many_numbers_of_users_are_told_eight_at_a_time() -> None:
    report = predict(MIXED, STEEP, ways(3, 0.3)[:2], [Job("chat", 4, 5)], list(range(1, 12)), 1, 0)
    assert max(map(len, as_lines(report))) <= 80
    assert sum(line.startswith("fixed 1") for line in as_lines(report)) == 4


def test_every_token_is_written_whatever_the_way() -> None:
    jobs = [Job("chat" if i % 2 else "math", 7 + i, 20 + i) for i in range(9)]
    for way in ways(3, 0.3):
        done = simulate(MIXED, STEEP, way, jobs, users=4)
        assert done.tokens == sum(j.response_tokens for j in jobs)
        assert 0 <= done.accepted <= done.verified
        assert done == simulate(MIXED, STEEP, way, jobs, users=4)
        assert done != simulate(MIXED, STEEP, way, jobs, users=4, key=1) or way.policy == NONE


def test_a_schedule_beats_fixed_lengths_where_rows_are_dear() -> None:
    """Confidences that are right, many users, a steep curve: verifying what will be rejected is what costs."""
    jobs = [Job("chat", 4, 40)] * 64
    rate = {way.title: simulate(MIXED, STEEP, way, jobs, users=32).rate for way in ways(3, 0.3)}
    assert rate["global"] > 1.1 * rate["fixed 3"]
    few = {way.title: simulate(MIXED, FLAT, way, jobs[:4], users=1).rate for way in ways(3, 0.3)}
    assert few["fixed 3"] > few["none"]


def test_only_whole_rounds_with_confidences_are_drawn_from() -> None:
    cut = Round(anchor=3, drafted=(1, 2, 3), verified=2, accepted=2, confidences=(0.9, 0.9, 0.9))
    end = Round(anchor=3, drafted=(1,), verified=1, accepted=1, confidences=(0.9,))
    assert pools_of({"chat": [cut, SURE, end]}) == {"chat": [SURE]}
    for recorded in ({}, {"chat": [cut]}, {"chat": [SURE], "math": [end]}):
        with pytest.raises(DsparkError, match="whole blocks"):
            pools_of(recorded)


def test_the_report(tmp_path: Path) -> None:
    report = predict(MIXED, STEEP, ways(3, 0.3), [Job("chat", 4, 20), Job("math", 9, 12)], [1, 8], 2, 0)
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    untried = as_lines(report)
    report["tried"] = [
        {"way": "threshold 0.3", "users": 8, "measured": 1234.5, "simulated": 11.0, "ratio": 1.1,
         "measured_per_user": 1234.5, "simulated_per_user": 1.4}
    ]  # fmt: skip
    text = as_lines(report)
    assert len(text) == len(untried) + 4
    assert max(map(len, text)) <= 80
    assert any(line.startswith("threshold 0.3") for line in text)
    for name, figure in pictures(report).items():
        (tmp_path / name).write_bytes(png(figure))
        assert (tmp_path / name).stat().st_size > 5000
