"""How work is shared out among workers, and what is said where there can be none; no process is started here."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from dspark.contracts import DsparkError, Request, SamplingParams
from dspark.rollouts import workers
from dspark.rollouts.workers import Workers


def requests(groups: list[int]) -> list[Request]:
    return [Request((1, group), SamplingParams(seq_seed=i)) for i, group in enumerate(groups)]


def test_without_ray(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(DsparkError, match=r"it is not installed\. Install it: pip install"):
        Workers(lambda: None, 2, 4, {})


def test_a_cluster_that_is_not_there(monkeypatch):
    """Said at once: Ray itself would knock for minutes."""
    ray = ModuleType("ray")
    ray.__dict__.update(is_initialized=lambda: False, init=None)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(DsparkError, match=r"Ray at RAY_ADDRESS=127\.0\.0\.1:1, but got ConnectionRefusedError"):
        Workers(lambda: None, 2, 4, {}).generate(requests([0, 1]))


@pytest.mark.parametrize(
    ("machines", "count", "threads"),
    [([8], 3, 2), ([8], 8, 1), ([16, 16], 4, 8), ([4, 4], 1, 4), ([2, 2], 3, 1)],
)
def test_threads_of_each_worker(monkeypatch, machines, count, threads):
    monkeypatch.setattr(workers, "_cores", lambda: 8)
    nodes = [{"Alive": True, "Resources": {"CPU": float(cores)}} for cores in machines]
    assert workers._threads(SimpleNamespace(nodes=lambda: nodes), count) == threads


@pytest.mark.parametrize(
    ("groups", "count", "batch", "sizes"),
    [
        ([0, 0, 0, 1, 1, 1, 2, 2, 2], 3, 8, [3, 3, 3]),  # whole groups though a quarter of a share is less
        ([0] * 8, 3, 8, [1] * 8),  # one prompt alone is shared out
        ([0] * 8, 1, 2, [4, 4]),  # never more than two batches
        (list(range(100)), 2, 8, [13] * 7 + [9]),
        ([0, 1], 3, 8, [1, 1]),
        ([], 3, 8, []),
    ],
)
def test_pieces(groups, count, batch, sizes):
    found = workers.pieces(requests(groups), count, batch)
    assert [len(piece.places) for piece in found] == sizes
    assert [place for piece in found for place in piece.places] == list(range(len(groups)))


def test_an_engine_as_an_iterator(fakes):
    asked = [Request((1, i), SamplingParams(seq_seed=i, max_tokens=3)) for i in range(5)]
    found = dict(workers.streamed(fakes.FakeEngine(), asked, 1))
    assert [found[i] for i in range(5)] == [fakes.complete(request) for request in asked]
    with pytest.raises(RuntimeError, match="crash"):
        list(workers.streamed(fakes.FakeEngine(stop_after=2), asked, 1))
