"""Whether the draft model is asked at all in a round, by what its last blocks were worth.

A schedule can cut a block to nothing, but by then the block has been drafted, and at large batches drafting alone costs
a quarter of a pass. So the confidences of the last blocks are kept, and where rounds of as many requests with such
blocks, drafting included, would yield fewer tokens per second than rounds without, the model rests. Now and then it is
asked whatever they say, for texts and weights change, and more seldom every time that nothing comes of it: rounds with
about as many requests (up to a power of two) share the count. Earlier rounds alone decide, so under the rejection
verifier the law of the output does not change. Beside a lookup only blocks that were preferred to it are seen, so the
model is thought a little better there than it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Blocks = NDArray[np.float64]  # [n, K]: the probability that the first k + 1 drafts are all accepted; -1: no such draft
Worth = Callable[[int, Blocks, NDArray[np.bool_]], float]  # of so many requests: tokens per second with over without

_KEPT = 128  # blocks
_FEW = 8  # blocks that are seen before anything is concluded
_FIRST, _MOST, _LONGER = 4, 256, 4  # rounds of rest: the first time, at most, and the factor in between


@dataclass(slots=True)
class _Rest:
    """left: rounds of the rest that is on. pause: rounds of the next one."""

    left: int = 0
    pause: int = _FIRST


class Gate:
    """One engine's, over all of its runs."""

    def __init__(self) -> None:
        self._blocks: deque[tuple[Blocks, bool]] = deque(maxlen=_KEPT)
        self._unseen = _FEW  # blocks to be seen before the next verdict
        self._rests: dict[int, _Rest] = {}
        self._verdicts: dict[int, float] = {}  # by requests, of what was seen until a few blocks ago
        self._since = 0

    def open(self, requests: int, worth: Worth) -> bool:
        """Whether to draft in the next round, which has so many requests. Counts the round."""
        if self._unseen > 0:
            return True
        rest = self._rests.setdefault(requests.bit_length(), _Rest())
        if self._verdict(requests, worth) >= 1.0:
            rest.left, rest.pause = 0, _FIRST
            return True
        rest.left = (rest.left or rest.pause) - 1
        if rest.left == 0:
            rest.pause = min(_MOST, _LONGER * rest.pause)
            self._try_again()
        return False

    def learn(self, blocks: Blocks, modelled: NDArray[np.bool_]) -> None:
        """Of a round that drafted. modelled [n]: whose block is the draft model's, and not looked up."""
        self._blocks.extend(zip(blocks, modelled.tolist(), strict=True))
        self._unseen -= len(blocks)
        self._since += len(blocks)
        if self._since >= _FEW:
            self._since = 0
            self._verdicts.clear()

    def _try_again(self) -> None:
        """What was seen before the rest counts half."""
        self._unseen = _FEW
        for _ in range(len(self._blocks) // 2):
            self._blocks.popleft()

    def _verdict(self, requests: int, worth: Worth) -> float:
        if requests not in self._verdicts:
            blocks = np.full((len(self._blocks), max(len(row) for row, _ in self._blocks)), -1.0)
            for to, (row, _) in zip(blocks, self._blocks, strict=True):
                to[: len(row)] = row
            self._verdicts[requests] = worth(requests, blocks, np.array([model for _, model in self._blocks]))
        return self._verdicts[requests]
