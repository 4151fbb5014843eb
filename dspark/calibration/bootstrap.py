"""Bootstrap intervals by conversation: rounds of one conversation are not independent, conversations are.

Shapes: M events, K slots, C conversations, R replicates. Every number here is a function of sums per conversation, so
a replicate is a weighting of those sums and all replicates are one matrix product. The weights are a pure function of
(key, C, R): the same report twice has the same intervals.
Left out on purpose: resampling within a conversation.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dspark.calibration.measures import (
    DEFAULT_BINS,
    auroc_from_counts,
    bin_index,
    brier,
    ece_from_sums,
    grouped_sums,
    mass_bin_index,
    nll,
)

REPLICATES = 500
LEAST, MOST = 40, 100_000  # replicates: fewer have no 2.5 % to cut off
MAX_CLUSTERS = 1000  # more conversations are joined into this many clusters: still independent, and the cost is bounded
_AUROC_GROUPS = 64  # equal-mass score groups; the interval's width is in the third digit, the point value is exact


def resample_weights(num_clusters: int, replicates: int = REPLICATES, key: int = 0) -> Tensor:
    """[R, C] fp64: how often each cluster was drawn in each replicate; every row sums to C."""
    generator = np.random.Generator(np.random.Philox(key))
    draws = generator.integers(num_clusters, size=(replicates, num_clusters))
    flat = (draws + num_clusters * np.arange(replicates)[:, None]).ravel()
    counts = np.bincount(flat, minlength=replicates * num_clusters)
    return torch.from_numpy(counts.reshape(replicates, num_clusters).astype(np.float64))


def replicate_scores(
    probabilities: Tensor, labels: Tensor, observed: Tensor, cluster: Tensor, weights: Tensor
) -> dict[str, Tensor]:
    """Every metric in every replicate: name -> [R, K] fp64, NaN where a replicate has no data.

    probabilities, labels, observed [M, K]; cluster [M] int64 in [0, C); weights [R, C].
    """
    num_slots, num_clusters = probabilities.shape[1], weights.shape[1]
    slot = torch.arange(num_slots).expand_as(probabilities)[observed]
    cell = cluster[:, None].expand_as(probabilities)[observed] * num_slots + slot
    p, y = probabilities[observed].double(), labels[observed].double()

    def resampled(bins: Tensor, num_bins: int, *values: Tensor) -> Tensor:
        sums = grouped_sums(cell * num_bins + bins, num_clusters * num_slots * num_bins, *values)
        per_cluster = sums.view(len(sums), num_clusters, num_slots * num_bins)
        return (weights @ per_cluster).view(len(sums), len(weights), num_slots, num_bins)

    binned = resampled(bin_index(p), DEFAULT_BINS, p, y)
    whole = resampled(torch.zeros_like(cell), 1, p, y, brier(p, y), nll(p, y))[..., 0]
    count, positives = resampled(_score_groups(p, slot, num_slots), _AUROC_GROUPS, y)
    means = dict(zip(("mean_predicted", "mean_observed", "brier", "nll"), whole[1:] / whole[0], strict=True))
    return {"ece": ece_from_sums(*binned), "auroc": auroc_from_counts(positives, count - positives), **means}


def interval(point: float | None, replicates: Tensor, pivotal: bool = False) -> tuple[float, float] | None:
    """95 % interval from replicates [R]; None without a point value or when half the replicates have no data.

    pivotal: mirrored at the point value, for ECE, which resampling inflates (it counts noise as error); cut at 0 and
    widened to hold the point value.
    """
    valid = replicates[~replicates.isnan()]
    if point is None or len(valid) * 2 < len(replicates):
        return None
    low, high = torch.quantile(valid, torch.tensor([0.025, 0.975], dtype=valid.dtype)).tolist()
    if pivotal:
        low, high = max(0.0, 2 * point - high), 2 * point - low
    return min(low, point), max(high, point)


def _score_groups(p: Tensor, slot: Tensor, num_slots: int) -> Tensor:
    groups = torch.zeros_like(slot)
    for k in range(num_slots):
        mine = slot == k
        groups[mine] = mass_bin_index(p[mine], _AUROC_GROUPS)
    return groups
