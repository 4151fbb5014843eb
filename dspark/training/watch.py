"""What validation and test say of a confidence head as it is: both laws' metrics, per slot and domain, streamed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchmetrics import MetricCollection

from dspark import probability
from dspark.calibration.metrics import slot_metrics
from dspark.contracts import DsparkError
from dspark.training.labels import observed_events

LAWS = ("survival", "conditional")


class Watch(nn.Module):
    """Metrics of K slots over the rounds of one split. domains: every name in it, in the same order on every rank."""

    def __init__(self, slots: int, domains: Sequence[str]):
        super().__init__()
        self.domains = tuple(domains)
        self.laws = nn.ModuleDict({law: slot_metrics(slots, len(self.domains)) for law in LAWS})

    def update(
        self, rates: Tensor, labels: Tensor, observed: Tensor, accepted: Tensor, verified: Tensor, domain: Sequence[str]
    ) -> None:
        """B rounds: rates, labels, observed [B,K]; accepted, verified [B] counts; B domain names.

        The conditional law is judged on the labels, those the head learns from; the survival on what the verifier did.
        A round of which nothing is observed counts in neither.
        """
        if not bool(torch.isfinite(rates).all()):
            raise DsparkError(
                "confidence: expected finite confidences, but the head says NaN: it diverged. Lower optimizer.lr."
            )
        where = torch.tensor([self.domains.index(name) for name in domain], dtype=torch.int64)
        self._law("conditional").update(rates, labels, observed, where)
        slots = rates.shape[1]
        happened, _ = observed_events(verified, accepted, slots)
        seen = (torch.arange(slots) < verified[:, None]) & observed.any(dim=-1, keepdim=True)
        self._law("survival").update(probability.survival(rates), happened, seen, where)

    def told(self) -> dict[str, Tensor]:
        """LAW/METRIC: the mean over slots; below it a slot's own value and, of several domains, each one's mean."""
        found: dict[str, Tensor] = {}
        for law in LAWS:
            for name, values in self._law(law).compute().items():
                by_domain = values.reshape(len(self.domains) + 1, -1)  # torchmetrics squeezes a single value
                parts = {f"/slot_{k}": value for k, value in enumerate(by_domain[-1], start=1)}
                if len(self.domains) > 1:
                    parts |= {f"/{d}": v for d, v in zip(self.domains, by_domain[:-1].nanmean(-1), strict=True)}
                found |= {f"{law}/{name}{part}": v for part, v in {"": by_domain[-1].nanmean(), **parts}.items()}
        return found

    def _law(self, law: str) -> MetricCollection:
        metrics = self.laws[law]
        assert isinstance(metrics, MetricCollection)
        return metrics
