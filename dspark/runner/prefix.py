"""Prompts that begin alike are read once: rows that another sequence has computed are copied, not computed again.

A token's keys, values and context features depend on its own prefix alone, to the last bit, so a copy is what a
prefill would have written; whatever was reused, the contract holds. A finished sequence leaves its rows behind until
the room is needed. Copies, not shared pages: the arena stays one contiguous region per sequence, and a copy costs a
memcpy where a prefill costs a pass of the target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dspark.runner.sequence import Sequence

WORTH_WAITING = 16  # tokens another is about to compute: about what a pass costs beside its rows (docs/scheduling.md)


@dataclass(slots=True)
class PrefixCount:
    """prompt_tokens: of all requests admitted; reused: those of them that were copied; hits: requests that copied."""

    prompt_tokens: int = 0
    reused: int = 0
    hits: int = 0


@dataclass(frozen=True, slots=True)
class Source:
    """Where a prefix can be copied from: `ready` rows of `donor` are there now, `coming` once its prefill is done."""

    donor: Sequence
    ready: int
    coming: int

    @property
    def in_rings(self) -> bool:
        """Whether rings too hold, or will hold, what a copy needs: the donor is not read past the prefix by more than
        the one token that every prompt leaves to itself."""
        return self.coming >= self.donor.prompt_length - 1 and self.donor.cached <= self.coming + 1


def sources(
    sequence: Sequence, donors: Iterable[Sequence], usable: Callable[[Source, Sequence], bool] = lambda *_: True
) -> tuple[Source | None, Source | None]:
    """Of the usable donors (the one that has the most of this prompt now, the one that will have the most). At least
    the prompt's last token is left: its logits are what the first token is drawn from."""
    wanted = np.asarray(sequence.tokens[: sequence.prompt_length - 1])
    now: Source | None = None
    later: Source | None = None
    for donor in donors:
        coming = _common(wanted, donor)
        source = Source(donor, min(coming, donor.cached), coming)
        more_now, more_later = source.ready > (now.ready if now else 0), coming > (later.coming if later else 0)
        if (more_now or more_later) and usable(source, sequence):
            now, later = source if more_now else now, source if more_later else later
    return now, later


def _common(wanted: NDArray[np.int64], donor: Sequence) -> int:
    """How many tokens both begin with, of those the donor has or will have in the cache."""
    theirs = np.asarray(donor.tokens[: min(len(wanted), max(donor.cached, donor.prompt_length))])
    differs = np.flatnonzero(wanted[: len(theirs)] != theirs)
    return int(differs[0]) if len(differs) else len(theirs)
