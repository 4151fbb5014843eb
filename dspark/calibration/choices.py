"""What follows from a confidence: how much a threshold would verify, and how far a calibration carries.

Both are read off rounds that were verified whole: a policy that would have verified less is a prefix of what happened.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dspark.calibration.events import Events
from dspark.calibration.fitting import fit
from dspark.calibration.record import Calibration
from dspark.calibration.scores import rows_of
from dspark.contracts import DsparkError
from dspark.slot_maps import SlotMap, identity, rates

THRESHOLDS = tuple(round(0.05 * i, 2) for i in range(20))


def threshold_sweep(
    events: Events, maps: Sequence[SlotMap], thresholds: Sequence[float] = THRESHOLDS
) -> list[dict[str, float | None]]:
    """One row per threshold: a round verifies its drafts up to the first whose survival lies below it.

    Keys: threshold, verified (drafts per round), accepted (of those, per round), acceptance (accepted / verified; None
    where nothing is verified), tokens (per round: accepted and the target's own). Rounds that were verified whole only;
    none gives no row.
    """
    whole = events.verified == events.num_slots
    if not bool(whole.any()):
        return []
    survival = rates(events.confidence_logits[whole].double(), maps).cumprod(-1)
    accepted = events.accepted[whole]
    rows: list[dict[str, float | None]] = []
    for threshold in thresholds:
        length = (survival >= threshold).long().cumprod(-1).sum(-1)
        kept = torch.minimum(accepted, length).double().mean().item()
        verified = length.double().mean().item()
        rate = kept / verified if verified else None
        rows.append({"threshold": threshold, "verified": verified, "accepted": kept, "acceptance": rate,
                     "tokens": 1.0 + kept})  # fmt: skip
    return rows


def domain_shift(
    fitted_on: Events, events: Events, calibration: Calibration, replicates: int, key: int
) -> list[dict[str, Any]]:
    """Per domain, rows as in scores.py of the test events with three calibrations: `none`; `others`, fitted without
    that domain by the same method; `all`, the calibration itself, fitted on every domain. Domains that the fit split
    lacks, or has alone, are left out."""
    domains, rows = sorted(set(events.domain) & set(fitted_on.domain)), []
    for domain in domains if len(set(fitted_on.domain)) > 1 else []:
        elsewhere = fit(_of(fitted_on, domain, False), "", calibration.method).maps
        part = _of(events, domain, True)
        logits = part.confidence_logits.double()
        maps = {"none": identity(events.num_slots), "others": elsewhere, "all": calibration.maps}
        judged = {name: rates(logits, chosen) for name, chosen in maps.items()}
        rows += rows_of(domain, part, judged, replicates, key)
    return rows


def _of(events: Events, domain: str, inside: bool) -> Events:
    try:
        return events.select(torch.tensor([(name == domain) == inside for name in events.domain]))
    except DsparkError as error:  # callers have seen that there are some
        raise AssertionError(f"domain {domain!r} has no rounds") from error
