"""The numbers a confidence is judged by: pure functions on tensors and sums (metrics.py has the streaming classes).

Shapes: M events, K slots, B bins, G score groups. Probabilities and labels are [M, K], `observed` [M, K] bool says
which count. Everything is summed in fp64. The same functions serve conditional and cumulative probabilities: the
caller passes the matching mask (events.py).

Equal-width bin i of B is [i/B, (i+1)/B), the last one closed, so that a confidence of exactly 0 or 1 has a bin
(torchmetrics puts 1.0 in a hidden extra one). "No data" is NaN in a tensor, None outside.
Left out on purpose: multi-class calibration, norms other than l1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

DEFAULT_BINS = 15
_CLAMP = 1e-7  # NLL reads a probability of exactly 0 or 1 as this far from it: a miss costs 16.1 nats, not infinity


def bin_index(probabilities: Tensor, num_bins: int = DEFAULT_BINS) -> Tensor:
    """Equal-width bin of each probability, same shape, int64 in [0, num_bins). Compared exactly with i / num_bins."""
    inner = torch.arange(1, num_bins, device=probabilities.device, dtype=torch.float64) / num_bins
    return torch.bucketize(probabilities.double().contiguous(), inner, right=True)


def mass_bin_index(probabilities: Tensor, num_bins: int = DEFAULT_BINS) -> Tensor:
    """Equal-mass bin of each of M probabilities, [M] int64 in ascending order. Equal values share a bin.

    Needs all events at once, so it is for offline use only.
    """
    ordered = probabilities.double().sort().values
    starts = torch.arange(1, num_bins) * len(ordered) // num_bins
    edges = ordered[starts].unique() if len(ordered) else ordered
    return torch.bucketize(probabilities.double().contiguous(), edges, right=True)


def grouped_sums(group: Tensor, num_groups: int, *values: Tensor) -> Tensor:
    """[1 + len(values), num_groups] fp64: events per group, then the sum of each of `values` [M] per group."""
    group = group.flatten()
    count = torch.bincount(group, minlength=num_groups).double()
    sums = [torch.bincount(group, weights=v.flatten().double(), minlength=num_groups) for v in values]
    return torch.stack([count, *sums])


def slot_sums(probabilities: Tensor, labels: Tensor, observed: Tensor, num_bins: int = DEFAULT_BINS) -> Tensor:
    """[3, K, num_bins] fp64: events, sum of predictions, sum of labels, over the observed ones."""
    num_slots = probabilities.shape[1]
    slot = torch.arange(num_slots, device=probabilities.device).expand_as(probabilities)
    group = (slot * num_bins + bin_index(probabilities, num_bins))[observed]
    sums = grouped_sums(group, num_slots * num_bins, probabilities[observed], labels[observed])
    return sums.view(3, num_slots, num_bins)


def ece_from_sums(count: Tensor, predicted: Tensor, observed: Tensor) -> Tensor:
    """Expected calibration error over the last dimension (bins): sum_b |predicted_b - observed_b| / sum_b count_b.

    The three are sums per bin, so each bin's gap is weighted by its share of the events. NaN without events.
    Source: Naeini et al., AAAI 2015; labels against scores, as for a binary forecast.
    """
    return (predicted - observed).abs().sum(-1) / count.sum(-1)


def ece(probabilities: Tensor, labels: Tensor, bins: Tensor) -> float | None:
    """ECE of M events with bin indices `bins` [M] int64. None without events."""
    if not len(bins):
        return None
    return float(ece_from_sums(*grouped_sums(bins, int(bins.max()) + 1, probabilities, labels)))


def ece_noise(probabilities: Tensor, bins: Tensor) -> tuple[float, float] | None:
    """Mean and standard deviation of the ECE that M events would show if `probabilities` were exactly right.

    Each bin's gap is then nearly normal with variance sum p (1 - p), and |normal| has mean sqrt(2/pi) sigma and
    variance (1 - 2/pi) sigma^2. An ECE near the mean cannot be told from a perfect calibration. None without events.
    """
    if not len(bins):
        return None
    variance = grouped_sums(bins, int(bins.max()) + 1, probabilities.double() * (1 - probabilities.double()))[1]
    mean = math.sqrt(2 / math.pi) * float(variance.sqrt().sum())
    deviation = math.sqrt((1 - 2 / math.pi) * float(variance.sum()))
    return mean / len(bins), deviation / len(bins)


def brier(probabilities: Tensor, labels: Tensor) -> Tensor:
    """(p - y)^2 per event, fp64, same shape."""
    return (probabilities.double() - labels.double()).square()


def nll(probabilities: Tensor, labels: Tensor) -> Tensor:
    """-log of the probability given to what happened, in nats, fp64, same shape. p is held inside [1e-7, 1 - 1e-7].

    A soft label (an analytic acceptance probability) is read as an expectation over outcomes.
    """
    p, y = probabilities.double().clamp(_CLAMP, 1 - _CLAMP), labels.double()
    return -(y * p.log() + (1 - y) * (1 - p).log())  # log1p is ten times as slow and no better than 1e-16 here


def auroc_from_counts(positives: Tensor, negatives: Tensor) -> Tensor:
    """Area under the ROC curve from label counts per score group [..., G], groups in ascending order of score.

    The chance that an accepted event scores above a rejected one, equal groups counting half (Mann-Whitney U).
    NaN where only one kind of label occurs.
    """
    below = negatives.cumsum(-1) - negatives
    pairs = (positives * (below + negatives / 2)).sum(-1)
    return pairs / (positives.sum(-1) * negatives.sum(-1))


def auroc(probabilities: Tensor, labels: Tensor) -> float | None:
    """Exact area under the ROC curve of M events. None when only one kind of label occurs."""
    if not len(labels) or bool((labels == labels[0]).all()):
        return None
    scores, group = probabilities.unique(return_inverse=True)
    count, positives = grouped_sums(group, len(scores), labels)
    return float(auroc_from_counts(positives, count - positives))
