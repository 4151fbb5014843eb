"""The law of what a round emits, by enumeration: no sampling, so no sampling noise.

Every path of a round is a row of one call to the runner's own `verify`: which drafts were drawn, and on which side of
every acceptance threshold the uniforms fell. The noise is scripted: `uniform` returns the path's own numbers, and a
draw of the last token is not made: its law is read, and every token of it carried on with its weight. A draw that
shares its noise with the draft's (the bias that separate streams avoid) has a law of its own, given the draft:
`shared`.

The uniforms of a slot lie between the edges {0, true threshold, 1} and a grid, so that a verifier that is right is
integrated exactly, and one that is wrong is seen.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from unittest import mock

import torch
from torch import Tensor

from dspark import noise, ops
from dspark.contracts import MTPPredictInfo, SamplingParams, VerifierName
from dspark.drafter.candidates import keep_candidates
from dspark.runner.verify import SamplingRows, verify

VOCAB, SLOTS, AT = 4, 2, 7  # AT: position of the first drafted token
_GRID = (0.2, 0.4, 0.6, 0.8)
Prefix = tuple[int, ...]


@dataclass(frozen=True)
class World:
    """Target and draft logits after each prefix of new tokens. ids: the draft vocabulary. candidates: of force_topk."""

    params: SamplingParams
    seed: int = 0
    ids: tuple[int, ...] = tuple(range(VOCAB))
    candidates: int = 0
    scale: float = 1.5

    def _logits(self, salt: int, prefix: Prefix) -> Tensor:
        generator = torch.Generator().manual_seed(hash((self.seed, salt, prefix)) % 2**31)
        return self.scale * torch.randn(VOCAB, generator=generator)

    def _shape(self, logits: Tensor) -> Tensor:
        return SamplingRows.of([self.params]).shape(logits[None])[0]

    @cache  # noqa: B019  (a world lives as long as its test)
    def target(self, prefix: Prefix) -> Tensor:
        """[V]: the law of the next token."""
        return self._shape(self._logits(1, prefix))

    @cache  # noqa: B019  (a world lives as long as its test)
    def draft(self, prefix: Prefix) -> Tensor:
        """[V], 0 off the draft vocabulary: the law the next draft is drawn from."""
        mixed = 0.5 * self._logits(1, prefix) + self._logits(2, prefix)
        law = torch.zeros(VOCAB)
        law[list(self.ids)] = self._shape(keep_candidates(mixed[list(self.ids)][None], self.candidates)[0])
        return law


@dataclass
class Path:
    """One way a round can go: the drafts, how many are verified, a uniform per verified slot, its probability."""

    drafts: Prefix
    length: int
    uniforms: tuple[float, ...]
    weight: float
    last: Tensor | None = None  # the law of the last token, once the round has run
    accepted: int = 0


@dataclass
class Law:
    """What a round emits, then carried on by the target to SLOTS tokens: probability of each sequence of so many. The
    counts say whether anything happened: drafts, acceptances and rejections of positive weight."""

    of: dict[Prefix, float] = field(default_factory=lambda: defaultdict(float))
    drafted: float = 0.0
    accepted: float = 0.0
    rejected: float = 0.0

    def distance(self, world: World) -> float:
        """Largest difference to the target's own law of SLOTS tokens. Fails when nothing was put to the test."""
        assert min(self.drafted, self.accepted, self.rejected) > 0, f"inconclusive: {self}"
        return self.off(world)

    def off(self, world: World) -> float:
        """The same of one law among several that are conclusive together."""
        assert abs(sum(self.of.values()) - 1.0) < 1e-6, "the weights of the paths do not add up"
        wanted = {
            (a, b): float(world.target(())[a] * world.target((a,))[b])
            for a, b in itertools.product(range(VOCAB), repeat=SLOTS)
        }
        return max(abs(self.of[tokens] - p) for tokens, p in wanted.items())


@cache
def joint(world: World, prefix: Prefix) -> list[list[float]]:
    """[V, V]: draft and target's sample after a prefix, with shared noise."""
    return shared(world.draft(prefix).double(), world.target(prefix).double()).tolist()


