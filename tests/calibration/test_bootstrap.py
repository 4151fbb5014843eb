"""Intervals: keyed, by conversation, and about as wide as they should be."""

from __future__ import annotations

import pytest
import torch

from dspark.calibration import bootstrap, measures


def test_weights_are_a_function_of_the_key() -> None:
    weights = bootstrap.resample_weights(30, 50, key=4)
    assert torch.equal(weights, bootstrap.resample_weights(30, 50, key=4))
    assert not torch.equal(weights, bootstrap.resample_weights(30, 50, key=5))
    assert (weights.sum(1) == 30).all()


def test_unit_weights_give_the_point_values(heads) -> None:
    events = heads.synthetic_head(60)  # at most 64 events a slot: the AUROC's groups are single events
    p, y, seen = torch.sigmoid(events.confidence_logits).double(), events.labels, events.cumulative_observed
    cluster = torch.arange(60) % 7
    found = bootstrap.replicate_scores(p, y, seen, cluster, torch.ones(1, 7, dtype=torch.float64))
    for k in range(3):
        assert float(found["ece"][0, k]) == pytest.approx(measures.ece(p[:, k], y[:, k], measures.bin_index(p[:, k])))
        assert float(found["auroc"][0, k]) == pytest.approx(measures.auroc(p[:, k], y[:, k]))
        assert float(found["nll"][0, k]) == pytest.approx(float(measures.nll(p[:, k], y[:, k]).mean()))
        assert float(found["brier"][0, k]) == pytest.approx(float(measures.brier(p[:, k], y[:, k]).mean()))
        assert float(found["mean_observed"][0, k]) == pytest.approx(float(y[:, k].mean()))


def test_interval_of_a_mean_is_the_textbook_one() -> None:
    generator = torch.Generator().manual_seed(3)
    y = (torch.rand(900, 1, generator=generator) < 0.3).double()
    p, seen = torch.full((900, 1), 0.3, dtype=torch.float64), torch.ones(900, 1, dtype=torch.bool)
    weights = bootstrap.resample_weights(900, 1000)
    found = bootstrap.replicate_scores(p, y, seen, torch.arange(900), weights)["mean_observed"][:, 0]
    low, high = bootstrap.interval(float(y.mean()), found)
    assert high - low == pytest.approx(2 * 1.96 * (0.3 * 0.7 / 900) ** 0.5, rel=0.1)


def test_conversations_widen_an_interval() -> None:
    """Rounds of a conversation that all agree carry the information of one round."""
    y = (torch.arange(40) % 2).double().repeat_interleave(20)[:, None]
    p, seen = torch.full((800, 1), 0.5, dtype=torch.float64), torch.ones(800, 1, dtype=torch.bool)

    def width(clusters: int, cluster: torch.Tensor) -> float:
        weights = bootstrap.resample_weights(clusters, 400)
        found = bootstrap.replicate_scores(p, y, seen, cluster, weights)["mean_observed"][:, 0]
        low, high = bootstrap.interval(0.5, found)
        return high - low

    assert width(40, torch.arange(800) // 20) > 3 * width(800, torch.arange(800))


def test_interval_without_data() -> None:
    nan = torch.full((100,), float("nan"))
    assert bootstrap.interval(None, torch.rand(100)) is None
    assert bootstrap.interval(0.5, nan) is None


def test_pivotal_interval_holds_the_point_and_stays_above_zero() -> None:
    low, high = bootstrap.interval(0.01, torch.linspace(0.02, 0.05, 100), pivotal=True)
    assert low == 0.0
    assert high == 0.01
