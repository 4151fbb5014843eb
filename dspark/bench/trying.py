"""The real runner beside the simulation: the same requests, the same ways, the same numbers of users.

At each number of users all ways take turns, there and back again; a speed is the median of the repeats. Speed per user
is what the simulation means by it: tokens over the seconds of each round times the requests in flight in it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, cast

from dspark.bench.simulation import NONE, Job, Outcome, Pools, Way, simulate
from dspark.bench.timed import Timed, in_turn, median_rate, room, timed
from dspark.contracts import DsparkError, Request
from dspark.drafter.model import Drafter
from dspark.rollouts.trajectory import Trajectory
from dspark.runner.curve import CapacityCurve
from dspark.runner.engine import Engine, EngineOptions
from dspark.runner.schedule import Policy
from dspark.scorecard.measure import bits
from dspark.target.decoder import Target

REPEATS = 3


@dataclass(frozen=True, slots=True)
class Trial:
    """What the real runner is run on. trajectories: whose requests are repeated; requests: the least number of them;
    repeats: of every way, in turn; key: fixes what the simulation draws."""

    target: Target
    drafter: Drafter
    trajectories: Sequence[Trajectory]
    requests: int = 8
    repeats: int = REPEATS
    key: int = 0

    def batch(self, users: int) -> tuple[list[Request], list[str]]:
        """(requests, their domains): at least one for each user, every one with noise of its own."""
        count = max(self.requests, users)
        some = [self.trajectories[i % len(self.trajectories)] for i in range(count)]
        requests = [Request(t.prompt_ids, t.params.with_seed((t.seq_seed + i) % 2**63)) for i, t in enumerate(some)]
        return requests, [t.domain for t in some]


def try_out(
    trial: Trial, pools: Pools, curve: CapacityCurve, chosen: Sequence[Way], users: Sequence[int],
    on_run: Callable[[int, int, int], None] = lambda done, total, tokens: None,
) -> list[dict[str, Any]]:  # fmt: skip
    """The same requests through the real runner and through the simulation: rows with both speeds and their ratio.
    on_run(done, total, 0): runs. Raises DsparkError when a policy changed the output."""
    counts, rows, done = sorted(set(users)), [], count(1)
    for users_now in counts:
        rows += _try_at(
            trial, pools, curve, chosen, users_now,
            lambda: on_run(next(done), len(counts) * len(chosen) * trial.repeats, 0),
        )  # fmt: skip
    return rows


def _try_at(
    trial: Trial, pools: Pools, curve: CapacityCurve, chosen: Sequence[Way], users: int, on_run: Callable[[], None]
) -> list[dict[str, Any]]:
    requests, domains = trial.batch(users)
    engines = {way.title: engine_of(trial, way, curve, users, requests) for way in chosen}
    runs: dict[str, list[Timed]] = {title: [] for title in engines}
    for repeat in range(trial.repeats):
        for title in in_turn(engines, repeat):
            runs[title].append(timed(engines[title], requests))
            _check_output(runs[title][-1], next(some[0] for some in runs.values() if some), title, users)
            on_run()
    done = next(iter(runs.values()))[0].completions
    jobs = [
        Job(domain, len(r.prompt_ids), len(c.token_ids))
        for domain, r, c in zip(domains, requests, done, strict=True)
    ]  # fmt: skip
    return [_compared(way, users, runs[way.title], simulate(pools, curve, way, jobs, users, trial.key))
            for way in chosen]  # fmt: skip


def _check_output(run: Timed, first: Timed, title: str, users: int) -> None:
    if [bits(c) for c in run.completions] != [bits(c) for c in first.completions]:
        raise DsparkError(f"simulate: {title} at {users} users changed the output. Run dspark doctor.")


def _compared(way: Way, users: int, runs: Sequence[Timed], expected: Outcome) -> dict[str, Any]:
    measured = median_rate(runs)
    return {
        "way": way.title, "users": users, "measured": measured, "simulated": expected.rate,
        "measured_per_user": statistics.median(run.user_rate for run in runs),
        "simulated_per_user": expected.user_rate, "ratio": expected.rate / measured,
    }  # fmt: skip


def engine_of(trial: Trial, way: Way, curve: CapacityCurve, users: int, requests: Sequence[Request]) -> Engine:
    """The runner that the simulation simulates: room for every request, so that so many run at once as there are
    places, and no prompt read for another one."""
    options = EngineOptions(max_batch=users, kv_tokens=room(requests), reuse_prefixes=False)
    if way.policy == NONE:
        return Engine(trial.target, None, options)
    policy = cast(Policy, way.policy)
    some = replace(options, policy=policy, threshold=way.threshold, curve=curve, verify_tokens=way.verify_tokens)
    return Engine(trial.target, trial.drafter, some)
