"""Has calibration moved since an older report: after a policy update, at another temperature, on another domain?

A report keeps what this needs: per conversation, slot and bin of the calibrated survival the number of rounds, the sum
of predictions and the sum of labels. Whole conversations are what both sides consist of.
- gap, predicted minus observed: an interval of its move, both sides resampled each for itself (rollouts after an update
  are other rollouts, even of the same prompts). One that leaves out 0 is a move that resampling cannot explain.
- ECE: it is too high by its noise, and more so on fewer rounds, so a bootstrap interval of a difference misses. Instead
  the conversations of both are shuffled and dealt out anew, as many rounds to either side as it had: `ece_chance` holds
  95 % of the moves of a head that did not move, whatever the two sizes.
The gap sees a mean that is off; ECE also what is too sure at both ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dspark.calibration import bootstrap
from dspark.calibration.events import ALL, Events
from dspark.calibration.measures import DEFAULT_BINS, bin_index, ece_from_sums, grouped_sums
from dspark.calibration.scores import clusters
from dspark.contracts import DsparkError
from dspark.slot_maps import SlotMap, rates


def conversation_sums(events: Events, maps: Sequence[SlotMap]) -> dict[str, Any]:
    """For report.json: {"domains": the domain of each of C clusters, "cells": [[cluster, slot, bin, rounds, sum of
    predictions, sum of labels]]}, cells without rounds left out."""
    count, cluster = clusters(events)
    survival, seen = rates(events.confidence_logits.double(), maps).cumprod(-1), events.cumulative_observed
    slots = events.num_slots
    cell = (cluster[:, None] * slots + torch.arange(slots)) * DEFAULT_BINS + bin_index(survival)
    sums = grouped_sums(cell[seen], count * slots * DEFAULT_BINS, survival[seen], events.labels[seen])
    kept = sums[0].nonzero().flatten().tolist()
    names = dict(zip(cluster.tolist(), events.domain, strict=True))
    where = [(at // (slots * DEFAULT_BINS), at // DEFAULT_BINS % slots, at % DEFAULT_BINS) for at in kept]
    cells = [[*place, int(n), p, int(y)] for place, (n, p, y) in zip(where, sums[:, kept].T.tolist(), strict=True)]
    return {"domains": [names[i] for i in range(count)], "cells": cells}


def compare(
    old: dict[str, Any], new: dict[str, Any], slots: int, replicates: int = bootstrap.REPLICATES, key: int = 0
) -> list[dict[str, Any]]:
    """Rows {domain, slot, events: [old, new], gap: [old, new], gap_moved, gap_interval, ece: [old, new], ece_moved,
    ece_chance, moved} of what conversation_sums gave for two sides; slot 1 ... K and "mean".

    moved: gap or ECE has, beyond chance. Domains that both sides have, and `all`.
    """
    sides = [_Side(side, slots) for side in (old, new)]
    common = sorted(set(sides[0].domains) & set(sides[1].domains))
    rows = []
    for domain in [ALL, *(common if len(common) > 1 else [])]:
        sums = [side.of(domain) for side in sides]
        points = [_measures(s, torch.ones(1, s.shape[1], dtype=torch.float64))[:, 0] for s in sums]
        enough = min(s.shape[1] for s in sums) > 1  # else nothing to resample: no interval, rather than one of no width
        gaps = _resampled(sums, replicates, key)[:, 1] if enough else None
        chance = _dealt(sums, replicates, key + 2)[:, 2] if enough else None
        rows += [_row(domain, at, points, gaps, chance, slots) for at in range(slots + 1)]
    return rows


def refuse_other_slots(old: dict[str, Any], slots: int) -> None:
    """Raises DsparkError when the older report's data are of another number of slots."""
    if old["num_slots"] != slots:
        raise DsparkError(
            f"drift: expected an older report of {slots} slots, but got one of {old['num_slots']}. Compare draft "
            "models of the same block size."
        )


