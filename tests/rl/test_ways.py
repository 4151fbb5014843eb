"""Timing every way to draft beside an RL run: the run is the same without it, and what is compared is checked."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import LightningModule, Trainer

from dspark.bench import rl_ways
from dspark.bench.rl_ways import ALL, TimedWays
from dspark.contracts import DsparkError
from dspark.rollouts.store import read_trajectories
from dspark.runner.curve import CapacityCurve

pytestmark = pytest.mark.usefixtures("one_thread")


def test_every_way_beside_a_run_that_it_does_not_touch(
    tiny_rl: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    drafter = tiny_rl.make_drafter(tmp_path / "drafter")
    curve = CapacityCurve((1, 64), (1.0, 1.5), (1, 8), (0.1, 0.1))
    timed = TimedWays(batches=[1, 4], lookup=3)
    timed.curve = curve
    given = {"rollout": {"drafter": drafter}, "follow": {"steps": 1}}
    run = tiny_rl.run(tmp_path / "timed", 4, callbacks=(timed,), **given)
    alone = tiny_rl.run(tmp_path / "alone", 4, **given)
    assert tiny_rl.weights_hash(run) == tiny_rl.weights_hash(alone)
    assert tiny_rl.shard_hashes(tmp_path / "timed") == tiny_rl.shard_hashes(tmp_path / "alone")

    rows = json.loads((tmp_path / "timed" / "ways.json").read_text())
    assert [(row["batch"], row["way"]) for row in rows] == [(size, way.name) for size in (1, 4) for way in ALL]
    samples = sum(len(read_trajectories(folder)) for folder in (tmp_path / "timed" / "rollouts").glob("0*"))
    assert {(row["wrong"], row["sequences"]) for row in rows} == {(0, samples)}
    for row in rows:
        assert row["worst"] <= row["ratio"] <= row["best"]
        assert (row["tau"] == 1.0 == row["ratio"]) == (row["way"] == "plain")
        drafted = (row["verified"], row["accepted"], row["rejected"])
        assert all(drafted) if row["way"] in ("learned", "lookup") else any(drafted) or row["way"] != "both"
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith(("batch", "generating"))]
    assert len(told) == len(rows) + 1
    assert max(map(len, told)) <= 80


def test_without_the_parts_there_is_no_such_way() -> None:
    assert [way.name for way in TimedWays(lookup=0).ways(learned=False)] == ["plain"]
    assert [way.name for way in TimedWays().ways(learned=True)] == ["plain", "learned", "lookup"]


def test_another_module_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DsparkError, match="expected the PolicyModule of an RL recipe in one process"):
        TimedWays().on_train_batch_start(Trainer(default_root_dir=tmp_path, logger=False), LightningModule(), [], 0)


def test_a_way_that_differs_is_counted(tiny_rl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that drafts and samples with other seeds."""
    whole = TimedWays._engine

    def other(self: TimedWays, module: Any, size: int, way: rl_ways.Way) -> Any:
        engine = whole(self, module, size, way)
        if way.looked_up:
            begin = engine.begin
            engine.begin = lambda requests: begin(
                [replace(r, params=r.params.with_seed((r.params.seq_seed or 0) + 1)) for r in requests]
            )
        return engine

    monkeypatch.setattr(TimedWays, "_engine", other)
    timed = TimedWays(batches=[2], lookup=3)
    tiny_rl.run(tmp_path, 1, callbacks=(timed,))
    assert [row.wrong > 0 for row in timed.rows()] == [False, True]
