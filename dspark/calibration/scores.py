"""The report's numbers as flat rows: one per estimator, law, domain and slot.

Estimators: the head before and after calibration, and by the other methods of calibration; the draft's own largest
probability, as it is and calibrated as the head is; the position prior (mean acceptance per slot on the calibration
split). Laws: "conditional" (slot k given all before it) and "cumulative" (the prefix survives). Domains: each, and
"all". Slots: 1 ... K (readers count from 1), "mean" (over slots with data) and "pooled" (all slots' events together:
the only place where a position prior can rank).
Left out on purpose: rendering (figures.py, html.py, text.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from dspark.calibration import bootstrap
from dspark.calibration.events import Events
from dspark.calibration.fitting import fit
from dspark.calibration.measures import auroc, bin_index, brier, ece, ece_noise, mass_bin_index, nll, slot_sums
from dspark.calibration.record import METHODS, Calibration
from dspark.slot_maps import SlotMap, identity, rates

METRICS = ("ece", "brier", "nll", "auroc", "mean_predicted", "mean_observed")
LAWS = ("cumulative", "conditional")
ESTIMATORS = {
    "head": "head, before",
    "head_calibrated": "head, calibrated",
    "head_temperature": "head, temperatures",
    "head_platt": "head, Platt",
    "head_isotonic": "head, isotonic",
    "draft_max_probability": "draft's max-probability",
    "draft_max_probability_calibrated": "max-prob., calibrated",
    "position_prior": "position prior",
}


@dataclass(frozen=True)
class Law:
    """One law's probabilities [M, K] fp64, and which of them were observed [M, K] bool."""

    name: str
    probabilities: Tensor
    observed: Tensor


def position_prior(events: Events) -> Tensor:
    """Mean conditional acceptance per slot, [K] fp64; a slot without data is 0.5."""
    seen = events.conditional_observed
    accepted, count = (events.labels * seen).sum(0), seen.sum(0)
    return torch.where(count > 0, accepted / count.clamp(min=1), 0.5)


@dataclass(frozen=True)
class Learned:
    """What the estimators beside the head learned on the split that its calibration was fitted on; empty: nothing.

    prior [K]: the position prior. others: the head's maps by the other methods. maximum: maps of the draft's largest
    probability, by the head's own method; empty where it was not recorded.
    """

    prior: Tensor | None = None
    others: Mapping[str, Sequence[SlotMap]] = field(default_factory=dict)
    maximum: Sequence[SlotMap] = ()

    @staticmethod
    def on(events: Events, calibration: Calibration) -> Learned:
        """From the calibration split."""
        others = {m: fit(events, "", m).maps for m in METHODS if m != calibration.method}
        baseline = _of_maximum(events)
        maximum = fit(baseline, "", calibration.method).maps if baseline else ()
        return Learned(position_prior(events), others, maximum)


def _of_maximum(events: Events) -> Events | None:
    """The same rounds as if the draft's largest probability were the head's; None where it was not recorded."""
    if events.draft_max_prob is None:
        return None
    return replace(events, confidence_logits=torch.logit(events.draft_max_prob.double(), eps=1e-7))


def estimators(events: Events, calibration: Calibration, learned: Learned) -> dict[str, Tensor]:
    """Conditional acceptance probabilities [M, K] fp64 per estimator that can be had."""
    logits, baseline = events.confidence_logits.double(), _of_maximum(events)
    found = {"head": rates(logits, identity(events.num_slots)), "head_calibrated": rates(logits, calibration.maps)}
    found |= {f"head_{method}": rates(logits, maps) for method, maps in learned.others.items()}
    if events.draft_max_prob is not None:
        found["draft_max_probability"] = events.draft_max_prob.double()
    if baseline is not None and learned.maximum:
        found["draft_max_probability_calibrated"] = rates(baseline.confidence_logits.double(), learned.maximum)
    if learned.prior is not None:
        found["position_prior"] = learned.prior.expand(events.num_events, -1).double()
    return found


def laws(events: Events, conditional: Tensor) -> tuple[Law, Law]:
    """Both laws of one estimator, in LAWS' order."""
    cumulative = Law("cumulative", conditional.cumprod(1), events.cumulative_observed)
    return cumulative, Law("conditional", conditional, events.conditional_observed)


