"""Rates against hand-computed examples, and intervals that resample conversations."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dspark.contracts import Round
from dspark.runner.acceptance import Drafted, acceptance, count
from dspark.scorecard.rates import count_table, figures, rates


def conversation(rounds: list[tuple[int, int]], domain: str = "math", slots: int = 3) -> dict[str, Any]:
    """rounds: (verified, accepted) each."""
    made = [Round(anchor=0, drafted=(1,) * v, verified=v, accepted=a) for v, a in rounds]
    counts = count(Drafted(domain, made, 999), slots)
    fields = {name: getattr(counts, name) for name in counts.__slots__}
    return {"prompt_id": "x", "domain": domain, **fields}


def values(found: list[dict[str, Any]]) -> list[float | None]:
    return [one["value"] for one in found]


def test_two_conversations_by_hand_slot_zero_included() -> None:
    """Of others it is known that a metric skipped slot 0, or mixed the two lengths."""
    some = [conversation([(3, 0), (3, 3)]), conversation([(3, 1), (3, 2)], "code")]
    got = figures(some)
    assert list(got) == ["overall", "code", "math"]
    overall = got["overall"]
    assert (overall["conversations"], overall["rounds"], overall["tried"]) == (2, 4, [4, 3, 2])
    assert overall["tau"]["value"] == 10 / 4  # 0, 3, 1, 2 drafts and four tokens of the target's own
    assert overall["accepted"]["value"] == 6 / 4
    assert values(overall["conditional"]) == pytest.approx([3 / 4, 2 / 3, 1 / 2])
    assert values(overall["survival"]) == pytest.approx([3 / 4, 2 / 4, 1 / 4])  # of all blocks
    assert got["math"]["tau"]["value"] == 5 / 2
    assert got["code"]["accepted"]["value"] == 3 / 2


def test_a_block_cut_short_by_the_end_did_not_fail() -> None:
    """Half the blocks fail at once, half go through, some of these end the sequence after one draft: the share that
    survives all slots is still a half, which counting blocks of full length would put at a third."""
    some = [conversation([(3, 0), (3, 0), (3, 3), (1, 1)])]
    assert values(figures(some)["overall"]["survival"]) == [0.5, 0.5, 0.5]


def test_a_slot_never_reached_survives_nowhere_and_one_never_verified_is_unknown() -> None:
    nowhere = figures([conversation([(3, 0), (3, 1)])])["overall"]
    assert values(nowhere["conditional"]) == [0.5, 0.0, None]
    assert values(nowhere["survival"]) == [0.5, 0.0, 0.0]
    unknown = figures([conversation([(1, 1), (1, 0)])])["overall"]
    assert values(unknown["conditional"]) == [0.5, None, None]
    assert values(unknown["survival"]) == [0.5, None, None]


def test_no_round_at_all_is_no_number() -> None:
    got = figures([conversation([]), conversation([])])["overall"]
    assert got["rounds"] == 0
    assert got["tau"] == got["accepted"] == {"value": None, "interval": None}


def test_they_are_the_figures_of_acceptance() -> None:
    rounds = [Round(5, (1, 1, 1), 3, 1), Round(7, (1, 1), 2, 2)]
    whole = Round(7, (1, 1, 1), 3, 2)
    drafted = [Drafted("x", rounds, 9), Drafted("x", [whole], 40)]  # the first ends on an accepted draft
    counts = [count(d, 3) for d in drafted]
    table = count_table([{name: getattr(c, name) for name in c.__slots__} for c in counts])
    got, wanted = rates(table.sum(0)), acceptance(drafted, 3)
    assert (float(got["tau"]), float(got["accepted"])) == (wanted.tau, wanted.accepted)
    assert tuple(got["conditional"].tolist()) == wanted.per_slot


def test_conversations_are_resampled_not_rounds() -> None:
    """Rounds of a conversation that all go the same way say no more than one of them."""
    chosen = (torch.arange(60) % 3 == 0).tolist()
    once = [conversation([(1, int(y))], slots=1) for y in chosen]
    often = [conversation([(1, int(y))] * 50, slots=1) for y in chosen]
    short, long = (figures(some)["overall"]["conditional"][0] for some in (once, often))
    assert short == long
    low, high = long["interval"]
    assert high - low == pytest.approx(2 * 1.96 * (2 / 9 / 60) ** 0.5, rel=0.2)


def test_intervals_are_keyed_and_hold_the_value() -> None:
    some = [conversation([(3, i % 4), (3, i // 2 % 4), (3, 3)], ("math", "code")[i % 2]) for i in range(40)]
    assert figures(some) == figures(some)
    for one in figures(some).values():
        for found in (one["tau"], one["accepted"], *one["conditional"], *one["survival"]):
            low, high = found["interval"]
            assert low <= found["value"] <= high
            assert low < high


def test_where_resampling_knows_of_no_error_there_is_no_interval() -> None:
    alone = figures([conversation([(3, 0), (3, 2)])])["overall"]
    assert alone["tau"] == {"value": 2.0, "interval": None}
    always = figures([conversation([(3, 3)]), conversation([(3, 3), (3, 3)])])["overall"]
    assert always["conditional"][0] == {"value": 1.0, "interval": None}