class _Side:
    """Sums [3, C, K, bins] of one report."""

    def __init__(self, kept: dict[str, Any], slots: int):
        self.domains = kept["domains"]
        self.sums = torch.zeros(3, len(self.domains), slots, DEFAULT_BINS, dtype=torch.float64)
        cells = torch.tensor(kept["cells"], dtype=torch.float64).reshape(-1, 6)
        cluster, slot, at = cells[:, :3].long().unbind(1)
        self.sums[:, cluster, slot, at] = cells[:, 3:].T

    def of(self, domain: str) -> Tensor:
        return self.sums[:, torch.tensor([domain in (ALL, name) for name in self.domains])]


def _resampled(sums: Sequence[Tensor], replicates: int, key: int) -> Tensor:
    """New less old, each side's conversations drawn with replacement: moves [R, 3, K + 1] of events, gap, ECE."""
    weights = [bootstrap.resample_weights(s.shape[1], replicates, key + i) for i, s in enumerate(sums)]
    old, new = (_measures(s, w) for s, w in zip(sums, weights, strict=True))
    return (new - old).transpose(0, 1)


def _dealt(sums: Sequence[Tensor], replicates: int, key: int) -> Tensor:
    """New less old when chance decides which conversation is on which side: moves [R, 3, K + 1]. The old side is dealt
    to until it has as many rounds as it had: conversations may be longer on one side than on the other."""
    both = torch.cat(list(sums), dim=1)
    rounds = both[0, :, 0].sum(-1)  # the first slot is verified in every round that has drafts
    size = float(sums[0][0, :, 0].sum())
    generator = np.random.Generator(np.random.Philox(key))
    order = torch.from_numpy(generator.permuted(np.tile(np.arange(len(rounds)), (replicates, 1)), axis=1))
    dealt = rounds[order].cumsum(1)
    is_old = torch.zeros_like(dealt).scatter(1, order, (dealt - rounds[order] / 2 < size).double())
    return (_measures(both, 1.0 - is_old) - _measures(both, is_old)).transpose(0, 1)


def _measures(sums: Tensor, weights: Tensor) -> Tensor:
    """sums [3, C, K, bins], weights [R, C] -> events, gap, ece [3, R, K + 1], the mean over slots last."""
    drawn = torch.einsum("rc,sckb->srkb", weights, sums)
    count, predicted, observed = drawn.sum(-1)
    by_slot = torch.stack([count, (predicted - observed) / count, ece_from_sums(*drawn)])
    return torch.cat([by_slot, by_slot.nanmean(-1, keepdim=True)], dim=-1)


def _row(
    domain: str, at: int, points: Sequence[Tensor], gaps: Tensor | None, chance: Tensor | None, slots: int
) -> dict[str, Any]:
    row: dict[str, Any] = {"domain": domain, "slot": "mean" if at == slots else at + 1}
    row["events"] = [int(p[0, at]) for p in points]
    for i, name in ((1, "gap"), (2, "ece")):
        row[name] = [None if torch.isnan(p[i, at]) else float(p[i, at]) for p in points]
        old, new = row[name]
        row[f"{name}_moved"] = None if old is None or new is None else new - old
    known = row["gap_moved"] is not None
    row["gap_interval"] = _span(gaps[:, at]) if known and gaps is not None else None
    row["ece_chance"] = _span(chance[:, at]) if known and chance is not None else None
    row["moved"] = _outside(0.0, row["gap_interval"]) or _outside(row["ece_moved"], row["ece_chance"])
    return row


def _span(values: Tensor) -> list[float] | None:
    """What holds 95 % of the replicates; None when half of them have no data."""
    valid = values[~values.isnan()]
    if len(valid) * 2 < len(values):
        return None
    return torch.quantile(valid, torch.tensor([0.025, 0.975], dtype=valid.dtype)).tolist()


def _outside(value: float, span: list[float] | None) -> bool:
    return span is not None and not span[0] <= value <= span[1]
