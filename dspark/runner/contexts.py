"""What came after the last few tokens: a tree of contexts, read backwards, over texts that come and go.

A node at depth d stands for d tokens in a row: its parent's, and the one before them. It counts what came after them.
Walking down from the root along a sequence's last token, the one before, and so on, ends at the longest context that
has been seen; adding a token, or forgetting it, takes one walk of at most ``longest`` steps. A context seen once is not
taken apart: the place stands for it, and the text there says the rest. No tensor, no hash of a whole context.

Left out on purpose: contexts of any length (a suffix automaton), out of which nothing can be taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

Place = tuple[int, int, Sequence[int]]  # (text's number, i, text): its token i; later texts have larger numbers


class Match(NamedTuple):
    """The last `length` tokens were seen before, `seen` times, and `times` of those `token` came next."""

    length: int
    token: int
    times: int
    seen: int


class _Node:
    """count: places that pass through here. after: next token -> (how often, where last); kept from the shortest
    context on. before: the token before -> what is deeper."""

    __slots__ = ("after", "before", "count")

    def __init__(self) -> None:
        self.count = 0
        self.after: dict[int, tuple[int, Place]] = {}
        self.before: dict[int, _Node | Place] = {}


class Contexts:
    """Contexts of ``shortest`` to ``longest`` tokens and what followed each. Memory grows with the places in it."""

    def __init__(self, shortest: int, longest: int):
        assert 1 <= shortest <= longest, f"contexts of {shortest} to {longest} tokens"
        self.shortest, self.longest = shortest, longest
        self._root = _Node()

    @property
    def empty(self) -> bool:
        return not self._root.before

    def add(self, place: Place) -> None:
        """The token at `place` has come after those before it. Each place once."""
        node = self._root
        for depth, token in self._back(place):
            below = node.before.get(token)
            if below is None:
                node.before[token] = place
                return
            if not isinstance(below, _Node):
                below = node.before[token] = self._opened(below, depth)
            self._note(below, place, depth)
            node = below

    def forget(self, place: Place) -> None:
        """Undoes add. Places of a text may be forgotten when those of every earlier text are: then what is left knows
        where it was seen last."""
        node = self._root
        for depth, token in self._back(place):
            below = node.before[token]
            if not isinstance(below, _Node) or below.count == 1:
                del node.before[token]
                return
            below.count -= 1
            if depth >= self.shortest:
                _uncount(below.after, place)
            node = below

    def find(self, tokens: Sequence[int]) -> Match | None:
        """Of the longest context at the end of `tokens` that was seen, the token that came next most often, of equals
        the one that did so last. None where not even the shortest was seen."""
        node, depth = self._root, 0
        for token in reversed(tokens[-self.longest :]):
            below = node.before.get(token)
            if below is None:
                break
            depth += 1
            if not isinstance(below, _Node):
                return self._alone(below, tokens, depth)
            node = below
        if depth < self.shortest:
            return None
        token = max(node.after, key=node.after.__getitem__)
        return Match(depth, token, node.after[token][0], node.count)

    def _alone(self, place: Place, tokens: Sequence[int], depth: int) -> Match | None:
        """find, from a context of `depth` tokens on that was seen at one place alone."""
        _, i, text = place
        most = min(self.longest, len(tokens), i)
        while depth < most and text[i - depth - 1] == tokens[-depth - 1]:
            depth += 1
        return Match(depth, text[i], 1, 1) if depth >= self.shortest else None

    def _back(self, place: Place) -> Iterator[tuple[int, int]]:
        """(depth, token) from the token before a place on; nothing where even the shortest context begins before the
        text does."""
        _, i, text = place
        most = min(self.longest, i) if i >= self.shortest else 0
        return ((depth, text[i - depth]) for depth in range(1, most + 1))

    def _opened(self, place: Place, depth: int) -> _Node:
        """A node in the stead of a single place."""
        _, i, text = place
        node = _Node()
        self._note(node, place, depth)
        if depth < min(self.longest, i):
            node.before[text[i - depth - 1]] = place
        return node

    def _note(self, node: _Node, place: Place, depth: int) -> None:
        node.count += 1
        if depth >= self.shortest:
            _, i, text = place
            times, last = node.after.get(text[i], (0, place))
            node.after[text[i]] = times + 1, max(last, place)


def _uncount(after: dict[int, tuple[int, Place]], place: Place) -> None:
    _, i, text = place
    times, last = after[text[i]]
    if times == 1:
        del after[text[i]]
    else:
        after[text[i]] = times - 1, last