@cache
def confidences(world: World, drafts: Prefix) -> tuple[float, ...]:
    """The true acceptance probability of each slot, known before its token is drawn. At temperature 0, where it is 0 or
    1 and nothing doubtful would ever be verified, a number that means nothing, of the prefix too."""
    if world.params.temperature == 0.0:
        return tuple(hash((world.seed, drafts[:k])) % 1000 / 1000 for k in range(len(drafts)))
    return tuple(
        float(torch.minimum(world.target(drafts[:k]), world.draft(drafts[:k])).sum()) for k in range(len(drafts))
    )


Chooser = Callable[[MTPPredictInfo], int]


def rejection_paths(world: World, choose: Chooser) -> list[Path]:
    """Every path of the rejection verifier. choose: how many drafts are verified."""
    found = []
    for drafts in itertools.product(world.ids, repeat=SLOTS):
        weight = 1.0
        for k, token in enumerate(drafts):
            weight *= float(world.draft(drafts[:k])[token])
        if weight == 0.0:
            continue
        length = choose(MTPPredictInfo(drafts, confidences(world, drafts)))
        strata = [_strata(world, drafts[:k], drafts[k]) for k in range(length)]
        for cells in itertools.product(*strata):
            share = weight
            for _, width in cells:
                share *= width
            found.append(Path(drafts, length, tuple(u for u, _ in cells), share))
    return found


def _strata(world: World, prefix: Prefix, token: int) -> list[tuple[float, float]]:
    """(middle, width) of the cells a uniform may fall in."""
    threshold = min(1.0, float(world.target(prefix)[token]) / float(world.draft(prefix)[token]))
    edges = sorted({0.0, threshold, 1.0, *_GRID})
    return [((a + b) / 2, b - a) for a, b in itertools.pairwise(edges)]


def run_rejection(world: World, paths: list[Path], said: Callable[[Prefix], Tensor] | None = None) -> Law:
    """All paths through `verify`, as one batch. said: the draft law that verification is told (default: the true one).

    A draw of the last token that reuses the draft's own stream is given the law it has, knowing the draft."""
    said = said or world.draft
    rows, laws, positions, seeds = [], [], [], []
    for i, path in enumerate(paths):
        seen = path.drafts[: path.length]
        rows += [world.target(seen[:k]) for k in range(path.length + 1)]
        laws += [said(seen[:k]) for k in range(path.length)]
        positions += range(AT, AT + path.length + 1)
        seeds += [i] * (path.length + 1)
    sampling = SamplingRows(*(torch.zeros(len(rows)) for _ in range(4)), torch.tensor(seeds))
    drafts = [path.drafts[: path.length] for path in paths]
    with _scripted(world, paths):
        verdicts = verify(
            "rejection", torch.stack(rows), sampling, torch.tensor(positions), drafts,
            torch.stack(laws) if laws else None,
        )  # fmt: skip
    for path, verdict in zip(paths, verdicts, strict=True):
        path.accepted = verdict.accepted
        assert tuple(verdict.tokens[:-1]) == path.drafts[: verdict.accepted]
    return _gathered(world, paths)


@contextmanager
def _scripted(world: World, paths: list[Path]) -> Iterator[None]:
    """ops.uniform and ops.gumbel_argmax as a path prescribes them."""

    def uniform(seeds: Tensor, stream: int, positions: Tensor) -> Tensor:
        assert stream == noise.ACCEPT
        where = zip(seeds.tolist(), (positions - AT).tolist(), strict=True)
        return torch.tensor([paths[i].uniforms[k] for i, k in where])

    def gumbel_argmax(law: Tensor, seeds: Tensor, stream: int, positions: Tensor, *_: Tensor) -> Tensor:
        for one, i, at in zip(law, seeds.tolist(), (positions - AT).tolist(), strict=True):
            own = one.double() / one.double().sum()
            if stream == noise.DRAFT:
                drafts = paths[i].drafts
                own = shared(world.draft(drafts[:at]).double(), own)[drafts[at]]
                own = own / own.sum()
            paths[i].last = own  # the residual's draw comes after the target's, and replaces it
        return law.argmax(dim=-1)

    with mock.patch.object(ops, "uniform", uniform), mock.patch.object(ops, "gumbel_argmax", gumbel_argmax):
        yield


