"""The streaming classes: chunked updates equal one, domains, constant memory, ranks without data, and the numbers that
plain numpy and torchmetrics' own classes give."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing as multiprocessing
from torchmetrics.classification import BinaryAUROC, BinaryCalibrationError

from dspark.calibration.metrics import (
    SlotAUROC,
    SlotBrier,
    SlotECE,
    SlotMassECE,
    SlotMeanObserved,
    SlotMeanPredicted,
    SlotNLL,
    slot_metrics,
)
from dspark.contracts import DsparkError

CLASSES = [SlotECE, SlotMassECE, SlotAUROC, SlotBrier, SlotNLL, SlotMeanPredicted, SlotMeanObserved]
SLOTS, DOMAINS = 3, 3


def inputs(heads: ModuleType, rounds: int = 600) -> tuple[torch.Tensor, ...]:
    """Probabilities, labels, observed and domain."""
    events = heads.synthetic_head(rounds, slots=SLOTS)
    domain = torch.tensor([heads.DOMAINS.index(name) for name in events.domain])
    return torch.sigmoid(events.confidence_logits).double(), events.labels, events.conditional_observed, domain


def plainly(cls: type, p: np.ndarray, y: np.ndarray) -> float:
    """The metric of one slot in plain numpy, events in a loop where that is plainest."""
    if cls is SlotAUROC:
        pairs = [(a > b) + 0.5 * (a == b) for a in p[y == 1] for b in p[y == 0]]
        return float(np.mean(pairs))
    if cls is SlotECE:
        places = [min(int(np.floor(v * 15 + 1e-12)), 14) for v in p]
    if cls is SlotMassECE:
        places = [rank * 15 // len(p) for rank in np.argsort(np.argsort(p, kind="stable"))]
    if cls in (SlotECE, SlotMassECE):
        bins = [[i for i, at in enumerate(places) if at == place] for place in range(15)]
        return float(sum(abs(p[b].sum() - y[b].sum()) for b in bins) / len(p))
    values = {
        SlotBrier: (p - y) ** 2,
        SlotNLL: -np.log(np.where(y == 1, p, 1 - p)),
        SlotMeanPredicted: p,
        SlotMeanObserved: y,
    }
    return float(values[cls].mean())


@pytest.mark.parametrize("cls", CLASSES)
def test_streamed_equals_plain_numpy(heads: ModuleType, cls: type) -> None:
    p, y, seen, domain = inputs(heads)
    metric, by_domain = cls(SLOTS), cls(SLOTS, DOMAINS)
    for part in range(0, 600, 96):
        chunk = slice(part, part + 96)
        metric.update(p[chunk], y[chunk], seen[chunk])
        by_domain.update(p[chunk], y[chunk], seen[chunk], domain[chunk])
    masks = [*(domain == d for d in range(DOMAINS)), torch.ones(600, dtype=torch.bool)]
    expected = torch.tensor([
        [plainly(cls, p[seen[:, k] & mask, k].numpy(), y[seen[:, k] & mask, k].numpy()) for k in range(SLOTS)]
        for mask in masks
    ], dtype=torch.float64)  # fmt: skip
    # AUROC's pairs within a group count half; equal-mass bins are cut between groups.
    tolerance = {SlotAUROC: 2e-3, SlotMassECE: 0.02}.get(cls, 1e-12)
    found = by_domain.compute()
    assert found.shape == (DOMAINS + 1, SLOTS)
    torch.testing.assert_close(found[-1], metric.compute(), rtol=0, atol=1e-12)
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize(("cls", "theirs"), [(SlotECE, BinaryCalibrationError(n_bins=15)), (SlotAUROC, BinaryAUROC())])
def test_torchmetrics_says_the_same(heads: ModuleType, cls: type, theirs: Any) -> None:
    p, y, seen, _ = inputs(heads)
    metric = cls(SLOTS)
    metric.update(p, y, seen)
    for slot, found in enumerate(metric.compute()):
        mine = seen[:, slot]
        theirs.reset()
        theirs.update(p[mine, slot], y[mine, slot].long())
        assert found.item() == pytest.approx(theirs.compute().item(), abs=2e-3 if cls is SlotAUROC else 1e-6)


def test_mass_bins_are_those_of_equal_numbers() -> None:
    """3000 events: 2000 at 0.2 of which half happen, 1000 spread evenly and right: the gap is the heap's alone."""
    spread = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    p = torch.cat([torch.full((2000,), 0.2, dtype=torch.float64), spread])[:, None]
    y = torch.cat([(torch.arange(2000) % 2).double(), spread])[:, None]
    metric = SlotMassECE(1)
    metric.update(p, y, torch.ones_like(p, dtype=torch.bool))
    assert metric.compute().item() == pytest.approx(2000 / 3000 * 0.3, abs=1e-3)


def test_a_collection_updates_one_state(heads: ModuleType) -> None:
    """Seven metrics, one state: the memory of one, and each says what it says alone."""
    together = slot_metrics(SLOTS, DOMAINS)
    together.update(*inputs(heads))
    together.update(*inputs(heads))
    states = {metric.sums.data_ptr() for metric in together.values(copy_state=False)}
    assert len(states) == 1
    kinds = dict(zip(["ece", "mass_ece", "auroc", "brier", "nll", "predicted", "observed"], CLASSES, strict=True))
    found = together.compute()
    assert found.keys() == kinds.keys()
    for name, cls in kinds.items():
        alone = cls(SLOTS, DOMAINS)
        for _ in range(2):
            alone.update(*inputs(heads))
        assert torch.equal(found[name], alone.compute()), name


