"""Workers on a Ray that is started here: the bytes of a run without them, whoever dies, and errors a user can read."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dspark.contracts import DsparkError
from dspark.rollouts import workers
from dspark.rollouts.journal import JOURNAL_NAME
from dspark.rollouts.manifest import read_manifest

ray: Any = pytest.importorskip("ray", reason="Ray is not installed (pip install 'dspark[ray]')")
HERE = Path(__file__).parent
pytestmark = pytest.mark.slow  # every worker is a process that imports torch


def environment() -> dict[str, str]:
    paths = [str(HERE), str(HERE.parents[1]), str(HERE.parents[1] / "kernels"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """One Ray for all tests here; Workers leaves one alone that it did not start. Its processes find fakes.py."""
    before = {name: os.environ.get(name) for name in ("PYTHONPATH", "RAY_USAGE_STATS_ENABLED")}
    os.environ.update(PYTHONPATH=environment()["PYTHONPATH"], RAY_USAGE_STATS_ENABLED="0")
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})


@pytest.fixture
def engines(fakes: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """worker_engines.py, imported by its plain name: that is how a worker's process finds it."""
    monkeypatch.syspath_prepend(str(HERE))
    import worker_engines

    return worker_engines


def test_the_same_bytes_with_three_workers(fakes, engines, finished, tmp_path):
    summary = fakes.run(tmp_path / "run", engines.over(partial(engines.healthy, fakes.facts()), 3))
    assert summary["trajectories"] == 18
    assert fakes.contents(tmp_path / "run") == fakes.contents(finished)
    assert ray.is_initialized()  # it was not ours to stop


@pytest.mark.parametrize("times", [1, 3])
def test_a_worker_that_dies_is_replaced(fakes, engines, finished, tmp_path, times):
    mark = tmp_path / "deaths"
    fakes.run(tmp_path / "run", engines.over(partial(engines.deadly, fakes.facts(), str(mark), times), 2))
    assert mark.read_bytes() == b"x" * times
    assert fakes.contents(tmp_path / "run") == fakes.contents(finished)


def test_one_request_that_kills_every_worker_ends_the_run_and_loses_nothing(fakes, engines, finished, tmp_path):
    mark, folder = tmp_path / "deaths", tmp_path / "run"
    with pytest.raises(DsparkError, match=r"4 in a row died over the same [12] requests.*what is finished is kept"):
        fakes.run(folder, engines.over(partial(engines.deadly, fakes.facts(), str(mark), 99), 2))
    assert len(mark.read_bytes()) > workers.DEATHS
    kept = len((folder / JOURNAL_NAME).read_bytes().splitlines())
    assert kept > 0
    assert read_manifest(folder)["state"] == "running"
    summary = fakes.run(folder, engines.over(partial(engines.healthy, fakes.facts()), 3))
    assert summary["resumed"] == kept
    assert fakes.contents(folder) == fakes.contents(finished)


def test_a_worker_killed_from_outside(fakes, engines, finished, tmp_path, monkeypatch):
    """ray.kill in the middle of its piece, as the loss of a machine would look."""
    hired: list[Any] = []
    hire = workers._Run._hire
    monkeypatch.setattr(workers._Run, "_hire", lambda run: hired.append(hire(run)) or hired[-1])

    def kill(done: int, total: int, tokens: int) -> None:
        if done in (3, 8):
            ray.kill(hired[-1])

    fakes.run(tmp_path / "run", engines.over(partial(engines.healthy, fakes.facts(), 0.05), 2), on_progress=kill)
    assert len(hired) == 4
    assert fakes.contents(tmp_path / "run") == fakes.contents(finished)


@pytest.mark.parametrize("change", [{"target": "ee" * 32}, {"kernels": {"sources": "ff", "threads": 1}}])
def test_a_worker_with_other_models_or_another_build_is_refused(fakes, engines, tmp_path, change):
    name = next(iter(change))
    with pytest.raises(
        DsparkError, match=rf"worker on .*expected models and build of the process that writes.* {name}"
    ):
        fakes.run(tmp_path / "run", engines.over(partial(engines.healthy, fakes.facts(**change)), 2))


def test_threads_of_a_worker_may_differ(fakes, engines, finished, tmp_path):
    facts = fakes.facts(threads=7, kernels={"sources": "dd", "threads": 7})
    fakes.run(tmp_path / "run", engines.over(partial(engines.healthy, facts), 2))
    assert fakes.contents(tmp_path / "run") == fakes.contents(finished)


def test_what_a_worker_says(fakes, engines, tmp_path):
    with pytest.raises(DsparkError, match=r"^expected a bundle, but got none\.$"):
        fakes.run(tmp_path / "run", engines.over(partial(engines.failing, DsparkError), 2))
    with pytest.raises(RuntimeError, match="expected a bundle"):
        fakes.run(tmp_path / "run", engines.over(partial(engines.failing, RuntimeError), 2))


def test_more_workers_than_cores_of_a_cluster(fakes, engines, tmp_path):
    with pytest.raises(DsparkError, match="a core for each of 99, but Ray has 4"):
        fakes.run(tmp_path / "run", engines.over(partial(engines.healthy, fakes.facts()), 99))


def test_the_writer_killed_and_resumed_with_another_number_of_workers(fakes, engines, finished, tmp_path):
    folder, kept = tmp_path / "run", 0
    for count in (3, 2):
        kept = killed_after(folder, count, kept + 4)
    summary = fakes.run(folder, engines.over(partial(engines.healthy, fakes.facts()), 3))
    assert summary["resumed"] == kept
    assert fakes.contents(folder) == fakes.contents(finished)


def killed_after(folder: Path, count: int, wanted: int) -> int:
    """Runs with workers in a process of its own, and a Ray of its own, until so many trajectories are safe; then kills
    it with SIGKILL. Returns how many are."""
    command = [sys.executable, str(HERE / "worker_engines.py"), str(folder), str(count)]
    process = subprocess.Popen(command, env=environment(), start_new_session=True)
    until = time.monotonic() + 100
    while safe(folder) < wanted and time.monotonic() < until and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "it ended by itself"
    assert wanted <= safe(folder) < 18
    return safe(folder)


def safe(folder: Path) -> int:
    """Trajectories in whole lines of the journal, which a running collection never shortens."""
    path = folder / JOURNAL_NAME
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return len({json.loads(line)["entry"]["trajectory"]["trajectory_id"] for line in lines if line.endswith(b"\n")})