def run_coupled(world: World, choose: Chooser, verifier: VerifierName = "coupled") -> Law:
    """Every path of the coupled verifier: drafts and the target's samples, jointly, for they share their noise."""
    cases = []
    for drafts in itertools.product(range(VOCAB), repeat=SLOTS):
        info = MTPPredictInfo(drafts, confidences(world, drafts))
        for samples in itertools.product(range(VOCAB), repeat=SLOTS + 1):
            weight = 1.0
            for k in range(SLOTS):
                weight *= joint(world, drafts[:k])[drafts[k]][samples[k]]
            weight *= float(world.target(drafts)[samples[-1]])
            if weight > 0:
                length = choose(info)
                cases.append((drafts[:length], samples[: length + 1], weight))
    flat = torch.tensor([token for _, samples, _ in cases for token in samples])
    probs = torch.stack([world.target(d[:k]) for d, _, _ in cases for k in range(len(d) + 1)])
    sampling = SamplingRows(*(torch.zeros(len(flat)) for _ in range(4)), torch.arange(len(flat)))
    with mock.patch.object(ops, "gumbel_argmax", lambda law, seeds, *_: flat[seeds]):
        verdicts = verify(verifier, probs, sampling, torch.zeros(len(flat)), [d for d, _, _ in cases], None)
    law = Law()
    for (drafts, _, weight), verdict in zip(cases, verdicts, strict=True):
        _count(law, weight, len(drafts), verdict.accepted)
        _carry_on(world, law, tuple(verdict.tokens), weight)
    return law


def _gathered(world: World, paths: list[Path]) -> Law:
    law = Law()
    for path in paths:
        _count(law, path.weight, path.length, path.accepted)
        assert path.last is not None, "no last token was drawn"
        for token, p in enumerate(path.last.tolist()):
            _carry_on(world, law, (*path.drafts[: path.accepted], token), path.weight * p)
    return law


def _count(law: Law, weight: float, length: int, accepted: int) -> None:
    law.drafted += weight * length
    law.accepted += weight * accepted
    law.rejected += weight * (accepted < length)


def _carry_on(world: World, law: Law, tokens: Prefix, weight: float) -> None:
    """The round's tokens, continued by the target where they are fewer than SLOTS."""
    if len(tokens) >= SLOTS:
        law.of[tokens[:SLOTS]] += weight
        return
    for token, p in enumerate(world.target(tokens).tolist()):
        _carry_on(world, law, (*tokens, token), weight * p)


def shared(q: Tensor, p: Tensor) -> Tensor:
    """[V, V] fp64: probability that argmax(ln q + G) is row a and argmax(ln p + G) column b, with the same noise G.

    As a race of exponentials: E_v = e^-G, a has the least E / q, b the least E / p. With E_a / q_a = s and
    E_b / p_b = r s every other E_u exceeds s max(q_u, r p_u), and r lies where neither loses to the other. Integrating
    over s leaves q_a p_b / D(r)^2, D(r) = sum_u max(q_u, r p_u), piecewise linear in r.
    """
    both = torch.zeros(len(q), len(p), dtype=torch.float64)
    for a in range(len(q)):
        if q[a] == 0:
            continue
        if p[a] > 0:
            both[a, a] = 1.0 / torch.maximum(q / q[a], p / p[a]).sum()
        high = float(q[a] / p[a]) if p[a] > 0 else float("inf")
        for b in range(len(p)):
            if a != b and p[b] > 0 and (low := float(q[b] / p[b])) < high:
                both[a, b] = q[a] * p[b] * _integral(q, p, low, high)
    return both


def _integral(q: Tensor, p: Tensor, low: float, high: float) -> float:
    """Integral of 1 / D(r)^2 from low to high, D(r) = sum_u max(q_u, r p_u)."""
    bends = sorted({float(x) for x in (q / p)[p > 0] if low < float(x) < high})
    total = 0.0
    for left, right in itertools.pairwise([low, *bends, high]):
        middle = left + 1.0 if right == float("inf") else (left + right) / 2
        flat = q[q >= middle * p].sum().item()
        slope = p[q < middle * p].sum().item()
        if slope == 0.0:
            total += (right - left) / flat**2
        else:
            end = 0.0 if right == float("inf") else 1.0 / (flat + slope * right)
            total += (1.0 / (flat + slope * left) - end) / slope
    return total
