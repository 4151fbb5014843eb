"""The tree of contexts against brute force: every place looked at, every length tried."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from dspark.runner.contexts import Contexts, Match, Place


def brute(places: list[Place], tokens: Sequence[int], shortest: int, longest: int) -> Match | None:
    """What Contexts.find says, by looking at every place."""
    for n in range(min(longest, len(tokens)), shortest - 1, -1):
        seen: dict[int, tuple[int, int, int]] = {}  # next token -> how often, where last
        for number, i, text in places:
            if i >= n and list(text[i - n : i]) == list(tokens[len(tokens) - n :]):
                times, *last = seen.get(text[i], (0, -1, -1))
                seen[text[i]] = (times + 1, *max((number, i), tuple(last)))
        if seen:
            token = max(seen, key=seen.__getitem__)
            return Match(n, token, seen[token][0], sum(times for times, *_ in seen.values()))
    return None


class Texts:
    """Texts that grow in turn, the oldest of which go; a tree, and the list of places that are in it."""

    def __init__(self, rng: random.Random):
        self.rng, self.letters = rng, rng.randint(1, 4)
        self.shortest = rng.randint(1, 3)
        self.longest = self.shortest + rng.randint(0, 4)
        self.tree = Contexts(self.shortest, self.longest)
        self.texts: list[tuple[int, list[int]]] = []
        self.places: list[Place] = []
        self.started = 0

    def some(self, most: int) -> list[int]:
        return [self.rng.randrange(self.letters) for _ in range(self.rng.randint(0, most))]

    def step(self) -> None:
        """One starts, one that is not the newest perhaps goes on, or the oldest goes."""
        what = self.rng.random()
        if what < 0.25 or not self.texts:
            self.started += 1
            self.texts.append((self.started, self.some(3)))  # a start that is no place, as of a prompt's end
        elif what < 0.85:
            number, text = self.rng.choice(self.texts)
            for token in self.some(6):
                text.append(token)
                self.tree.add((number, len(text) - 1, text))
                self.places.append((number, len(text) - 1, text))
        else:
            self.forget_oldest()

    def forget_oldest(self) -> None:
        number, _ = self.texts.pop(0)
        for place in [p for p in self.places if p[0] == number]:
            self.tree.forget(place)
        self.places = [p for p in self.places if p[0] != number]

    def question(self) -> list[int]:
        return self.rng.choice(self.texts)[1] if self.texts and self.rng.random() < 0.5 else self.some(8)


@pytest.mark.parametrize("seed", range(8))
def test_the_tree_is_brute_force(seed: int) -> None:
    rng, lengths = random.Random(seed), set()
    for _ in range(60):
        world = Texts(rng)
        for _ in range(rng.randint(1, 40)):
            world.step()
            asked = world.question()
            found = world.tree.find(asked)
            assert found == brute(world.places, asked, world.shortest, world.longest)
            lengths.add(found and found.length)
        while world.texts:
            world.forget_oldest()
        assert world.tree.empty
    assert None in lengths
    assert len(lengths) > 5, f"inconclusive: only {lengths}"


def test_frequency_then_recency_by_hand() -> None:
    tree = Contexts(1, 3)
    old, new = [1, 2, 3, 1, 2, 3], [1, 2, 4, 9, 2, 5]
    for number, text in ((1, old), (2, new)):
        for i in range(len(text)):
            tree.add((number, i, text))
    assert tree.find([7, 1, 2]) == Match(2, 3, 2, 3)  # twice against once
    assert tree.find([9, 2]) == Match(2, 5, 1, 1)
    assert tree.find([8, 2]) == Match(1, 3, 2, 4)
    for i in range(len(old)):
        tree.forget((1, i, old))
    assert tree.find([7, 1, 2]) == Match(2, 4, 1, 1)
    assert tree.find([8, 2]) == Match(1, 5, 1, 2)  # of equals the later
    assert tree.find([1, 3]) is None
    assert tree.find([]) is None


def test_what_is_forgotten_is_not_held() -> None:
    """A tree that many long texts have passed through is as small as what is left in it."""
    tree, window = Contexts(2, 8), 3
    texts = [[(i * k) % 11 for i in range(60)] for k in range(1, 40)]
    for number, text in enumerate(texts):
        for i in range(len(text)):
            tree.add((number, i, text))
        if number >= window:
            for i in range(len(text)):
                tree.forget((number - window, i, texts[number - window]))
    held = {id(text) for text in texts[-window:]}
    assert texts_in(tree) == held


def texts_in(tree: Contexts) -> set[int]:
    found, nodes = set(), [tree._root]
    while nodes:
        node = nodes.pop()
        found |= {id(place[2]) for _, place in node.after.values()}
        for below in node.before.values():
            if isinstance(below, tuple):
                found.add(id(below[2]))
            else:
                nodes.append(below)
    return found
