"""Flat training batches and the order they come in.

A batch holds R whole sequences packed one after the other (N tokens, no padding) and B blocks (anchors) in them. The
order is a pure function of (seed, epoch), the anchors of (seed, epoch, sample id); no global RNG. A stream knows where
it is (epoch, batch), so a run resumes in the middle of an epoch with the very batches it would have seen.
Every epoch has the same number of batches, whatever the shuffle: Lightning asks for the length once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from dspark.contracts import DsparkError


@dataclass(frozen=True, slots=True)
class SequenceBatch:
    """R sequences and B blocks in them.

    ids [N] int64; offsets [R+1] int64; loss_mask [N] bool; sequence [B] and anchors [B] int64 (which sequence, which
    position in it), sorted by sequence then anchor; sample_ids, domains: R strings. R = 0 and B = 0 are allowed.
    """

    ids: Tensor
    offsets: Tensor
    loss_mask: Tensor
    sequence: Tensor
    anchors: Tensor
    sample_ids: tuple[str, ...]
    domains: tuple[str, ...]

    def sequences(self) -> list[Tensor]:
        """The R sequences as views [S] of ids."""
        return list(self.ids.split(self.offsets.diff().tolist()))

    def to(self, *args: Any, **options: Any) -> SequenceBatch:
        """The batch with its tensors moved, arguments as Tensor.to: what Lightning calls on a batch."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        moved: dict[str, Any] = {name: v.to(*args, **options) for name, v in values.items() if isinstance(v, Tensor)}
        return replace(self, **moved)

    def positions(self) -> Tensor:
        """Absolute position of every token in its own sequence, [N] int64."""
        return torch.arange(len(self.ids)) - self.offsets[:-1].repeat_interleave(self.offsets.diff())


@dataclass(frozen=True, slots=True)
class RoundBatch(SequenceBatch):
    """A SequenceBatch whose blocks are untruncated rounds: drafted [B,P] int64 (0 where nothing was drafted), accepted
    and verified [B] int64 counts; conversations: B prompt ids, so that intervals can resample whole conversations."""

    drafted: Tensor
    accepted: Tensor
    verified: Tensor
    conversations: tuple[str, ...]


def generator(*key: object) -> torch.Generator:
    """A CPU generator seeded by a hash of `key`: equal keys, equal draws, on any machine and in any order."""
    digest = hashlib.sha256("\x1f".join(map(str, key)).encode("utf-8")).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))


def pack(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Concatenate R int64 sequences: (ids [N], offsets [R+1])."""
    lengths = torch.tensor([0, *(len(t) for t in tensors)], dtype=torch.int64)
    return torch.cat([torch.zeros(0, dtype=torch.int64), *tensors]), lengths.cumsum(0)


def partition(sizes: Sequence[int], order: Sequence[int], parts: int) -> list[list[int]]:
    """Cut items, taken in `order`, into exactly `parts` runs of nearly equal total size (a run may be empty)."""
    total = max(1, sum(sizes[item] for item in order))
    groups: list[list[int]] = [[] for _ in range(parts)]
    before = 0
    for item in order:
        middle = before + sizes[item] / 2
        groups[min(parts - 1, int(middle * parts / total))].append(item)
        before += sizes[item]
    return groups


@dataclass(slots=True)
class BatchPlan:
    """Which samples form batch b of epoch e, for one rank.

    sizes: tokens per sample; token_budget: tokens a batch aims at; ranks share every epoch, rank r takes batches r,
    r + world, ... and gets an empty one where they do not divide evenly, so all ranks have the same number.
    """

    sizes: list[int]
    token_budget: int
    seed: int = 0
    shuffle: bool = True
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if self.token_budget < 1:
            raise DsparkError(f"data: expected token_budget >= 1, but got {self.token_budget}.")

    def _parts(self) -> int:
        return max(1, -(-sum(self.sizes) // self.token_budget))

    def __len__(self) -> int:
        return (self._parts() + self.world_size - 1) // self.world_size

    def epoch(self, epoch: int) -> list[list[int]]:
        """The sample indices of each of this rank's batches."""
        order = list(range(len(self.sizes)))
        if self.shuffle:
            order = torch.randperm(len(order), generator=generator("order", self.seed, epoch)).tolist()
        groups = partition(self.sizes, order, self._parts())
        mine = groups[self.rank :: self.world_size]
        return mine + [[] for _ in range(len(self) - len(mine))]


class BatchStream:
    """What the trainer iterates: `collate(epoch, sample indices)` for each batch of the plan, always epoch 0."""

    def __init__(self, plan: BatchPlan, collate: Callable[[int, list[int]], Any]):
        self.plan, self.collate = plan, collate

    def __len__(self) -> int:
        return len(self.plan)

    def __iter__(self) -> Iterator[Any]:
        return (self.collate(0, group) for group in self.plan.epoch(0))


class TrainStream(BatchStream):
    """A BatchStream that remembers its place (epoch, next batch); Lightning stores it in the checkpoint.

    Each `iter` goes on where the last one stopped. The epoch count is the stream's own: Lightning's moves when a run is
    cut by max_steps in the middle of an epoch.
    """

    def __init__(self, plan: BatchPlan, collate: Callable[[int, list[int]], Any]):
        super().__init__(plan, collate)
        self.place = {"epoch": 0, "batch": 0}

    def __iter__(self) -> Iterator[Any]:
        if self.place["batch"] >= len(self):
            self.place = {"epoch": self.place["epoch"] + 1, "batch": 0}
        epoch = self.place["epoch"]
        groups = self.plan.epoch(epoch)
        while self.place["batch"] < len(groups):
            group = groups[self.place["batch"]]
            self.place["batch"] += 1
            yield self.collate(epoch, group)

    def state_dict(self) -> dict[str, int]:
        return dict(self.place)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = {"epoch": int(state["epoch"]), "batch": int(state["batch"])}
