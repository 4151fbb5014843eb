"""Whether the draft model is asked at all in a round, by what its last blocks were worth.

A schedule can cut a block to nothing, but by then the block has been drafted, and at large batches drafting alone costs
a quarter of a pass. So where a round with drafts, drafting included, was expected to yield fewer tokens per second than
one without, the model rests for some rounds, and longer every time that this is found again. Rounds with about as many
requests (up to a power of two) share a verdict. Confidences of earlier rounds alone decide, so under the rejection
verifier the law of the output does not change.
"""

from __future__ import annotations

from dataclasses import dataclass

_OLD = 0.75  # what a verdict is worth a round later: a rest makes the next trial count almost alone
_FIRST, _MOST, _LONGER = 4, 256, 4  # rounds of rest: the first time, at most, and the factor in between


@dataclass(slots=True)
class _State:
    """ratio: running mean of tokens per second with drafts over that without. age: rounds since it was learned; it
    begins as if it were forgotten."""

    ratio: float = 1.0
    age: int = 1000
    rest: int = 0
    pause: int = _FIRST


class Gate:
    """One engine's, over all of its runs."""

    def __init__(self) -> None:
        self._states: dict[int, _State] = {}

    def open(self, requests: int) -> bool:
        """Whether to draft in the next round, which has so many requests. Counts the round."""
        state = self._states.setdefault(requests.bit_length(), _State())
        state.age += 1
        if state.rest == 0:
            return True
        state.rest -= 1
        return False

    def learn(self, requests: int, ratio: float) -> None:
        """Of a round that drafted: tokens per second expected with its drafts over that of a round without."""
        state = self._states.setdefault(requests.bit_length(), _State())
        state.ratio = ratio + (state.ratio - ratio) * _OLD ** max(1, state.age)
        state.age = 0
        if state.ratio >= 1.0:
            state.pause = _FIRST
        else:
            state.rest, state.pause = state.pause, min(_MOST, _LONGER * state.pause)
