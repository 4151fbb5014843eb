"""Streaming metrics per slot and domain as torchmetrics classes, over the pure functions of measures.py.

Shapes: M rounds, K slots, D domains, G score groups. `update(probabilities [M, K], labels [M, K], observed [M, K] bool,
domain [M] int64)`, `compute() -> [K]`, or [D + 1, K] where the metric was made for domains: each domain's, then that of
all together. For conditional and cumulative probabilities alike: pass the matching mask (events.py).

All keep the same state, sums [5, D, K, G] fp64 over groups of like probability: rounds, predictions, labels, squared
errors, log-losses. So memory is constant, ranks add up (a rank without data has zeros), and a MetricCollection of them
updates once. The groups' edges are every i / bins and 1023 more, evenly spaced in the logit between -16 and 16:
equal-width ECE, Brier, NLL and the means are exact; AUROC counts pairs within a group half, equal-mass bins are cut at
the nearest group.
Apart from measures.py because torchmetrics takes seconds to import, which fitting and reporting need not pay.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from dspark.calibration.measures import DEFAULT_BINS, auroc_from_counts, brier, ece_from_sums, grouped_sums, nll
from dspark.contracts import DsparkError

_FINE = 1023  # edges beside the equal-width ones
_ROUNDS = 1 << 12  # rounds at a time: what an update adds to the memory does not depend on its size


class _SlotMetric(Metric):
    """Base: the state and its update. compute gives NaN where there is no data."""

    full_state_update = False
    is_differentiable = False

    def __init__(self, num_slots: int, num_domains: int = 0, num_bins: int = DEFAULT_BINS, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num_domains, self.num_bins = num_domains, num_bins
        bins = torch.arange(1, num_bins, dtype=torch.float64) / num_bins
        fine = torch.linspace(-16, 16, _FINE, dtype=torch.float64).sigmoid()
        self.edges = torch.cat([bins, fine]).unique()  # no buffer: a module cast to half precision must not touch it
        self.sums: Tensor
        shape = (5, max(num_domains, 1), num_slots, len(self.edges) + 1)
        self.add_state("sums", torch.zeros(shape, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, probabilities: Tensor, labels: Tensor, observed: Tensor, domain: Tensor | None = None) -> None:
        """Adds M rounds. Probabilities and labels must lie in [0, 1] where observed; elsewhere they are not read.
        domain: of each round, for a metric made with num_domains. Raises DsparkError on other shapes and values, and
        on a domain that it has no place for."""
        self._check(probabilities, labels, observed)
        if (domain is not None) != (self.num_domains > 0):
            given = "no domain" if domain is None else "a domain per round"
            raise DsparkError(f"metric: expected domains as it was made for them, but got {given}. Set num_domains.")
        where = torch.zeros(len(labels), dtype=torch.int64, device=labels.device) if domain is None else domain
        if where.shape != labels.shape[:1] or where.is_floating_point():
            got = f"{where.dtype} {tuple(where.shape)}"
            raise DsparkError(f"metric: expected an int64 domain per round [{len(labels)}], but got {got}.")
        if len(where) and not 0 <= int(where.min()) <= int(where.max()) < max(self.num_domains, 1):
            raise DsparkError(f"metric: expected domains below {self.num_domains}, but got {int(where.max())}.")
        for chunk in zip(*(t.split(_ROUNDS) for t in (probabilities, labels, observed, where)), strict=True):
            self._add(*chunk)

    def _apply(self, fn: Any, *args: Any, **options: Any) -> Any:
        """Moves to other devices; the sums stay fp64 whatever the module around them is cast to."""
        sums, default = self.sums, self._defaults["sums"]
        super()._apply(fn, *args, **options)
        self.sums = sums.to(self.sums.device)
        if isinstance(default, Tensor):
            self._defaults["sums"] = default.to(self.sums.device)
        return self

    def _check(self, probabilities: Tensor, labels: Tensor, observed: Tensor) -> None:
        wanted, got = (len(labels), self.sums.shape[2]), [tuple(t.shape) for t in (probabilities, labels, observed)]
        if any(shape != wanted for shape in got):
            raise DsparkError(f"metric: expected probabilities, labels and observed [rounds, {wanted[1]}], got {got}.")
        if observed.dtype != torch.bool:
            raise DsparkError(f"metric: expected observed to be bool, but got {observed.dtype}.")
        for name, values in (("probabilities", probabilities), ("labels", labels)):
            outside = observed & ~((values >= 0) & (values <= 1))
            if bool(outside.any()):
                raise DsparkError(
                    f"metric: expected {name} in [0, 1], but got {float(values[outside][0])}. Logits want a sigmoid."
                )

    def _add(self, probabilities: Tensor, labels: Tensor, observed: Tensor, domain: Tensor) -> None:
        _, domains, slots, groups = self.sums.shape
        seen = observed.flatten().nonzero().squeeze(-1)
        cell = (domain[:, None] * slots + torch.arange(slots, device=domain.device)).flatten()[seen]
        p, y = (values.detach().flatten()[seen].double() for values in (probabilities, labels))
        group = cell * groups + torch.bucketize(p, self.edges.to(p.device), right=True)
        added = grouped_sums(group, domains * slots * groups, p, y, brier(p, y), nll(p, y))
        self.sums += added.view_as(self.sums)

    def _tables(self) -> Tensor:
        """Sums [5, K, G], or [5, D + 1, K, G]: what compute reads."""
        if not self.num_domains:
            return self.sums[:, 0]
        return torch.cat([self.sums, self.sums.sum(1, keepdim=True)], dim=1)

    def _mean(self, row: int) -> Tensor:
        totals = self._tables().sum(-1)
        return totals[row] / totals[0]

    def _ece(self, sums: Tensor, bins: Tensor) -> Tensor:
        """sums [3, ..., K, G]; bins: of each group, of a shape that expands to them."""
        wide = sums.new_zeros(*sums.shape[:-1], self.num_bins)
        return ece_from_sums(*wide.scatter_add_(-1, bins.expand_as(sums), sums))


class SlotECE(_SlotMetric):
    """Expected calibration error, equal-width bins."""

    higher_is_better = False

    def compute(self) -> Tensor:
        inner = torch.arange(1, self.num_bins, device=self.edges.device, dtype=torch.float64) / self.num_bins
        lower = torch.cat([self.edges.new_zeros(1), self.edges])  # a group lies in the bin of its lower edge
        return self._ece(self._tables()[:3], torch.bucketize(lower, inner, right=True))


class SlotMassECE(_SlotMetric):
    """Expected calibration error, bins of equally many events, cut between groups."""

    higher_is_better = False

    def compute(self) -> Tensor:
        sums = self._tables()[:3]
        count = sums[0]
        before = count.cumsum(-1) - count
        share = (before + count / 2) / count.sum(-1, keepdim=True).clamp_min(1)
        return self._ece(sums, (share * self.num_bins).long().clamp_max(self.num_bins - 1))


class SlotAUROC(_SlotMetric):
    """Area under the ROC curve, exact up to half the share of pairs that lie in one group."""

    higher_is_better = True

    def compute(self) -> Tensor:
        count, _, positives = self._tables()[:3]
        return auroc_from_counts(positives, count - positives)


class SlotMeanPredicted(_SlotMetric):
    """Mean predicted probability."""

    def compute(self) -> Tensor:
        return self._mean(1)


class SlotMeanObserved(_SlotMetric):
    """Mean observed label: the acceptance rate, or how often the prefix survives."""

    def compute(self) -> Tensor:
        return self._mean(2)


class SlotBrier(_SlotMetric):
    """Mean squared difference between probability and label."""

    higher_is_better = False

    def compute(self) -> Tensor:
        return self._mean(3)


class SlotNLL(_SlotMetric):
    """Mean negative log-likelihood of the label, in nats."""

    higher_is_better = False

    def compute(self) -> Tensor:
        return self._mean(4)


def slot_metrics(num_slots: int, num_domains: int = 0) -> MetricCollection:
    """All of them under the names ece, mass_ece, brier, nll, auroc, predicted, observed; one update serves all."""
    made: dict[str, Metric | MetricCollection] = {
        "ece": SlotECE(num_slots, num_domains),
        "mass_ece": SlotMassECE(num_slots, num_domains),
        "brier": SlotBrier(num_slots, num_domains),
        "nll": SlotNLL(num_slots, num_domains),
        "auroc": SlotAUROC(num_slots, num_domains),
        "predicted": SlotMeanPredicted(num_slots, num_domains),
        "observed": SlotMeanObserved(num_slots, num_domains),
    }
    return MetricCollection(made, compute_groups=[list(made)])
