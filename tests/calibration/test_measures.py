"""Each number against a plain numpy computation, and against torchmetrics' own where they mean the same."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from dspark.calibration import measures


def data(count: int = 400, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    p = torch.rand(count, generator=generator).double()
    return p, (torch.rand(count, generator=generator).double() < p**2).double()


def numpy_ece(p: np.ndarray, y: np.ndarray, edges: np.ndarray) -> float:
    """Bins [edge_i, edge_i+1), the last closed; written as a loop on purpose."""
    total = 0.0
    for i, (low, high) in enumerate(itertools.pairwise(edges)):
        inside = (p >= low) & ((p < high) | (i == len(edges) - 2))
        if inside.any():
            total += inside.mean() * abs(p[inside].mean() - y[inside].mean())
    return total


def numpy_auroc(p: np.ndarray, y: np.ndarray) -> float:
    positive, negative = p[y == 1][:, None], p[y == 0][None, :]
    return float(((positive > negative) + 0.5 * (positive == negative)).mean())


def test_edges_land_in_the_right_bin() -> None:
    edges = torch.arange(16, dtype=torch.float64) / 15
    assert measures.bin_index(edges).tolist() == [*range(15), 14]
    assert measures.bin_index(torch.tensor([0.0, 1.0])).tolist() == [0, 14]
    assert measures.bin_index(torch.tensor([0.29], dtype=torch.float64), 100).tolist() == [
        29
    ]  # floor(0.29 * 100) is 28
    below = torch.nextafter(edges[1:], torch.zeros(15, dtype=torch.float64))
    assert measures.bin_index(below).tolist() == list(range(15))


@pytest.mark.parametrize("bins", [1, 7, 15])
def test_ece_against_numpy(bins: int) -> None:
    p, y = data()
    p[:3], p[3:6] = 0.0, 1.0
    expected = numpy_ece(p.numpy(), y.numpy(), np.arange(bins + 1) / bins)
    assert measures.ece(p, y, measures.bin_index(p, bins)) == pytest.approx(expected, abs=1e-12)


def test_equal_mass_ece_against_numpy() -> None:
    p, y = data(300)
    ordered = np.sort(p.numpy())
    edges = np.array([0.0, *ordered[[i * 300 // 15 for i in range(1, 15)]], 1.0])
    expected = numpy_ece(p.numpy(), y.numpy(), edges)
    bins = measures.mass_bin_index(p)
    assert measures.ece(p, y, bins) == pytest.approx(expected, abs=1e-12)
    assert bins.bincount().tolist() == [20] * 15


def test_equal_mass_bins_never_part_equal_values() -> None:
    p = torch.tensor([0.1] * 30 + [0.2] * 3 + [0.9])
    bins = measures.mass_bin_index(p, 5)
    assert bins[:30].unique().numel() == 1
    assert (bins.diff() >= 0).all()


def test_brier_nll_auroc_against_numpy() -> None:
    p, y = data()
    p[:20] = p[20:40]  # ties across labels
    a, b = p.numpy(), y.numpy()
    assert float(measures.brier(p, y).mean()) == pytest.approx(((a - b) ** 2).mean(), abs=1e-12)
    expected = -np.where(b == 1, np.log(a), np.log1p(-a)).mean()
    assert float(measures.nll(p, y).mean()) == pytest.approx(expected, abs=1e-12)
    assert measures.auroc(p, y) == pytest.approx(numpy_auroc(a, b), abs=1e-12)


def test_nll_at_the_ends_is_large_and_finite() -> None:
    p, y = torch.tensor([0.0, 1.0, 0.0, 1.0]), torch.tensor([1.0, 0.0, 0.0, 1.0])
    assert measures.nll(p, y).tolist() == pytest.approx([16.118, 16.118, 0.0, 0.0], abs=1e-3)
    soft = measures.nll(torch.tensor([0.25]), torch.tensor([0.5]))
    assert float(soft) == pytest.approx(-(0.5 * math.log(0.25) + 0.5 * math.log(0.75)))


def test_no_data_is_none() -> None:
    nothing = torch.empty(0)
    assert measures.ece(nothing, nothing, measures.bin_index(nothing)) is None
    assert measures.ece_noise(nothing, measures.bin_index(nothing)) is None
    assert measures.auroc(nothing, nothing) is None
    assert measures.auroc(torch.rand(5), torch.ones(5)) is None
    assert measures.mass_bin_index(nothing).tolist() == []


def test_noise_is_what_a_perfect_calibration_shows() -> None:
    p, _ = data(2000)
    bins = measures.bin_index(p)
    generator = torch.Generator().manual_seed(5)
    shown = []
    for _ in range(400):
        y = (torch.rand(len(p), generator=generator) < p).double()
        shown.append(measures.ece(p, y, bins))
    mean, deviation = measures.ece_noise(p, bins)
    assert mean == pytest.approx(np.mean(shown), rel=0.03)
    assert deviation == pytest.approx(np.std(shown), rel=0.12)


def test_slot_sums_reads_the_observed_only() -> None:
    p = torch.tensor([[0.2, 0.7], [0.3, float("nan")]], dtype=torch.float64)
    y, seen = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[True, True], [True, False]])
    sums = measures.slot_sums(p, y, seen, 2)
    assert sums.tolist() == [[[2, 0], [0, 1]], [[0.5, 0], [0, 0.7]], [[1, 0], [0, 0]]]


def test_against_torchmetrics() -> None:
    functional = pytest.importorskip("torchmetrics.functional.classification")
    p, y = data(1000)
    theirs = functional.binary_calibration_error(p, y.long(), n_bins=15, norm="l1")
    assert measures.ece(p, y, measures.bin_index(p)) == pytest.approx(float(theirs), abs=1e-6)
    assert measures.auroc(p, y) == pytest.approx(float(functional.binary_auroc(p, y.long())), abs=1e-6)