@pytest.mark.filterwarnings("ignore:The ``compute`` method")
@pytest.mark.parametrize("cls", CLASSES)
def test_memory_is_constant_and_reset_forgets(heads: ModuleType, cls: type) -> None:
    metric = cls(SLOTS, DOMAINS)
    before = metric.sums.shape
    metric.update(*inputs(heads))
    assert metric.sums.shape == before
    assert metric.sums.dtype == torch.float64
    metric.reset()
    assert metric.compute().isnan().all()


def test_saturated_confidences_have_a_bin() -> None:
    metric, p = SlotECE(1), torch.tensor([[0.0], [1.0], [torch.sigmoid(torch.tensor(40.0)).item()]])
    metric.update(p, torch.tensor([[0.0], [1.0], [1.0]]), torch.ones(3, 1, dtype=torch.bool))
    assert metric.compute().item() == 0.0
    assert metric.sums[0, 0, 0, 0] == 1
    assert metric.sums[0, 0, 0, -1] == 2
    metric.update(torch.ones(1, 1), torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool))
    assert metric.compute().item() == 0.25  # the miss at 1 shares the last bin with the two hits


def test_what_was_not_observed_is_not_read() -> None:
    metric = SlotNLL(2)
    metric.update(torch.tensor([[0.5, float("nan")]]), torch.tensor([[1.0, 0.0]]), torch.tensor([[True, False]]))
    assert metric.compute()[0].item() == pytest.approx(np.log(2))
    assert metric.compute()[1].isnan()


def test_domains_that_do_not_fit_are_refused() -> None:
    one, two = torch.full((1, 1), 0.5), torch.tensor([2])
    with pytest.raises(DsparkError, match="domains below 2, but got 2"):
        SlotECE(1, 2).update(one, one, one.bool(), two)
    with pytest.raises(DsparkError, match="Set num_domains"):
        SlotECE(1).update(one, one, one.bool(), two)
    with pytest.raises(DsparkError, match="no domain"):
        SlotECE(1, 2).update(one, one, one.bool())
    for bad in (torch.tensor([0, 1]), torch.tensor([0.0]), torch.tensor(0)):
        with pytest.raises(DsparkError, match="an int64 domain per round"):
            SlotECE(1, 2).update(one, one, one.bool(), bad)


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.half, torch.float32])
def test_a_module_cast_to_less_counts_on(heads: ModuleType, cast: torch.dtype) -> None:
    """bf16 cannot count past 256, and would move the bins' edges."""
    alone, module = slot_metrics(SLOTS, DOMAINS), torch.nn.Module()
    module.metrics = slot_metrics(SLOTS, DOMAINS)
    module.metrics.update(*inputs(heads))
    alone.update(*inputs(heads))
    module.to(cast)
    module.metrics.update(*inputs(heads))
    alone.update(*inputs(heads))
    for name, value in module.metrics.compute().items():
        assert torch.equal(value, alone.compute()[name]), name
    module.metrics.reset()
    assert module.metrics["ece"].sums.dtype == torch.float64


def test_what_is_no_probability_of_these_slots_is_refused() -> None:
    """Four slots given to seven would be counted somewhere; logits would be averaged as probabilities."""
    metric, p = SlotMeanPredicted(2), torch.full((3, 2), 0.5)
    seen = torch.ones(3, 2, dtype=torch.bool)
    for bad in ((p[:, :1], p, seen), (p, p[:, :1], seen), (p, p, seen[:2]), (p.flatten(), p, seen)):
        with pytest.raises(DsparkError, match=r"\[rounds, 2\]"):
            metric.update(*bad)
    with pytest.raises(DsparkError, match="want a sigmoid"):
        metric.update(p * 4, p, seen)
    with pytest.raises(DsparkError, match="labels in"):
        metric.update(p, p * float("nan"), seen)
    with pytest.raises(DsparkError, match="to be bool"):
        metric.update(p, p, seen.long())
    assert metric.sums.sum() == 0


@pytest.mark.filterwarnings("ignore:The ``compute`` method")
@pytest.mark.parametrize("cls", CLASSES)
def test_rank_without_data(heads: ModuleType, cls: type) -> None:
    """Sync over two ranks, one with no update: same shapes (so no hang), and the numbers of the other."""
    alone = cls(SLOTS, DOMAINS)
    alone.update(*inputs(heads))

    def gather(state: torch.Tensor, group: object = None) -> list[torch.Tensor]:
        assert state.shape == alone.sums.shape
        return [alone.sums.clone(), torch.zeros_like(alone.sums)]

    both = cls(SLOTS, DOMAINS, dist_sync_fn=gather, distributed_available_fn=lambda: True)
    assert torch.equal(both.compute(), alone.compute())


def _rank(rank: int, store: str, out: str) -> None:
    """Rank 1 has no data. Writes what rank 1 computed after the sync."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    spec = importlib.util.spec_from_file_location("dspark_calibration_heads", Path(__file__).with_name("heads.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    together = slot_metrics(SLOTS, DOMAINS)
    if rank == 0:
        together.update(*inputs(module))
    found = together.compute()
    if rank == 1:
        torch.save(found, out)
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes(heads: ModuleType, tmp_path: Path) -> None:
    if not torch.distributed.is_available():
        pytest.skip("this torch was built without torch.distributed")
    here = importlib.util.spec_from_file_location("dspark_calibration_test_metrics", __file__)
    assert here is not None
    assert here.loader is not None
    module = importlib.util.module_from_spec(here)
    sys.modules[here.name] = module
    here.loader.exec_module(module)
    store, out = str(tmp_path / "store"), tmp_path / "found.pt"
    multiprocessing.start_processes(module._rank, (store, str(out)), nprocs=2, start_method="fork")
    found = torch.load(out, weights_only=True)
    together = slot_metrics(SLOTS, DOMAINS)
    together.update(*inputs(heads))
    for name, values in together.compute().items():
        assert torch.equal(values, found[name]), name