def score(probabilities: Tensor, labels: Tensor) -> dict[str, Any]:
    """All metrics of M events, None where there is no data. ece_noise: what a perfect calibration would show."""
    if not len(labels):
        return {"events": 0, **dict.fromkeys((*METRICS, "ece_equal_mass", "ece_noise"))}
    p, bins = probabilities, bin_index(probabilities)
    noise = ece_noise(p, bins)
    return {
        "events": len(labels),
        "ece": ece(p, labels, bins),
        "brier": float(brier(p, labels).mean()),
        "nll": float(nll(p, labels).mean()),
        "auroc": auroc(p, labels),
        "mean_predicted": float(p.mean()),
        "mean_observed": float(labels.mean()),
        "ece_equal_mass": ece(p, labels, mass_bin_index(p)),
        "ece_noise": None if noise is None else noise[0],
    }


def score_rows(
    events: Events, calibration: Calibration, learned: Learned, replicates: int = bootstrap.REPLICATES, key: int = 0
) -> list[dict[str, Any]]:
    """Every row of the report: keys estimator, law, domain, slot, events, the metrics, and `interval` per metric."""
    parts = events.by_domain()
    return [
        row
        for name, part in parts
        for row in rows_of(name, part, estimators(part, calibration, learned), replicates, key)
    ]


def rows_of(
    domain: str, events: Events, judged: Mapping[str, Tensor], replicates: int, key: int
) -> list[dict[str, Any]]:
    """The rows of one domain's events. judged: conditional probabilities [M, K] fp64 per estimator."""
    num_clusters, cluster = clusters(events)
    weights = bootstrap.resample_weights(num_clusters, replicates, key) if num_clusters > 1 else None
    rows = []
    for estimator, conditional in judged.items():
        for law in laws(events, conditional):
            head = {"estimator": estimator, "law": law.name, "domain": domain}
            rows += [{**head, **row} for row in _law_rows(events, law, cluster, weights)]
    return rows


def reliability(events: Events, calibration: Calibration) -> dict[str, dict[str, list[Any]]]:
    """Per law and head estimator, [3][K][bins]: events, sum of predictions, sum of labels; what the diagrams draw."""
    result: dict[str, dict[str, list[Any]]] = {law: {} for law in LAWS}
    for estimator, conditional in estimators(events, calibration, Learned()).items():
        for law in laws(events, conditional):
            result[law.name][estimator] = slot_sums(law.probabilities, events.labels, law.observed).tolist()
    return result


def clusters(events: Events) -> tuple[int, Tensor]:
    """Number of clusters and the cluster of each round [M]: its conversation, or a fixed group of conversations of its
    domain."""
    pairs = list(zip(events.domain, events.conversation, strict=True))
    distinct = dict.fromkeys(pairs)
    most = max(1, bootstrap.MAX_CLUSTERS // len(set(events.domain))) if len(distinct) > bootstrap.MAX_CLUSTERS else None
    numbers: dict[Any, int] = {}
    of, seen = {}, Counter[str]()
    for domain, conversation in distinct:
        group = seen[domain] if most is None else seen[domain] % most
        seen[domain] += 1
        of[domain, conversation] = numbers.setdefault((domain, group), len(numbers))
    return len(numbers), torch.tensor([of[pair] for pair in pairs])


def _law_rows(events: Events, law: Law, cluster: Tensor, weights: Tensor | None) -> Iterator[dict[str, Any]]:
    labels, slots = events.labels, range(events.num_slots)
    by_slot = [score(law.probabilities[law.observed[:, k], k], labels[law.observed[:, k], k]) for k in slots]
    pooled = score(law.probabilities[law.observed], labels[law.observed])
    mean = {m: _mean([row[m] for row in by_slot]) for m in by_slot[0]} | {"events": pooled["events"]}
    points = [*by_slot, mean, pooled]
    names = [*(k + 1 for k in slots), "mean", "pooled"]
    samples = None if weights is None else _samples(law, labels, cluster, weights)
    for column, (name, point) in enumerate(zip(names, points, strict=True)):
        spans = {
            m: None if samples is None else bootstrap.interval(point[m], samples[m][:, column], pivotal=m == "ece")
            for m in METRICS
        }
        yield {"slot": name, **point, "interval": spans}


def _samples(law: Law, labels: Tensor, cluster: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Metric -> replicates [R, K + 2]: slots, their mean, pooled."""
    by_slot = bootstrap.replicate_scores(law.probabilities, labels, law.observed, cluster, weights)
    p, y, seen = (t.reshape(-1, 1) for t in (law.probabilities, labels, law.observed))
    pooled = bootstrap.replicate_scores(p, y, seen, cluster.repeat_interleave(labels.shape[1]), weights)
    return {m: torch.cat([s, s.nanmean(1, keepdim=True), pooled[m]], dim=1) for m, s in by_slot.items()}


def _mean(values: list[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None
