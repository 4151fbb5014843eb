"""Has calibration moved since an older report: after a policy update, at another temperature, on another domain?

A report keeps what this needs: per conversation, slot and bin of the calibrated survival the number of rounds, the sum
of predictions and the sum of labels. Whole conversations are what both sides consist of.
- gap, predicted minus observed survival, with a bootstrap interval of its move, both sides resampled each for itself
  (rollouts after an update are other rollouts, even of the same prompts);
- ECE, which is too high by its noise, and more so on fewer rounds: a bootstrap interval of its difference would miss.
What has moved is told by one test for the whole table: within each domain the conversations of both reports are dealt
out anew, as many rounds to either side as it had, and every row's moves of gap and ECE are divided by their deviation
over the deals. `moved` marks what exceeds the 95 % quantile of the largest of all of them: of reports in which nothing
moved, one in twenty marks anything. The gap sees a mean that is off; ECE also what is too sure at both ends.
Domains that only one of the reports has are left out.
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


FEWEST = 10  # conversations of a domain on either side


def compare(
    old: dict[str, Any], new: dict[str, Any], slots: int, replicates: int = bootstrap.REPLICATES, key: int = 0
) -> list[dict[str, Any]]:
    """Rows {domain, slot, events: [old, new], gap: [old, new], gap_moved, gap_interval, ece: [old, new], ece_moved,
    ece_chance, moved} of what conversation_sums gave for two sides; slot 1 ... K and "mean".

    ece_chance: what holds 95 % of ECE's moves over the deals, row by row; moved: of the test of the whole table. Of the
    domains that both have, each and (if there are more) `all` of them. Raises DsparkError when there is none.
    """
    sides = [_Side(side, slots) for side in (old, new)]
    common = sorted(set(sides[0].domains) & set(sides[1].domains))
    if not common:
        raise DsparkError(
            f"drift: expected a domain that both reports have, but got {sorted(set(old['domains']))} and "
            f"{sorted(set(new['domains']))}. Report on rounds of the same domains."
        )
    parts = {domain: [side.of(domain) for side in sides] for domain in common}
    dealt = _dealt(parts, replicates, key + 2)
    if len(common) > 1:
        dealt = {ALL: _together(dealt, parts), **dealt}
        parts = {ALL: [torch.cat(columns, dim=1) for columns in zip(*parts.values(), strict=True)], **parts}
    rows, nulls = [], []
    for domain, sums in parts.items():
        enough = min(s.shape[1] for s in sums) >= FEWEST  # else no interval, rather than one that means nothing
        points = [_measures(s, torch.ones(1, s.shape[1], dtype=torch.float64))[:, 0] for s in sums]
        gaps = _resampled(sums, replicates, key)[:, 1] if enough else None
        chance = _moves(torch.cat(sums, dim=1), dealt[domain]) if enough else None
        for at in range(slots + 1):
            rows.append(_row(domain, at, points, gaps, chance, slots))
            nulls.append(None if chance is None else chance[:, 1:, at])
    _mark(rows, nulls)
    return rows


def verdict(rows: Sequence[dict[str, Any]]) -> str:
    """One sentence of compare's rows."""
    moved = []
    for row in rows:
        where = "mean" if row["slot"] == "mean" else f"slot {row['slot']}"
        moved += [f"{row['domain']}, {where}"] if row["moved"] else []
    if moved:
        return f"Calibration has moved since the older report ({'; '.join(moved[:4])}{'; ...' if moved[4:] else ''})."
    if all(row["ece_chance"] is None for row in rows):
        return f"Too few conversations (fewer than {FEWEST} on a side) to say whether calibration has moved."
    return "Calibration has not moved since the older report by more than chance would."


def _mark(rows: list[dict[str, Any]], nulls: list[Tensor | None]) -> None:
    """moved, by the largest deviation among all rows' moves of gap and ECE. nulls: [R, 2] of each row."""
    scaled: list[list[float]] = []
    known = []
    for row, null in zip(rows, nulls, strict=True):
        scaled.append([0.0, 0.0])
        if null is None or row["gap_moved"] is None or bool(null.isnan().any()):
            continue
        spread = null.std(0).clamp_min(1e-12)
        scaled[-1] = [abs(row["gap_moved"]) / float(spread[0]), abs(row["ece_moved"]) / float(spread[1])]
        known.append((null / spread).abs().amax(1))
    limit = float(torch.quantile(torch.stack(known).amax(0), 0.95)) if known else float("inf")
    for row, moves in zip(rows, scaled, strict=True):
        row["moved"] = max(moves) > limit


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


def _dealt(parts: dict[str, list[Tensor]], replicates: int, key: int) -> dict[str, Tensor]:
    """Per domain which conversations chance gives to the old side: 1 or 0, [R, C old + C new]. The old side is dealt to
    until it has as many rounds as it had: conversations may be longer on one side than on the other."""
    generator, found = np.random.Generator(np.random.Philox(key)), {}
    for domain, (old, new) in parts.items():
        rounds = torch.cat([old, new], dim=1)[0, :, 0].sum(-1)  # the first slot is verified in every round with drafts
        order = generator.permuted(np.tile(np.arange(len(rounds)), (replicates, 1)), axis=1)
        turn = torch.from_numpy(order)
        dealt = rounds[turn].cumsum(1)
        inside = (dealt - rounds[turn] / 2 < float(old[0, :, 0].sum())).double()
        found[domain] = torch.zeros_like(dealt).scatter(1, turn, inside)
    return found


def _together(dealt: dict[str, Tensor], parts: dict[str, list[Tensor]]) -> Tensor:
    """The domains' deals as one of all their conversations: the old sides first, then the new ones."""
    sizes = {domain: sums[0].shape[1] for domain, sums in parts.items()}
    old = [who[:, : sizes[domain]] for domain, who in dealt.items()]
    return torch.cat([*old, *(who[:, sizes[domain] :] for domain, who in dealt.items())], dim=1)


def _moves(both: Tensor, is_old: Tensor) -> Tensor:
    """New less old for each deal: [R, 3, K + 1]."""
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
    row["ece_chance"] = _span(chance[:, 2, at]) if known and chance is not None else None
    return {**row, "moved": False}


def _span(values: Tensor) -> list[float] | None:
    """What holds 95 % of the replicates; None when half of them have no data."""
    valid = values[~values.isnan()]
    if len(valid) * 2 < len(values):
        return None
    return torch.quantile(valid, torch.tensor([0.025, 0.975], dtype=valid.dtype)).tolist()
