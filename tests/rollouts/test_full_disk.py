"""A disk that fills up at any point of a run: one clear error, nothing finished is lost, the same bytes in the end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dspark.contracts import DsparkError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own, where this process may mount one."""
    folder = tmp_path / "mount"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no right to mount a small file system here; RLIMIT_FSIZE stands in for it")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def sweep(how: str, folder: Path) -> list[dict[str, Any]]:
    driver = Path(__file__).with_name("full_driver.py")
    paths = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(driver), how, str(folder)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(tries: list[dict[str, Any]], reason: str) -> set[str]:
    """Every try ended well or in one error and exit code 2; returns the kinds of files that had no room."""
    failed = [one for one in tries if one["code"]]
    assert 0 < len(failed) < len(tries)
    for one in failed:
        assert one["code"] == 2, one
        assert one["said"].startswith("error: ") and one["said"].count("\n") == 1, one
        assert f"but got: {reason}" in one["said"] and "run again" in one["said"], one
        assert not [name for name in one["left"] if name.endswith(".tmp") or name == ".lock"], one
    return {one["said"].split(":")[1].rsplit("/")[-1].partition("-")[0].strip() for one in failed}


def test_files_that_may_not_grow(fakes, finished, tmp_path):
    tries = sweep("limit", tmp_path / "limited")
    assert check(tries, "File too large") >= {"manifest.json", "journal.jsonl", "trajectories"}
    for one in tries:
        assert fakes.contents(tmp_path / "limited" / str(one["room"])) == fakes.contents(finished), one


def test_a_small_disk(fakes, finished, mount):
    tries = sweep("disk", mount)
    assert check(tries, "No space left on device") >= {"journal.jsonl", "trajectories", "rounds"}
    for one in tries:
        assert fakes.contents(mount.with_name("kept") / str(one["room"])) == fakes.contents(finished), one


def test_a_folder_that_cannot_be_written(fakes, mount):
    with pytest.raises(RuntimeError):
        fakes.run(mount / "run", fakes.FakeEngine(stop_after=4))
    before = fakes.contents(mount / "run")
    subprocess.run(["mount", "-o", "remount,ro", str(mount)], check=True)
    for folder in (mount / "run", mount / "new"):
        with pytest.raises(DsparkError, match=r"expected a folder that can be written, but got: Read-only file system"):
            fakes.run(folder)
    assert fakes.contents(mount / "run") == before
    assert not (mount / "new").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere; a read-only mount is tested instead")
def test_a_folder_without_the_right_to_write(fakes, tmp_path):
    (tmp_path / "run").mkdir(mode=0o555)
    with pytest.raises(DsparkError, match=r"expected a folder that can be written, but got: Permission denied"):
        fakes.run(tmp_path / "run")
