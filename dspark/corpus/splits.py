"""Disjoint and complete splits by content hash. Pure.

The boundaries come from one running sum, so no row falls between two roundings or into two splits
(vllm-project/speculators#868), and a row's place depends on its content, never on the file's order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from dspark.contracts import DsparkError


def split_by_hash(ids: Iterable[str], shares: Mapping[str, float], salt: str = "") -> dict[str, list[str]]:
    """Part distinct ids into named splits of the given shares (positive numbers; only their ratios matter).

    Sizes are within one row of exact. ``salt`` draws another partition. Each split is sorted in hash order. Raises
    DsparkError on duplicate ids or a share that is not positive.
    """
    if not shares or any(not share > 0 for share in shares.values()):
        raise DsparkError(f"splits: expected every share to be a positive number, but got {dict(shares)}.")
    order = sorted(ids, key=lambda name: hashlib.sha256(f"{salt}\n{name}".encode()).digest())
    if len(set(order)) != len(order):
        raise DsparkError("splits: expected distinct ids, but got duplicates. Drop them first.")
    total, running, start = sum(shares.values()), 0.0, 0
    parts: dict[str, list[str]] = {}
    for place, (name, share) in enumerate(shares.items(), start=1):
        running += share
        # The last boundary is the length itself: the running sum of floats may miss 1.0 by a rounding.
        end = len(order) if place == len(shares) else round(len(order) * running / total)
        parts[name] = order[start:end]
        start = end
    return parts
