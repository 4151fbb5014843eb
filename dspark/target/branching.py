"""Sequences that begin alike, laid out so that each beginning is run once: the samples of a prompt in one pass.

Rows come stem by stem, each stem's tokens and then its branches'. A branch's token attends the stem's rows and then its
branch's own: the keys of the whole sequence in order, which is all that attention's bits depend on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from dspark.target.place import Ranges


class Branching(NamedTuple):
    """N rows. ids, positions, begin [N] int64 and stem as Target.forward takes them; ends: for every branch of every
    stem the rows [1 + S'] of the stem's last token and of the branch's own."""

    ids: Tensor
    positions: Tensor
    begin: Tensor
    stem: Ranges
    ends: list[list[Tensor]]


def branching(stems: Sequence[Tensor], branches: Sequence[Sequence[Tensor]]) -> Branching:
    """stems: each [S] int64, S >= 1; branches: for each stem its continuations, [S'] int64, S' >= 0."""
    rows = _Rows()
    ends: list[list[Tensor]] = []
    for stem, few in zip(stems, branches, strict=True):
        root = rows.add(stem, 0, (0, 0))
        end = root + len(stem)
        firsts = [rows.add(branch, len(stem), (root, end)) for branch in few]
        ends.append([torch.tensor([end - 1, *range(f, f + len(b))]) for f, b in zip(firsts, few, strict=True)])
    stem_range = torch.tensor(rows.stem_begin), torch.tensor(rows.stem_end)
    return Branching(torch.cat(rows.ids), torch.tensor(rows.positions), torch.tensor(rows.begin), stem_range, ends)


@dataclass(slots=True)
class _Rows:
    ids: list[Tensor] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    begin: list[int] = field(default_factory=list)
    stem_begin: list[int] = field(default_factory=list)
    stem_end: list[int] = field(default_factory=list)

    def add(self, piece: Tensor, start: int, stem: tuple[int, int]) -> int:
        """A run of tokens from position `start` on, behind the rows of a stem. Returns its first row."""
        first, count = len(self.begin), len(piece)
        self.ids.append(piece)
        self.positions += range(start, start + count)
        self.begin += [first] * count
        self.stem_begin += [stem[0]] * count
        self.stem_end += [stem[1]] * count
        return first
