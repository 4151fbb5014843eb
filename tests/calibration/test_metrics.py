"""The streaming classes: chunked updates equal one, constant memory, ranks without data, and the exact numbers."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as multiprocessing

from dspark.calibration import measures
from dspark.calibration.metrics import SlotAUROC, SlotBrier, SlotECE, SlotMeanObserved, SlotMeanPredicted, SlotNLL

CLASSES = [SlotECE, SlotAUROC, SlotBrier, SlotNLL, SlotMeanPredicted, SlotMeanObserved]


def inputs(heads, rounds: int = 500) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    events = heads.synthetic_head(rounds, slots=3)
    return torch.sigmoid(events.confidence_logits).double(), events.labels, events.conditional_observed


def exact(cls: type, p: torch.Tensor, y: torch.Tensor) -> float | None:
    return {
        SlotECE: lambda: measures.ece(p, y, measures.bin_index(p)),
        SlotAUROC: lambda: measures.auroc(p, y),
        SlotBrier: lambda: float(measures.brier(p, y).mean()),
        SlotNLL: lambda: float(measures.nll(p, y).mean()),
        SlotMeanPredicted: lambda: float(p.mean()),
        SlotMeanObserved: lambda: float(y.mean()),
    }[cls]()


@pytest.mark.parametrize("cls", CLASSES)
def test_streamed_equals_offline(heads, cls) -> None:
    p, y, seen = inputs(heads)
    metric = cls(3)
    for part in range(0, 500, 96):
        metric.update(p[part : part + 96], y[part : part + 96], seen[part : part + 96])
    expected = [exact(cls, p[seen[:, k], k], y[seen[:, k], k]) for k in range(3)]
    tolerance = 2e-3 if cls is SlotAUROC else 1e-12  # AUROC is binned
    assert metric.compute().tolist() == pytest.approx(expected, abs=tolerance)


@pytest.mark.filterwarnings("ignore:The ``compute`` method")
@pytest.mark.parametrize("cls", CLASSES)
def test_memory_is_constant_and_reset_forgets(heads, cls) -> None:
    metric = cls(3)
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
    assert metric.sums[0, 0, 0] == 1
    assert metric.sums[0, 0, -1] == 2


@pytest.mark.filterwarnings("ignore:The ``compute`` method")
@pytest.mark.parametrize("cls", CLASSES)
def test_rank_without_data(heads, cls) -> None:
    """Sync over two ranks, one with no update: same shapes (so no hang), and the numbers of the other."""
    alone = cls(3)
    alone.update(*inputs(heads))

    def gather(state: torch.Tensor, group: object = None) -> list[torch.Tensor]:
        assert state.shape == alone.sums.shape
        return [alone.sums.clone(), torch.zeros_like(alone.sums)]

    both = cls(3, dist_sync_fn=gather, distributed_available_fn=lambda: True)
    assert torch.equal(both.compute(), alone.compute())


def _rank(rank: int, store: str, out: str) -> None:
    """Rank 1 has no data. Writes what rank 0 computed after the sync."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    spec = importlib.util.spec_from_file_location("dspark_calibration_heads", Path(__file__).with_name("heads.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    found = []
    for cls in CLASSES:
        metric = cls(3)
        if rank == 0:
            metric.update(*inputs(module))
        found.append(metric.compute())
    if rank == 1:
        torch.save(torch.stack(found), out)
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes(heads, tmp_path) -> None:
    if not torch.distributed.is_available():
        pytest.skip("this torch was built without torch.distributed")
    here = importlib.util.spec_from_file_location("dspark_calibration_test_metrics", __file__)
    module = importlib.util.module_from_spec(here)
    sys.modules[here.name] = module
    here.loader.exec_module(module)
    store, out = str(tmp_path / "store"), tmp_path / "found.pt"
    multiprocessing.start_processes(module._rank, (store, str(out)), nprocs=2, start_method="fork")
    found = torch.load(out, weights_only=True)
    for cls, values in zip(CLASSES, found, strict=True):
        metric = cls(3)
        metric.update(*inputs(heads))
        assert torch.equal(values, metric.compute())
