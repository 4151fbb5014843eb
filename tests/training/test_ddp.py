"""Two processes report and learn what one does: shared data, a rank without data or anchors, uneven validation; and a
killed run goes on."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
RESUMED = {"steps": 8, "budget": 60, "anchors": 4}


@pytest.fixture(scope="module")
def out(runs: Any, shared_data: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both ranks' results of every run; the last run was killed in the middle of its third epoch."""
    folder = tmp_path_factory.mktemp("ddp")
    named = [{"name": name, **shared_data[name]} for name in ("idle", "halves", "short")]
    straight = {**shared_data["halves"], **RESUMED}
    cached = {**shared_data["halves"], "features": {"cache": str(folder / "cache")}}
    killed = {"name": "killed", **straight, "every": 2, "kill_after": 5}
    done = runs.launch("ddp", folder, [*named, {"name": "cached", **cached}, {"name": "straight", **straight}, killed])
    assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]
    return folder


def alone(runs: Any, out: Path, name: str, run: dict[str, Any]) -> dict[str, Any]:
    return runs.outcome(*runs.fit(out / "alone", name, **run))


@pytest.mark.parametrize(("name", "same"), [("idle", "idle"), ("halves", "idle"), ("short", "short whole")])
def test_two_processes_say_what_one_says(
    runs: Any, target: Any, shared_data: dict[str, Any], out: Path, name: str, same: str
) -> None:
    """Each step sees all the data: in one batch, or in two of which each rank has one. Validation has three batches for
    two ranks (halves), so one of them waits with an empty one."""
    first, second = runs.results(out, name)
    one = alone(runs, out, name, shared_data[same])
    runs.agree(one, first)
    assert first["hashes"] == second["hashes"]
    assert first["hashes"] != alone(runs, out, "start", {**shared_data[same], "lr": 1e-12})["hashes"]
    assert 0 < first["metrics"]["val/l1"] <= 2.0
    assert all(0 <= first["metrics"][f"val/acceptance/slot_{k}"] <= 1 for k in (1, 2, 3))


def test_the_ranks_really_shared_the_data(runs: Any, target: Any, shared_data: dict[str, Any], out: Path) -> None:
    """Else the test above would compare a run with itself."""

    def names(result: dict[str, Any]) -> list[set[str]]:
        return [set(filter(None, line.split(" ")[1].split(","))) for line in result["lines"]]

    idle, halves = ([names(r) for r in runs.results(out, name)] for name in ("idle", "halves"))
    assert [len(step) for step in idle[0]] == [12] * 3
    assert [len(step) for step in idle[1]] == [0] * 3
    for mine, other in zip(*halves, strict=True):
        assert len(mine | other) == 12
        assert not mine & other
        assert mine
        assert other
    short = [line.split(" ") for result in runs.results(out, "short") for line in result["lines"]]
    assert all(ids in ("a", "b") and bool(anchors) == (ids == "a") for _, ids, anchors in short)
    assert {ids for _, ids, _ in short} == {"a", "b"}
    plan = shared_data["halves"]
    data = runs.TrajectoryDataModule([plan["train"]], val=[plan["val"]], token_budget=plan["budget"])
    assert len(list(data.val_dataloader())) == 3


def test_ranks_fill_one_cache_and_learn_the_same(runs: Any, out: Path) -> None:
    assert [r["hashes"] for r in runs.results(out, "cached")] == [r["hashes"] for r in runs.results(out, "halves")]
    assert len(list((out / "cache").rglob("*.safetensors"))) == 12 + 17


def test_a_killed_run_goes_on_bit_for_bit(runs: Any, shared_data: dict[str, Any], out: Path) -> None:
    """Killed after step 5, its last checkpoint is of step 4: in the middle of an epoch of three steps."""
    resume = str(out / "killed" / "last.ckpt")
    rest = {"name": "rest", **shared_data["halves"], **RESUMED, "resume": resume}
    done = runs.launch("ddp", out, [rest])
    assert done.returncode == 0, done.stderr[-3000:]
    for straight, resumed in zip(runs.results(out, "straight"), runs.results(out, "rest"), strict=True):
        assert resumed["hashes"] == straight["hashes"]
        assert resumed["lines"] == straight["lines"][4:]
        assert (resumed["steps"], len(resumed["lines"])) == (8, 4)
