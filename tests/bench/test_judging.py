"""The cost of judging: counted right, constant memory, and nothing wrong is timed."""

from __future__ import annotations

import json

import pytest
import torch

from dspark.bench import judging
from dspark.cli import main
from dspark.contracts import DsparkError


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "ROUNDS", 5000)
    monkeypatch.setattr(judging, "FIT_ROUNDS", 300)


def test_figures() -> None:
    found = judging.bench_judging(events=100_000)
    assert found.events == 3 * 5000 * judging.SLOTS
    assert found.rate == found.events / found.seconds > 0
    assert 0 < found.state_mib < 2
    assert found.fits.keys() == {"temperature", "platt", "isotonic"}
    assert all(seconds > 0 for seconds in found.fits.values())


def test_wrong_metrics_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging.measures, "auroc", lambda p, y: 0.25)
    with pytest.raises(DsparkError, match="streamed auroc of slot 1"):
        judging.bench_judging(events=1)


def test_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    bench = judging.bench_judging
    monkeypatch.setattr(judging, "bench_judging", lambda on_batch: bench(100_000, on_batch))
    threads = torch.get_num_threads()
    assert main(["bench", "metrics", "--quiet"]) == 0
    assert "million per second" in capsys.readouterr().out
    assert main(["bench", "metrics", "--quiet", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["events"] == 105_000
    assert torch.get_num_threads() == threads
