"""Who drafts the rollouts of an RL run fastest: a callback that times every way beside the run itself.

    lightning fit recipes/rl.yaml --model.init_args.rollout.drafter=runs/demo/bundle
        --trainer.callbacks+=dspark.bench.rl_ways.TimedWays --trainer.callbacks.curve=runs/curve.json

Before each of the run's own rollouts the same requests are answered with the same weights in every way and at every
batch size, in turn, there and back again from rollout to rollout. So the ways are compared on a policy that moves as
theirs would: a lookup has seen what this policy wrote, and a draft model that follows has followed. Every way's output
is held against plain decoding's, bit for bit. The run itself is not touched: its files and weights are those it would
have had.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer

from dspark.bench.looking_up import count_passes
from dspark.bench.timed import Timed, clocked, differing, in_turn
from dspark.contracts import DsparkError, Request
from dspark.files import atomic_write
from dspark.rl.policy_module import PolicyModule
from dspark.runner import Engine
from dspark.runner.curve import CapacityCurve
from dspark.runner.lookup import Lookup

WAYS = "ways.json"
PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class Way:
    """learned: the draft model drafts; looked_up: a lookup does; scheduled: policy `global` over the curve says how
    many drafts are verified, else all of them are."""

    name: str
    learned: bool = False
    looked_up: bool = False
    scheduled: bool = False


ALL = (
    Way(PLAIN),
    Way("learned", learned=True),
    Way("learned, scheduled", learned=True, scheduled=True),
    Way("lookup", looked_up=True),
    Way("lookup, scheduled", looked_up=True, scheduled=True),
    Way("both, scheduled", learned=True, looked_up=True, scheduled=True),
)


@dataclass(frozen=True, slots=True)
class WayRow:
    """Over all rollouts. tau: tokens a pass, the target's own included. seconds: generating. ratio: plain decoding's
    seconds over these of the same rollout, the median; worst, best: the least and the largest. wrong: sequences that
    are not plain decoding's, of `sequences`; verified, accepted: drafts; rejected: rounds with a rejection.
    """

    batch: int
    way: str
    tau: float
    seconds: float
    ratio: float
    worst: float
    best: float
    wrong: int
    sequences: int
    verified: int
    accepted: int
    rejected: int


class TimedWays(Callback):
    """Times plain decoding, the draft model, a lookup and both on the requests of every rollout of a PolicyModule.

    Args:
        batches: sequences in flight to try.
        lookup: most drafts a round looked up; 0 leaves the ways with a lookup out.
        curve: a capacity curve of this machine (`dspark profile`); "" leaves the scheduled ways out.
    """

    def __init__(self, batches: list[int] | None = None, lookup: int = 5, curve: str = ""):
        self.batches = batches or [1, 8, 32]
        self.width, self.curve = lookup, CapacityCurve.load(curve) if curve else None
        self.lookups: dict[tuple[int, str], Lookup] = {}
        self.runs: dict[tuple[int, str], list[tuple[list[Request], Timed]]] = {}

    def ways(self, learned: bool) -> list[Way]:
        """Those that there are the parts for."""
        there = {"learned": learned, "looked_up": bool(self.width), "scheduled": self.curve is not None}
        return [way for way in ALL if all(there[part] for part in there if getattr(way, part))]

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: list[int], batch_idx: int) -> None:
        if not isinstance(pl_module, PolicyModule) or trainer.world_size > 1:
            raise DsparkError("TimedWays: expected the PolicyModule of an RL recipe in one process.")
        number = trainer.global_step // pl_module.objective.updates_per_rollout
        requests = pl_module.requests(batch, number)
        ways = self.ways(pl_module.follower is not None)
        names = [(size, way) for size in self.batches for way in ways]
        for size, way in in_turn(names, number):
            engine = self._engine(pl_module, size, way)
            self.runs.setdefault((size, way.name), []).append((requests, clocked(engine, requests)))

    def _engine(self, module: PolicyModule, size: int, way: Way) -> Engine:
        start = module.start
        policy = "global" if way.scheduled else "fixed"
        config = replace(start.config, batch_size=size, policy=policy)
        drafter = module.follower.serve() if way.learned and module.follower else None
        bundle, curve = start.bundle if drafter else None, self.curve if way.scheduled else None
        lookup = self.lookups.setdefault((size, way.name), Lookup(self.width)) if way.looked_up else None
        return replace(start, config=config, bundle=bundle, curve=curve).engine(drafter, lookup)

    def on_fit_end(self, trainer: Trainer, pl_module: Any) -> None:
        rows = self.rows()
        text = json.dumps([asdict(row) for row in rows], indent=1)
        atomic_write(Path(trainer.default_root_dir) / WAYS, text + "\n")
        print("\n".join(as_lines(rows)), file=sys.stderr)

    def rows(self) -> list[WayRow]:
        return [_row(key, runs, self.runs[key[0], PLAIN]) for key, runs in self.runs.items()]


def _row(
    key: tuple[int, str], runs: Sequence[tuple[list[Request], Timed]], plain: Sequence[tuple[list[Request], Timed]]
) -> WayRow:
    ratios = [p.seconds / t.seconds for (_, t), (_, p) in zip(runs, plain, strict=True)]
    done = [(request, c) for requests, t in runs for request, c in zip(requests, t.completions, strict=True)]
    rounds = [r for _, c in done for r in c.rounds]
    seconds = sum(t.seconds for _, t in runs)
    passes = sum(count_passes(request, c) for request, c in done)
    return WayRow(
        *key,
        tau=sum(len(c.token_ids) - 1 for _, c in done) / max(1, passes),
        seconds=seconds,
        ratio=statistics.median(ratios),
        worst=min(ratios),
        best=max(ratios),
        wrong=sum(differing([t], p.completions) for (_, t), (_, p) in zip(runs, plain, strict=True)),
        sequences=len(done),
        verified=sum(r.verified for r in rounds),
        accepted=sum(r.accepted for r in rounds),
        rejected=sum(r.accepted < r.verified for r in rounds),
    )


def as_lines(rows: Sequence[WayRow]) -> list[str]:
    """At most 80 columns."""
    lines = [f"{'generating in the run':<30}{'tau':>6}{'seconds':>9}{'x plain':>9}{'least':>7}{'most':>7}{'differ':>8}"]
    for row in rows:
        name = f"batch {row.batch}, {row.way}"
        lines.append(
            f"{name:<30}{row.tau:>6.2f}{row.seconds:>9.1f}{row.ratio:>9.2f}{row.worst:>7.2f}{row.best:>7.2f}"
            f"{row.wrong:>8}"
        )
    return lines
