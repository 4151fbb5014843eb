"""Counts per conversation -> rates with 95 % intervals. Pure.

Shapes: C conversations, K slots, R replicates. Counts are a table [C, 3 + 2K]: rounds, tokens, accepted drafts, then
per slot how often it was tried and how often it passed. Every rate is a quotient of column sums, so a replicate is a
weighting of the rows. Conversations are resampled, not rounds: the rounds of one conversation are not independent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dspark.calibration.bootstrap import interval, resample_weights

OVERALL = "overall"
FEW = 20  # blocks; a share of fewer is shown as such
DEFINITIONS = {
    "tau": "tokens per round, the target's own token included",
    "accepted": "accepted drafts per round, the target's own token excluded",
    "conditional": "share of slot k accepted, of the rounds that accepted all slots before it",
    "survival": "share of blocks accepted up to and including slot k: the product of the conditional shares, so that a "
    "block cut short by the sequence's end does not count as one that failed",
    "rounds": "passes of the target that verified at least one draft",
    "interval": "95 %, bootstrap over conversations (prompts)",
}
Estimate = dict[str, Any]  # {"value": float | None, "interval": [low, high] | None}


def count_table(conversations: Sequence[dict[str, Any]]) -> Tensor:
    """[C, 3 + 2K] fp64 from a report's conversations (at least one)."""
    rows = [[c["rounds"], c["tokens"], c["accepted"], *c["tried"], *c["passed"]] for c in conversations]
    return torch.tensor(rows, dtype=torch.float64)


def rates(sums: Tensor) -> dict[str, Tensor]:
    """name -> [...] or [..., K] from summed counts [..., 3 + 2K]; NaN where nothing was counted."""
    slots = (sums.shape[-1] - 3) // 2
    rounds, tokens, accepted = sums[..., 0], sums[..., 1], sums[..., 2]
    conditional = sums[..., 3 + slots :] / sums[..., 3 : 3 + slots]
    ended = (conditional == 0).cumsum(-1) > 0  # nothing got further: the slots behind it were never tried
    survival = torch.where(ended, 0.0, conditional.cumprod(-1))
    return {"tau": tokens / rounds, "accepted": accepted / rounds, "conditional": conditional, "survival": survival}


def figures(conversations: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Every figure, overall and per domain (ascending), from a report's conversations."""
    domains = sorted({c["domain"] for c in conversations})
    groups = {d: [c for c in conversations if c["domain"] == d] for d in domains}
    return {name: _figures(some) for name, some in {OVERALL: conversations, **groups}.items()}


def _figures(conversations: Sequence[dict[str, Any]]) -> dict[str, Any]:
    table = count_table(conversations)
    point, spread = rates(table.sum(0)), rates(resample_weights(len(table)) @ table)
    slots = (table.shape[1] - 3) // 2
    found: dict[str, Any] = {"conversations": len(table), "rounds": int(table[:, 0].sum())}
    found["tried"] = [int(n) for n in table[:, 3 : 3 + slots].sum(0)]
    for name, value in point.items():
        if value.dim():
            found[name] = [estimate(value[k], spread[name][:, k]) for k in range(slots)]
        else:
            found[name] = estimate(value, spread[name])
    return found


def estimate(value: Tensor, replicates: Tensor) -> Estimate:
    """A scalar with its interval from replicates [R]. No interval where every replicate says the same (a single
    conversation, a rate of 0 or 1): resampling then knows of no error, which does not mean that there is none."""
    point = None if bool(value.isnan()) else float(value)
    known = replicates[~replicates.isnan()]
    span = interval(point, replicates) if len(known.unique()) > 1 else None
    return {"value": point, "interval": None if span is None else list(span)}
