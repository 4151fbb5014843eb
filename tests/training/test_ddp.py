"""Two processes, one without a single anchor, finish and report what one process reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def run(ranks: int, data_dir: Path, out: Path) -> dict[str, float]:
    worker = Path(__file__).with_name("ddp_worker.py")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(worker), str(ranks), str(data_dir), str(out)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


@pytest.mark.slow
def test_a_rank_without_anchors_finishes_and_metrics_agree(data_dir: Path, tmp_path: Path) -> None:
    one, two = (run(ranks, data_dir, tmp_path / f"{ranks}.json") for ranks in (1, 2))
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert two[name] == pytest.approx(value, rel=1e-5), name
    assert two["val/l1"] <= 2.0
    weights = [(tmp_path / f"2.json.rank{rank}").read_text() for rank in (0, 1)]
    assert weights[0] == weights[1]  # the second rank has no data: its start must have come from the first
