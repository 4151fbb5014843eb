"""A smoothed bigram model in low rank: W2 W1[x] = log p(next | x) + const, with W1 [V,r], W2 [Vd,r].

With counts c(x,y) and next-token law p(y), the smoothed conditional is (c(x,y) + b p(y)) / (c(x) + b); its log is
log p(y) + log(1 + c(x,y) / (b p(y))) + a constant of x. The middle term is sparse; its best subspace, rows weighted by
how often x occurs, comes from subspace iteration with a keyed start: deterministic, no dense [V,Vd] matrix.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_ROUNDS, _SPARE = 6, 8  # subspace iterations, and extra directions carried for their accuracy
_UNIGRAM = 1.0  # W1's constant first column


@dataclass(frozen=True, slots=True)
class Bigrams:
    """previous, next [M] (vocabulary id, draft column), counts [M]; rows = V, columns = Vd."""

    previous: Tensor
    next: Tensor
    counts: Tensor
    rows: int
    columns: int


def factorise(table: Bigrams, rank: int, smoothing: float, seed: int) -> tuple[Tensor, Tensor]:
    """W1 [V,r], W2 [Vd,r] fp32. smoothing: how many observations of a previous token it takes to half trust them."""
    counts = table.counts.float()
    law = torch.full((table.columns,), 0.5).index_add_(0, table.next, counts)
    law = law / law.sum()
    w1, w2 = torch.zeros(table.rows, rank), torch.zeros(table.columns, rank)
    w1[:, 0], w2[:, 0] = _UNIGRAM, law.log() - law.log().mean()
    if rank > 1:
        ratios = torch.log1p(counts / (smoothing * law[table.next]))
        w1[:, 1:], w2[:, 1:] = _low_rank(table, ratios, rank - 1, seed)
    return w1, w2


def _low_rank(table: Bigrams, values: Tensor, rank: int, seed: int) -> tuple[Tensor, Tensor]:
    """Sparse matrix [V,Vd] of `values` -> left [V,rank], right [Vd,rank] with left right^T near it."""
    often = torch.zeros(table.rows).index_add_(0, table.previous, table.counts.float()).sqrt()
    matrix = _sparse(table, values)
    weighted = _sparse(table, values * often[table.previous])
    transposed = weighted.t().coalesce()
    width = min(rank + _SPARE, table.columns)
    basis = torch.randn(table.columns, width, generator=torch.Generator().manual_seed(seed))
    for _ in range(_ROUNDS):
        basis = torch.linalg.qr(torch.sparse.mm(transposed, torch.sparse.mm(weighted, basis)))[0]
    image = torch.sparse.mm(weighted, basis)
    order = torch.linalg.eigh(image.T @ image)[1].flip(1)[:, :rank]  # strongest directions first
    right = basis @ order
    left = torch.sparse.mm(matrix, right)
    balance = left.norm(dim=0).clamp(min=1e-6).sqrt()
    left, right = left / balance, right * balance
    pad = rank - left.shape[1]
    return torch.nn.functional.pad(left, (0, pad)), torch.nn.functional.pad(right, (0, pad))


def _sparse(table: Bigrams, values: Tensor) -> Tensor:
    index = torch.stack([table.previous, table.next])
    return torch.sparse_coo_tensor(index, values, (table.rows, table.columns), check_invariants=True).coalesce()
