"""Drafts without a draft model: what came next where the last few tokens stood before.

They are looked up in two trees of contexts (contexts.py): that of the prompt, which holds the prompt, what this request
has written, and what its siblings have (requests with the same prompt ids, now or in an earlier generate call: a group
in RL), and that of all recent responses to whatever prompt. Each slot takes the longest matching context of either
tree, from ``max_match`` tokens down to ``min_match``; of the two the one that has been right more often. A slot that
finds none ends the block, so a block may be empty. The idea is that of DAS (arXiv:2511.13841), where the trajectories
of the last epochs draft for those of this one.

What a slot's draft is worth is learned: for each tree, length of match, and how far what was seen there agrees, how
often the target went on as was drafted. Every draft is judged by what was written, verified or not, so that no policy
can starve an estimate.

Plain Python over token ids. Which drafts come of it depends on what else has been running, so it serves the coupled and
the greedy verifiers alone, under which no draft shows in what comes out.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from itertools import accumulate
from operator import mul

from dspark.contracts import DsparkError, MTPPredictInfo
from dspark.runner.contexts import Contexts, Match

Guess = tuple[Hashable, int]  # what the estimate goes by, and the drafted token
_MEMORY = 2000  # trials of one kind after which its evidence is halved: policies move


def gain(rates: Iterable[float]) -> float:
    """Expected accepted drafts of a block, from the rate of each slot given that all before it are accepted."""
    return sum(accumulate(rates, mul))


class Rates:
    """How often drafts of each kind are accepted, given that those before them in the block are: (accepted + 1) /
    (tried + 2), so 1/2 for a kind that was never tried."""

    def __init__(self) -> None:
        self._counts: dict[Hashable, tuple[float, float]] = {}  # accepted, tried

    def of(self, kind: Hashable) -> float:
        accepted, tried = self._counts.get(kind, (0.0, 0.0))
        return (accepted + 1) / (tried + 2)

    def learn(self, guesses: Iterable[Guess], written: Sequence[int]) -> None:
        """A block of drafts, and the tokens written in its stead: the first of them that differs, or is missing, ends
        what can be learned."""
        for (kind, token), actual in zip(guesses, written, strict=False):
            accepted, tried = self._counts.get(kind, (0.0, 0.0))
            if tried >= _MEMORY:
                accepted, tried = accepted / 2, tried / 2
            self._counts[kind] = accepted + (token == actual), tried + 1
            if token != actual:
                return


class Lookup:
    """What was written lately, to draft from. It outlives engines: one for all generate calls of an RL run,

        lookup = Lookup(width=5)
        Engine(target, drafter, options, lookup=lookup).generate(requests)

    and after the weights have changed the next engine takes the same one. An engine follows each of its requests from
    the first token on, so that siblings in one batch have it at once, and leaves it here when it ends; ``remember``
    takes a response from elsewhere.

    width: most drafts a round. window: how many trajectories are kept; the oldest is forgotten for the next, and memory
    is bounded by theirs. min_match, max_match: tokens that must, and that may at most, match. Raises DsparkError for
    values that contradict each other.
    """

    def __init__(self, width: int = 5, window: int = 1024, min_match: int = 2, max_match: int = 8):
        if min(width, window) < 1 or not 1 <= min_match <= max_match:
            raise DsparkError(
                f"lookup: expected width and window >= 1 and 1 <= min_match <= max_match, but got width {width}, "
                f"window {window}, min_match {min_match} and max_match {max_match}."
            )
        self.width, self.window, self.min_match, self.max_match = width, window, min_match, max_match
        self.rates = Rates()
        self.largest = -1  # token id
        self.all = Contexts(min_match, max_match)
        self._groups: dict[tuple[int, ...], _Group] = {}
        self._trails: deque[Trail] = deque()  # oldest first
        self._followed = 0

    @property
    def remembered(self) -> int:
        """Trajectories in the window, those in flight included."""
        return len(self._trails)

    def remember(self, prompt_ids: Sequence[int], response_ids: Sequence[int]) -> None:
        """Take a finished trajectory. Raises DsparkError for ids below 0."""
        if min((*prompt_ids, *response_ids), default=0) < 0:
            raise DsparkError(f"lookup: expected token ids >= 0, but got {min((*prompt_ids, *response_ids))}.")
        self.follow(prompt_ids).write(response_ids)

    def follow(self, prompt_ids: Sequence[int]) -> Trail:
        """A trajectory that is about to be written: see Trail.write."""
        prompt = tuple(prompt_ids)
        if prompt not in self._groups:
            self._groups[prompt] = _Group(self, prompt)
        self._followed += 1
        trail = Trail(self, self._groups[prompt], self._followed)
        self._trails.append(trail)
        self.largest = max((self.largest, *prompt))
        if len(self._trails) > self.window:
            self._forget_oldest()
        return trail

    def _forget_oldest(self) -> None:
        """And its prompt, where no other trajectory has it."""
        trail = self._trails.popleft()
        trail.forget()
        if not trail.group.members:
            del self._groups[trail.group.prompt]


class _Group:
    """The contexts of one prompt and of what was written to it. The prompt itself stays to the end, so it counts as the
    latest text. members: trajectories remembered."""

    def __init__(self, lookup: Lookup, prompt: tuple[int, ...]):
        self.prompt, self.members = prompt, 0
        self.contexts = Contexts(lookup.min_match, lookup.max_match)
        for i in range(len(prompt)):
            self.contexts.add((sys.maxsize, i, prompt))


class Trail:
    """One trajectory in the lookup, as it is being written. tokens: prompt and response so far."""

    def __init__(self, lookup: Lookup, group: _Group, number: int):
        self.lookup, self.group, self.number = lookup, group, number
        self.tokens = list(group.prompt)
        self.forgotten = False
        self._guesses: list[Guess] = []
        group.members += 1

    def write(self, tokens: Sequence[int]) -> None:
        """Tokens that came next. They judge what was drafted last."""
        self.lookup.rates.learn(self._guesses, tokens)
        self._guesses = []
        start = len(self.tokens)
        self.tokens += tokens
        if self.forgotten:  # outlived by a whole window of others
            return
        self.lookup.largest = max((self.lookup.largest, *tokens))
        for i in range(start, len(self.tokens)):
            for contexts in self._trees:
                contexts.add((self.number, i, self.tokens))

    def draft(self, most: int) -> MTPPredictInfo:
        """Up to `most` drafts of what comes next, each with its rate."""
        ahead = self.tokens[-self.lookup.max_match :]
        self._guesses = []
        while len(self._guesses) < most and (guess := self._next(ahead)):
            self._guesses.append(guess)
            ahead.append(guess[1])
        rates = tuple(self.lookup.rates.of(kind) for kind, _ in self._guesses)
        return MTPPredictInfo(tuple(token for _, token in self._guesses), rates, "lookup")

    def forget(self) -> None:
        """Takes it out of the lookup, of whose trajectories it is the oldest."""
        self.forgotten = True
        for i in range(len(self.group.prompt), len(self.tokens)):
            for contexts in self._trees:
                contexts.forget((self.number, i, self.tokens))
        self.group.members -= 1

    @property
    def _trees(self) -> tuple[Contexts, Contexts]:
        return self.group.contexts, self.lookup.all

    def _next(self, ahead: Sequence[int]) -> Guess | None:
        """Of the two trees the one whose matches of that kind have been right more often; of equals the prompt's."""
        found = [((tree, match.length, _agreement(match)), match.token)
                 for tree, contexts in enumerate(self._trees) if (match := contexts.find(ahead))]  # fmt: skip
        return max(found, key=lambda guess: self.lookup.rates.of(guess[0]), default=None)


def _agreement(match: Match) -> str:
    if match.seen == 1:
        return "once"
    if match.times == match.seen:
        return "always"
    return "mostly" if 2 * match.times >= match.seen else "seldom"
