"""What a training step of the draft model costs: features in; forward, losses, backward, clip, AdamW.

Features, the target's last states and token ids are random and made beforehand: the target's layers are no part of the
step, its LM head at the label rows is (as in a training step, with the inference operations). The losses run fused and
by their plain twin in turn, on copies of one model that take the same steps; gradients are compared in the run, and no
time is reported of something that is wrong. Memory is the process' own: what it held before the first step, and the
most it ever held after the fused side's first steps, before the plain side has run.
"""

from __future__ import annotations

import copy
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dspark import ops
from dspark.contracts import DsparkError
from dspark.drafter.blocks import Blocks, blocks_at
from dspark.drafter.config import DrafterConfig
from dspark.drafter.model import Drafter
from dspark.training import fused
from dspark.training.labels import TargetLaw, laws_at, slot_mask, target_law
from dspark.training.objective import Fused, Judged, alphas, counts, measure, weigh
from dspark.training.optim import make_optimizer
from dspark.training.options import LossOptions, OptimizerOptions

REPEATS = 9
AGREE = 1e-4  # largest difference of a gradient over the gradient's norm, in fp32
SIDES: dict[str, Fused] = {"fused": fused.fused, "plain": fused.reference}


@dataclass(frozen=True, slots=True)
class Shape:
    """A draft model and a batch: `sequences` of `tokens` tokens, `anchors` blocks in each."""

    hidden: int = 256
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    mlp: int = 768
    features: int = 4
    layers: int = 2
    vocabulary: int = 8192
    block: int = 7
    rank: int = 64
    anchors: int = 64
    sequences: int = 2
    tokens: int = 512

    def __post_init__(self) -> None:
        if self.anchors > self.tokens - 1 or min(self.anchors, self.sequences) < 1:
            raise DsparkError(
                f"bench step: expected at least one sequence and 1 to tokens - 1 anchors, but got {self.sequences} "
                f"sequences, {self.anchors} anchors and {self.tokens} tokens."
            )


@dataclass(frozen=True, slots=True)
class Step:
    """Seconds per step of each side (lower quartile, median, upper quartile), the fused side's share of the plain
    side's time per repeat (likewise), MiB before the first step and at the fused side's peak, and the largest
    difference of a gradient over its norm."""

    seconds: dict[str, tuple[float, float, float]]
    ratio: tuple[float, float, float]
    before_mib: float
    peak_mib: float
    difference: float


@dataclass(frozen=True, slots=True)
class Work:
    """A batch: blocks, rows of the labels [B,P], which slots count, features [N,n*H], target states and positions."""

    blocks: Blocks
    rows: Tensor
    counted: Tensor
    features: Tensor
    states: Tensor
    positions: Tensor


def bench_step(shape: Shape, options: LossOptions, repeats: int = REPEATS,
               on_step: Callable[[str], None] = lambda _: None) -> Step:  # fmt: skip
    """Raises DsparkError when the two sides' gradients do not agree."""
    drafter, work = make(shape)
    steps = {name: _Steps(copy.deepcopy(drafter), work, options, run) for name, run in SIDES.items()}
    before = memory_mib("VmRSS")
    for _ in range(2):
        steps["fused"].run()
    peak = max(before, memory_mib("VmHWM"))  # the system counts each with a delay
    for _ in range(2):
        steps["plain"].run()
    difference = _difference(*(step.drafter for step in steps.values()))
    times = [_turn(steps, turn % 2 == 1, on_step) for turn in range(repeats)]
    seconds = {name: _quartiles([t[name] for t in times]) for name in SIDES}
    return Step(seconds, _quartiles([t["fused"] / t["plain"] for t in times]), before, peak, difference)


def make(shape: Shape) -> tuple[Drafter, Work]:
    """A draft model with a random target's embedding and LM head, and a random batch, both of a fixed seed."""
    draw = torch.Generator().manual_seed(0)
    config = DrafterConfig(
        block_size=shape.block, mask_token_id=0, target_layer_ids=tuple(range(shape.features)), sample_from_anchor=True,
        vocab_size=shape.vocabulary, hidden_size=shape.hidden, intermediate_size=shape.mlp, num_layers=shape.layers,
        num_heads=shape.heads, num_kv_heads=shape.kv_heads, head_dim=shape.head_dim,
        num_target_layers=shape.features + 1, markov_rank=shape.rank, confidence_head=True,
        confidence_with_markov=shape.rank > 0,
    )  # fmt: skip
    embed = torch.randn(shape.vocabulary, shape.hidden, generator=draw)
    head = 2.0 * shape.hidden**-0.5 * torch.randn(shape.vocabulary, shape.hidden, generator=draw)
    return Drafter(config).bind(embed, head).train(), _batch(shape, draw)


