"""The whole loop, small, on the embedded target: every stage runs, a second run skips them all, bits are equal."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from dspark.cli import main

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_quick_demo_runs_and_then_skips(tmp_path: Path, monkeypatch, capsys) -> None:
    for name in ("recipes", "data"):
        shutil.copytree(ROOT / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "--quick", "--quiet", "--json"]) == 0
    results = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert results["replay"]["checked"] > 0
    assert results["replay"]["differing_bits"] == 0
    for name in ("greedy", "recommended", "hot"):
        run = results["measured"][name]
        assert run["differing"] == 0
        assert min(run["drafted"], run["accepted"], run["rejected"]) > 0, "inconclusive"
    assert main(["demo", "--quick", "--quiet"]) == 0
    captured = capsys.readouterr()
    assert captured.err.count("there already") == 11
    assert "bits differ" in captured.out
    assert all(len(line) <= 80 for line in captured.out.splitlines())
    folder = "runs/demo/rollouts"
    assert main(["replay", folder, "--sample", "2", "--drafter", "", "--quiet"]) == 0
    assert list((tmp_path / "tb_logs").iterdir()), "TensorBoard logs"


def test_demo_away_from_the_recipes_is_one_error(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["demo"]) == 2
    error = capsys.readouterr().err
    assert "recipes/prepare.yaml is missing" in error
    assert "Traceback" not in error
