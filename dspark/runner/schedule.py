"""How many drafted tokens go to the target, for all requests of a round at once.

A round of R requests that verifies n drafts costs seconds(R + n) and yields R + (their survivals) tokens on average.
Survivals never rise along a block, so the n drafts of the largest survivals, over all requests, are always prefixes:
sorting them once gives the best n drafts for every n (DESIGN section 5; DSpark). What is left is to choose n:

    fixed          the same length for every request
    threshold      up to the first draft whose survival lies below a threshold: needs no other request
    early_stop     one more draft at a time while tokens per second rise; optimal where the curve has no steps
    lagged_global  n is the best one for the confidences of two rounds ago; today's survivals fill it
    global         the best n for today's confidences

Under the rejection verifier a cut must not depend on a draft at or behind it. A slot's confidence is known before its
token is, so threshold, early_stop and lagged_global keep to that; global does not (the retrospective rule of the
DSpark paper's appendix A), nor does any of them with a head that reads the drafted token's own odds (engine.py refuses
both). The coupled and the greedy verifiers emit the target's own sample whatever is cut.
O(n log n), numpy on the host; no tensor, no device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from dspark.contracts import MTPPredictInfo
from dspark.runner.curve import CapacityCurve
from dspark.runner.gate import Gate

Policy = Literal["fixed", "threshold", "early_stop", "lagged_global", "global"]
POLICIES: tuple[Policy, ...] = get_args(Policy)
NEEDS_CURVE: tuple[Policy, ...] = ("early_stop", "lagged_global", "global")
Floats = NDArray[np.float64]
_LAG = 2  # rounds: what a device's pipeline can have at hand without waiting (DSpark paper, section 5.2)


def draft_limit(block_size: int, remaining: int) -> int:
    """Drafts worth having for a request that may still produce ``remaining`` tokens: each round adds one of its own."""
    return max(0, min(block_size, remaining - 1))


def fixed(predictions: Sequence[MTPPredictInfo], verify_tokens: int) -> list[int]:
    """Verification length per request: ``verify_tokens``, or all of a shorter block."""
    return [min(verify_tokens, len(prediction.token_ids)) for prediction in predictions]


def survivals(predictions: Sequence[MTPPredictInfo], verify_tokens: int) -> Floats:
    """[R, K] fp64: the probability that a request's first k + 1 drafts are all accepted; -1 where there is no draft, or
    one that may not be verified."""
    offered = [len(p.token_ids) for p in predictions]
    width = max(offered, default=0)
    rates = np.fromiter(chain.from_iterable(p.confidence_rates or () for p in predictions), np.float64, sum(offered))
    if min(offered, default=0) == width:
        found: Floats = np.cumprod(rates.reshape(len(offered), width), axis=1, dtype=np.float64)
    else:
        there = np.arange(width) < np.asarray(offered)[:, None]
        ragged = np.zeros((len(offered), width))
        ragged[there] = rates
        found = np.where(there, np.cumprod(ragged, axis=1), -1.0)
    found[:, verify_tokens:] = -1.0
    return found


def threshold(survival: Floats, least: float) -> list[int]:
    """Per request the drafts before the first whose survival lies below ``least`` (at least 0)."""
    return np.logical_and.accumulate(survival >= max(least, 0.0), axis=1).sum(axis=1).tolist()


def early_stop(survival: Floats, seconds: Floats) -> list[int]:
    """Admits drafts in descending survival while tokens per second do not fall. seconds[n]: of a round with n drafts,
    for at least every n <= drafts there are."""
    ranked = _ranked(survival)
    rate = _rates(ranked, len(survival), seconds)
    falls = rate[1:] < rate[:-1]
    return _lengths(survival, ranked, int(falls.argmax()) if falls.any() else len(ranked))


def best(survival: Floats, seconds: Floats) -> list[int]:
    """The lengths of the most tokens per second; the shortest of equals. seconds: as for early_stop."""
    ranked = _ranked(survival)
    return _lengths(survival, ranked, int(_rates(ranked, len(survival), seconds).argmax()))


def fill(survival: Floats, budget: int) -> list[int]:
    """The ``budget`` drafts of the largest survivals."""
    ranked = _ranked(survival)
    return _lengths(survival, ranked, min(budget, len(ranked)))


def _ranked(survival: Floats) -> Floats:
    """Of the drafts there are, descending."""
    flat = np.sort(survival, axis=None)[::-1]
    return flat[: len(flat) - int(np.searchsorted(flat[::-1], 0.0))]


def _rates(ranked: Floats, requests: int, seconds: Floats) -> Floats:
    """Tokens per second of the first n drafts, n = 0 ... all."""
    tokens = np.empty(len(ranked) + 1)
    tokens[0] = requests
    np.cumsum(ranked, out=tokens[1:])
    tokens[1:] += requests
    tokens /= seconds[: len(tokens)]
    return tokens


def _lengths(survival: Floats, ranked: Floats, count: int) -> list[int]:
    """Per request its drafts among the first ``count``; of equals the earlier request's come first."""
    if count == 0:
        return [0] * len(survival)
    least = ranked[count - 1]
    lengths = (survival >= least).sum(axis=1)
    if surplus := int(lengths.sum()) - count:
        equal = np.flatnonzero(survival == least)[-surplus:]
        lengths -= np.bincount(equal // survival.shape[1], minlength=len(survival))
    return lengths.tolist()


@dataclass
class Scheduler:
    """One run's policy. verify_tokens: the most drafts per request. least: of the threshold policy. curve: None where
    there is none to go by; then, and with one that is flat, everything is verified (``told`` says so).

    A run is one process that decides; nothing of it reaches the tokens under the coupled and greedy verifiers.
    """

    policy: Policy
    verify_tokens: int
    least: float = 0.0
    curve: CapacityCurve | None = None
    gate: Gate = field(default_factory=Gate)
    _passes: Floats = field(default_factory=lambda: np.empty(0))
    _drafting: dict[int, float] = field(default_factory=dict)
    _past: deque[Floats] = field(default_factory=lambda: deque(maxlen=_LAG))

    @property
    def told(self) -> str | None:
        """What a user should know: a policy that has nothing to choose by."""
        if self.policy not in NEEDS_CURVE or (self.curve and not self.curve.flat):
            return None
        got = "none was given"
        if self.curve is not None:
            got = (
                "this one is flat: more rows cost nothing"
                if len(self.curve.rows) > 1
                else "this one has one size alone"
            )
        advice = "All drafts are verified. Make one: dspark profile --drafter DRAFTER --requests 1 4 16."
        return f"{self.policy} needs a capacity curve, and {got}. {advice}"

    def drafts(self, requests: int) -> bool:
        """Whether the draft model is asked in the next round: policies that weigh against a curve leave it out where it
        does not pay."""
        return self.policy not in NEEDS_CURVE or self.told is not None or self.gate.open(requests, self._worth)

    def lengths(self, predictions: Sequence[MTPPredictInfo], other_rows: int = 0) -> list[int]:
        """Verification length per request. other_rows: prompt tokens that are in the same pass."""
        if not any(p.token_ids for p in predictions) or self.policy == "fixed" or self.told:
            return fixed(predictions, self.verify_tokens)
        survival = survivals(predictions, self.verify_tokens)
        if self.policy == "threshold":
            return threshold(survival, self.least)
        by_model = np.fromiter((p.source == "drafter" for p in predictions), bool, len(predictions))
        modelled = int(by_model.sum())
        if modelled:
            self.gate.learn(survival, by_model)
        if self.policy == "lagged_global":
            return self._lagged(survival, modelled, other_rows)
        seconds = self._seconds(len(predictions), modelled, survival.size, other_rows)
        return (early_stop if self.policy == "early_stop" else best)(survival, seconds)

    def _worth(self, requests: int, blocks: Floats, modelled: NDArray[np.bool_]) -> float:
        """Tokens per second of rounds of so many requests with blocks like these, over those without the model's: the
        blocks, in turn, make as many rounds as they fill, or one."""
        rounds = max(1, len(blocks) // requests)
        chosen = np.arange(len(blocks) - rounds * requests, len(blocks)) % len(blocks)
        groups, by_model = blocks[chosen], modelled[chosen]
        seconds = self._seconds(requests, 0, requests * blocks.shape[1], 0)
        drafting = [self._drafted(int(n)) for n in by_model.reshape(rounds, requests).sum(axis=1)]
        with_model = _mean_rate(groups.reshape(rounds, -1), requests, seconds + np.array(drafting)[:, None])
        groups[by_model] = -1.0
        return with_model / _mean_rate(groups.reshape(rounds, -1), requests, np.tile(seconds, (rounds, 1)))

    def _seconds(self, requests: int, modelled: int, drafts: int, other_rows: int) -> Floats:
        """CapacityCurve.rounds, from tables made once that grow. modelled: requests that a draft model worked for."""
        assert self.curve is not None, "told says so"
        least = requests + other_rows
        if len(self._passes) <= least + drafts:
            self._passes = self.curve.passes(2 * (least + drafts))
        return self._passes[least : least + drafts + 1] + self._drafted(modelled)

    def _drafted(self, requests: int) -> float:
        assert self.curve is not None, "told says so"
        if requests not in self._drafting:
            self._drafting[requests] = self.curve.drafting(requests)
        return self._drafting[requests]

    def _lagged(self, survival: Floats, modelled: int, other_rows: int) -> list[int]:
        """The best number of drafts for the confidences of two rounds ago, as if they were those of today's requests:
        each old draft stands for as many as there are requests now to one then. Before that, all."""
        old = self._past[0] if len(self._past) == _LAG else None
        self._past.append(survival)
        if old is None:
            return fill(survival, survival.size)
        now, then = len(survival), len(old)
        ranked = _ranked(old)
        counts = np.rint(np.arange(len(ranked) + 1) * (now / then)).astype(np.int64)
        seconds = self._seconds(now, modelled, int(counts[-1]), other_rows)
        rate = _rates(ranked, then, seconds[counts])  # of one now to one then: the same factor for every count
        return fill(survival, int(counts[rate.argmax()]))


def _mean_rate(groups: Floats, requests: int, seconds: Floats) -> float:
    """Tokens per second over G rounds of the best lengths. groups [G, n]: survivals of a round; seconds [G, n + 1]."""
    tokens = np.full((len(groups), groups.shape[1] + 1), float(requests))
    tokens[:, 1:] += np.cumsum(-np.sort(-groups, axis=1), axis=1)
    at = (tokens / seconds).argmax(axis=1)[:, None]
    return float(np.take_along_axis(tokens, at, 1).sum() / np.take_along_axis(seconds, at, 1).sum())