def _batch(shape: Shape, draw: torch.Generator) -> Work:
    total = shape.sequences * shape.tokens
    offsets = torch.arange(shape.sequences + 1) * shape.tokens
    picked = [torch.randperm(shape.tokens - 1, generator=draw)[: shape.anchors].sort()[0] for _ in offsets[1:]]
    anchors, sequence = torch.cat(picked), torch.arange(shape.sequences).repeat_interleave(shape.anchors)
    blocks = blocks_at(torch.randint(shape.vocabulary, (total,), generator=draw), offsets, sequence, anchors,
                       shape.block)  # fmt: skip
    supervised = torch.ones(total, dtype=torch.bool)
    rows, counted = slot_mask(supervised, blocks.begin, offsets[sequence + 1], anchors, shape.block)
    features = torch.randn(total, shape.features * shape.hidden, generator=draw)
    states = torch.randn(total, shape.hidden, generator=draw)
    return Work(blocks, rows, counted, features, states, torch.arange(shape.tokens).repeat(shape.sequences))


class _Steps:
    """One draft model in training on one batch."""

    def __init__(self, drafter: Drafter, work: Work, options: LossOptions, run: Fused):
        self.drafter, self.work, self.options, self.losses = drafter, work, options, run
        self.optimizer, _ = make_optimizer(drafter.named_parameters(), OptimizerOptions(lr=1e-4), 1000)

    def run(self) -> None:
        self.optimizer.zero_grad()
        self.loss().backward()
        torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), 1.0)
        self.optimizer.step()

    def loss(self) -> Tensor:
        judged, names = self._judged(), alphas(self.options, True)
        weights = weigh(self.drafter, judged, self.options)
        totals = counts(judged, weights, names).tolist()
        shares = {name: alpha / total for (name, alpha), total in zip(names.items(), totals, strict=True)}
        return measure(self.drafter, judged, self.options, weights, shares, self.losses).loss

    def _judged(self) -> Judged:
        work, drafter = self.work, self.drafter
        head = drafter.head_columns()

        def law_of(rows: Tensor) -> TargetLaw:
            return target_law(ops.linear(work.states[rows], head), None)

        law, index = laws_at(law_of, work.rows - 1, work.counted)
        context = drafter.encode(work.features, work.positions)
        states = drafter.block_states(*work.blocks.inputs(context))
        return Judged(states, work.blocks.labels, law, index, work.counted)


def _difference(ours: Drafter, theirs: Drafter) -> float:
    """Of the last step's gradients. The clip has scaled both sides by nearly the same norm."""
    pairs = [(a.grad, b.grad) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True)]
    found = max(float((a - b).norm() / b.norm()) for a, b in pairs if a is not None and b is not None)
    if not found <= AGREE:
        raise DsparkError(
            f"bench step: expected the gradients of both sides to agree within {AGREE} of their norm, but they differ "
            f"by {found}. One side computes something else."
        )
    return found


def _turn(steps: dict[str, _Steps], swap: bool, on_step: Callable[[str], None]) -> dict[str, float]:
    """Seconds of each side, the second one first when swapped."""
    seconds = {}
    for name in sorted(steps, reverse=swap):
        started = time.perf_counter()
        steps[name].run()
        seconds[name] = time.perf_counter() - started
        on_step(name)
    return seconds


def _quartiles(values: list[float]) -> tuple[float, float, float]:
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def memory_mib(which: str) -> float:
    """VmRSS, what the process holds now, or VmHWM, the most it ever held; where the system says neither, its peak (in
    KiB, on macOS in bytes)."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    found = [float(line.split()[1]) / 2**10 for line in lines if line.startswith(which)]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return found[0] if found else peak / (2**20 if sys.platform == "darwin" else 2**10)
