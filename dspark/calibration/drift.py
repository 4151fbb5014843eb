"""Has calibration moved since an older report: after a policy update, at another temperature, on another domain?

A report keeps what this needs: per conversation, slot and bin of the calibrated survival the number of rounds, the sum
of predictions and the sum of labels. Both sides resample whole conversations, each for itself: rollouts after an update
are other rollouts, even of the same prompts. So an interval that leaves out 0 is a move that resampling cannot explain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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


def compare(old: dict[str, Any], new: dict[str, Any], replicates: int = bootstrap.REPLICATES, key: int = 0) -> Any:
    """Rows {domain, slot, events: [old, new], gap: [old, new], gap_moved, gap_interval, ece: [old, new], ece_moved,
    ece_interval} of two reports' data; slot 1 ... K and "mean". gap: predicted minus observed survival.

    Domains that both have, and `all`. Raises DsparkError when the numbers of slots differ.
    """
    slots = new["num_slots"]
    refuse_other_slots(old, slots)
    sides = [_Side(side["conversations"], slots) for side in (old, new)]
    common = sorted(set(sides[0].domains) & set(sides[1].domains))
    rows = []
    for domain in [ALL, *(common if len(common) > 1 else [])]:
        points, samples = zip(
            *(side.measured(domain, replicates, key + i) for i, side in enumerate(sides)), strict=True
        )
        rows += [_row(domain, at, points, samples, slots) for at in range(slots + 1)]
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

    def measured(self, domain: str, replicates: int, key: int) -> tuple[Tensor, Tensor]:
        """Rows events, gap, ece over [K+1] (the last: mean over slots): the point [3, K+1], replicates [3, R, K+1]."""
        mine = torch.tensor([domain in (ALL, name) for name in self.domains])
        sums = self.sums[:, mine]
        whole = torch.ones(1, sums.shape[1], dtype=torch.float64)
        if sums.shape[1] < 2:  # nothing to resample: no interval, rather than one of no width
            point = _measures(sums, whole)[:, 0]
            return point, torch.full((3, replicates, point.shape[1]), torch.nan, dtype=torch.float64)
        weights = bootstrap.resample_weights(sums.shape[1], replicates, key)
        return _measures(sums, whole)[:, 0], _measures(sums, weights)


def _measures(sums: Tensor, weights: Tensor) -> Tensor:
    """sums [3, C, K, bins], weights [R, C] -> events, gap, ece [3, R, K + 1]."""
    drawn = torch.einsum("rc,sckb->srkb", weights, sums)
    count, predicted, observed = drawn.sum(-1)
    by_slot = torch.stack([count, (predicted - observed) / count, ece_from_sums(*drawn)])
    return torch.cat([by_slot, by_slot.nanmean(-1, keepdim=True)], dim=-1)


def _row(domain: str, at: int, points: Sequence[Tensor], samples: Sequence[Tensor], slots: int) -> dict[str, Any]:
    row: dict[str, Any] = {"domain": domain, "slot": "mean" if at == slots else at + 1}
    row["events"] = [int(p[0, at]) for p in points]
    for i, name in ((1, "gap"), (2, "ece")):
        old, new = (float(p[i, at]) for p in points)
        known = old == old and new == new
        moved = new - old if known else None
        row[name] = [value if value == value else None for value in (old, new)]
        row[f"{name}_moved"] = moved
        row[f"{name}_interval"] = _interval(moved, samples[1][i, :, at] - samples[0][i, :, at])
    return row


def _interval(moved: float | None, replicates: Tensor) -> list[float] | None:
    """Mirrored at the point: resampling inflates both sides' ECE, by different amounts if their sizes differ."""
    valid = replicates[~replicates.isnan()]
    if moved is None or len(valid) * 2 < len(replicates):
        return None
    low, high = torch.quantile(valid, torch.tensor([0.025, 0.975], dtype=valid.dtype)).tolist()
    return [2 * moved - high, 2 * moved - low]
