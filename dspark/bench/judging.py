"""What judging a confidence costs: the streamed metrics over millions of events, and a fit of each calibration.

Synthetic rounds with the same few thousand conversations over and over: an event is one slot of one round that the
verifier decided on or whose prefix it settled. Before anything is timed the streamed sums are compared with the
functions they stand for; memory is the process' own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.bench.step import memory_mib
from dspark.calibration import measures
from dspark.calibration.events import Events
from dspark.calibration.fitting import fit
from dspark.calibration.metrics import slot_metrics
from dspark.calibration.record import METHODS
from dspark.contracts import DsparkError

SLOTS, DOMAINS, ROUNDS = 7, 3, 1 << 16
EVENTS = 10_000_000
FIT_ROUNDS = 4000


@dataclass(frozen=True, slots=True)
class Judging:
    """Events fed in `seconds` to the seven metrics as one collection; MiB of their state; MiB by which the peak memory
    grew from the first batch to the last; seconds of one fit per method on fit_rounds rounds of 7 slots."""

    events: int
    seconds: float
    state_mib: float
    growth_mib: float
    fit_rounds: int
    fits: dict[str, float]

    @property
    def rate(self) -> float:
        """Events per second."""
        return self.events / self.seconds


def bench_judging(events: int = EVENTS, on_batch: Callable[[], None] = lambda: None) -> Judging:
    """Raises DsparkError when the streamed figures are not those of the plain functions."""
    batch = _rounds(ROUNDS)
    per_batch = int(batch[2].sum())
    metrics = slot_metrics(SLOTS, DOMAINS)
    metrics.update(*batch)
    _check(metrics.compute(), batch)
    metrics.reset()
    metrics.update(*batch)
    fed, seconds, before = 0, 0.0, memory_mib("VmHWM")
    while fed < events:
        start = time.perf_counter()
        metrics.update(*batch)
        seconds, fed = seconds + time.perf_counter() - start, fed + per_batch
        on_batch()
    sums = next(iter(metrics.values(copy_state=False))).sums
    assert isinstance(sums, Tensor), "the state of every slot metric"
    size = sums.numel() * sums.element_size() / 2**20
    return Judging(fed, seconds, size, memory_mib("VmHWM") - before, FIT_ROUNDS, _fits())


def _rounds(count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Probabilities, labels, observed [M,K] of the survival, domain [M]."""
    draw = torch.Generator().manual_seed(0)
    logits = 1.0 + 2.0 * torch.randn(count, SLOTS, generator=draw)
    accepted = (torch.rand(count, SLOTS, generator=draw) < logits.sigmoid()).cumprod(1)
    domain = torch.randint(0, DOMAINS, (count,), generator=draw)
    return (0.7 * logits).sigmoid().cumprod(1), accepted.double(), torch.ones(count, SLOTS, dtype=torch.bool), domain


def _check(found: dict[str, Tensor], batch: tuple[Tensor, ...]) -> None:
    p, y, _, domain = batch
    for slot in (0, SLOTS - 1):
        for where, mine in ((-1, slice(None)), (1, domain == 1)):
            a, b = p[mine, slot].double(), y[mine, slot]
            wanted = {"ece": measures.ece(a, b, measures.bin_index(a)), "brier": float(measures.brier(a, b).mean()),
                      "auroc": measures.auroc(a, b)}  # fmt: skip
            for name, value in wanted.items():
                assert value is not None, "both labels occur"
                difference = abs(float(found[name][where, slot]) - value)
                if difference > (1e-3 if name == "auroc" else 1e-9):
                    raise DsparkError(
                        f"bench metrics: expected the streamed {name} of slot {slot + 1} to be the plain one's, but it "
                        f"differs by {difference:.1e}. Please report this."
                    )


def _fits() -> dict[str, float]:
    draw = torch.Generator().manual_seed(1)
    logits = 1.0 + 2.0 * torch.randn(FIT_ROUNDS, SLOTS, generator=draw)
    accepted = (torch.rand(FIT_ROUNDS, SLOTS, generator=draw) < (0.7 * logits).sigmoid()).long().cumprod(1).sum(1)
    names = [f"c{i % 100}" for i in range(FIT_ROUNDS)]
    events = Events(logits, accepted, torch.full((FIT_ROUNDS,), SLOTS), ["all"] * FIT_ROUNDS, names)
    seconds = {}
    for method in METHODS:
        start = time.perf_counter()
        fit(events, "", method)
        seconds[method] = time.perf_counter() - start
    return seconds
