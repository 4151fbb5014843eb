"""Streaming per-slot metrics as torchmetrics classes: thin, over the pure functions of measures.py.

Shapes: M rounds, K slots. `update(probabilities [M, K], labels [M, K], observed [M, K] bool)`, `compute() -> [K]`, for
conditional and for cumulative probabilities alike (pass the matching mask, events.py). The states are fp64 sums of
fixed shape: memory is constant, and a rank without data synchronises like any other.
Apart from measures.py because torchmetrics takes seconds to import, which fitting and reporting need not pay.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from dspark.calibration.measures import DEFAULT_BINS, auroc_from_counts, brier, ece_from_sums, nll, slot_sums

AUROC_BINS = 1024


class _SlotMetric(Metric):
    """Base: events, sum of predictions, sum of labels per slot and bin. compute gives NaN for slots without data."""

    full_state_update = False
    is_differentiable = False

    def __init__(self, num_slots: int, width: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.sums: Tensor
        self.add_state("sums", torch.zeros(3, num_slots, width, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, probabilities: Tensor, labels: Tensor, observed: Tensor) -> None:
        """Adds M rounds. Probabilities must lie in [0, 1] where observed; elsewhere they are not read."""
        probabilities = probabilities.detach().double()
        self.sums += slot_sums(probabilities, labels.detach().double(), observed.bool(), self.sums.shape[-1])


class SlotECE(_SlotMetric):
    """Expected calibration error per slot, equal-width bins."""

    higher_is_better = False

    def __init__(self, num_slots: int, num_bins: int = DEFAULT_BINS, **kwargs: Any) -> None:
        super().__init__(num_slots, num_bins, **kwargs)

    def compute(self) -> Tensor:
        return ece_from_sums(*self.sums)


class SlotAUROC(_SlotMetric):
    """Area under the ROC curve per slot from score bins, evenly spaced in the logit between -16 and 16.

    Pairs that share a bin count half, so it is exact up to half of their share.
    """

    higher_is_better = True

    def __init__(self, num_slots: int, num_bins: int = AUROC_BINS, **kwargs: Any) -> None:
        super().__init__(num_slots, num_bins, **kwargs)

    def update(self, probabilities: Tensor, labels: Tensor, observed: Tensor) -> None:
        logits = torch.logit(probabilities.detach().double())  # -inf and inf at 0 and 1: the outer bins
        super().update((logits / 32 + 0.5).clamp(0, 1), labels, observed)

    def compute(self) -> Tensor:
        count, _, positives = self.sums
        return auroc_from_counts(positives, count - positives)


class SlotMeanPredicted(_SlotMetric):
    """Mean predicted probability per slot."""

    def __init__(self, num_slots: int, **kwargs: Any) -> None:
        super().__init__(num_slots, 1, **kwargs)

    def compute(self) -> Tensor:
        return (self.sums[1] / self.sums[0])[:, 0]


class SlotMeanObserved(SlotMeanPredicted):
    """Mean observed label (the acceptance rate) per slot."""

    def compute(self) -> Tensor:
        return (self.sums[2] / self.sums[0])[:, 0]


class SlotBrier(SlotMeanPredicted):
    """Mean squared difference between probability and label per slot."""

    higher_is_better = False

    def update(self, probabilities: Tensor, labels: Tensor, observed: Tensor) -> None:
        super().update(brier(probabilities.detach(), labels.detach()), labels, observed)


class SlotNLL(SlotMeanPredicted):
    """Mean negative log-likelihood of the label per slot, in nats."""

    higher_is_better = False

    def update(self, probabilities: Tensor, labels: Tensor, observed: Tensor) -> None:
        super().update(nll(probabilities.detach(), labels.detach()), labels, observed)
