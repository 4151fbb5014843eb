from __future__ import annotations

from dspark.contracts import Round
from dspark.runner.acceptance import Drafted, acceptance, by_domain


def a_round(verified: int, accepted: int, slots: int = 3) -> Round:
    return Round(anchor=0, drafted=(1,) * slots, verified=verified, accepted=accepted)


def test_hand_computed() -> None:
    got = acceptance([Drafted("x", [a_round(3, 0), a_round(3, 1), a_round(3, 3), a_round(1, 1)], 99)], 3)
    assert got.rounds == 4 and got.accepted == 5 / 4 and got.tau == 9 / 4
    # slot 0 tried in all four and accepted in three; slot 1 tried in two (the fourth round verified one draft only)
    assert got.per_slot == (3 / 4, 1 / 2, 1.0)


def test_no_rounds_and_domains() -> None:
    assert acceptance([], 2).tau == 1.0 and acceptance([], 2).per_slot == (None, None)
    got = by_domain(
        [Drafted("math", [a_round(3, 3)], 99), Drafted("chat", [a_round(3, 0)], 99), Drafted("math", [], 9)], 3
    )
    assert list(got) == ["overall", "chat", "math"]
    assert got["overall"].tau == 2.5 and got["math"].tau == 4.0 and got["chat"].tau == 1.0


def test_a_sequence_that_ends_on_an_accepted_draft_got_no_token_of_the_targets_own() -> None:
    first = Round(anchor=5, drafted=(1, 1, 1), verified=3, accepted=1)  # positions 6 and 7
    last = Round(anchor=7, drafted=(1, 1), verified=2, accepted=2)  # 8 and 9, the stop token
    assert acceptance([Drafted("x", [first, last], 9)], 3).tau == 2.0
    after = Drafted("x", [first, Round(anchor=7, drafted=(1,), verified=1, accepted=1)], 10)  # one more, undrafted
    assert acceptance([after], 3).tau == 2.0
