"""A checkpoint is the new one or the old one, whole, whatever happens while it is written."""

from __future__ import annotations

import builtins
import errno
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.contracts import DsparkError
from dspark.lightning_cli import with_checkpoint_io
from dspark.training.checkpoint_io import AtomicCheckpointIO
from dspark.training.data import TrajectoryDataModule

OLD, NEW = {"state_dict": {"a": torch.zeros(1000)}}, {"state_dict": {"a": torch.ones(1000)}}


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "last.ckpt"
    for content in (OLD, NEW):
        AtomicCheckpointIO().save_checkpoint(content, path)
    assert torch.equal(torch.load(path, weights_only=True)["state_dict"]["a"], NEW["state_dict"]["a"])
    assert [p.name for p in path.parent.iterdir()] == ["last.ckpt"]


def test_the_temporary_file_is_a_neighbour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rename is only atomic inside a file system; the system's temporary folder may lie on another."""
    renamed: list[tuple[Path, Path]] = []
    whole = os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: (renamed.append((Path(a), Path(b))), whole(a, b))[1])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    AtomicCheckpointIO().save_checkpoint(NEW, tmp_path / "last.ckpt")
    assert [(a.parent, b) for a, b in renamed] == [(tmp_path, tmp_path / "last.ckpt")]


def test_what_a_kill_left_goes_with_the_next_checkpoint(tmp_path: Path) -> None:
    """Else every kill during a save keeps a checkpoint's size for good. Files of other names are not ours to remove."""
    for name in (".last.ckpt.123.tmp", ".best.ckpt.123.tmp", "last.ckpt.tmp"):
        (tmp_path / name).write_bytes(b"half")
    AtomicCheckpointIO().save_checkpoint(NEW, tmp_path / "last.ckpt")
    assert sorted(p.name for p in tmp_path.iterdir()) == [".best.ckpt.123.tmp", "last.ckpt", "last.ckpt.tmp"]


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint(OLD, path)
    before, whole = path.read_bytes(), builtins.open

    class Full:
        def __init__(self, stream: Any):
            self.stream = stream

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: Any) -> None:
            self.stream.close()

        def write(self, data: Any) -> None:
            self.stream.write(bytes(data)[:100])
            raise OSError(errno.ENOSPC, "No space left on device")

    def opened(place: Any, mode: str = "r", **options: Any) -> Any:
        stream = whole(place, mode, **options)
        return Full(stream) if mode == "wb" else stream

    monkeypatch.setattr(builtins, "open", opened)
    with pytest.raises(DsparkError, match=r"last\.ckpt.*No space left"):
        AtomicCheckpointIO().save_checkpoint(NEW, path)
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["last.ckpt"]


KILLED = """
import os, signal, sys, torch
from dspark.training.checkpoint_io import AtomicCheckpointIO
os.fsync = lambda handle: os.kill(os.getpid(), signal.SIGKILL)
AtomicCheckpointIO().save_checkpoint({"state_dict": {"a": torch.ones(1000)}}, sys.argv[1])
"""


def test_a_kill_while_it_is_written_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint(OLD, path)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], env=env, check=False)
    assert done.returncode == -signal.SIGKILL
    assert torch.equal(torch.load(path, weights_only=True)["state_dict"]["a"], OLD["state_dict"]["a"])


def test_a_trainer_writes_through_it(tiny: Any, target: Any, data_dir: Path, tmp_path: Path) -> None:
    class Counting(AtomicCheckpointIO):
        saved = 0

        def save_checkpoint(self, *args: Any, **options: Any) -> None:
            self.saved += 1
            super().save_checkpoint(*args, **options)

    plugin = Counting()
    trainer = tiny.make_trainer(tmp_path / "run", 1, plugins=[plugin])
    trainer.fit(tiny.make_module(), TrajectoryDataModule([str(data_dir)], token_budget=60))
    trainer.save_checkpoint(tmp_path / "run" / "end.ckpt")
    assert plugin.saved == 1
    assert torch.load(tmp_path / "run" / "end.ckpt", weights_only=True)["global_step"] == 1


def test_the_command_line_adds_it_unless_there_is_one() -> None:
    mine = AtomicCheckpointIO()
    assert [type(p) for p in with_checkpoint_io(None, "auto")] == [AtomicCheckpointIO]
    assert with_checkpoint_io(mine, "auto") == [mine]
    assert with_checkpoint_io([mine], None) == [mine]
    brings = type("Strategy", (), {"_checkpoint_io": mine})()
    assert with_checkpoint_io([], brings) == []
    assert [type(p) for p in with_checkpoint_io([object()], None)] == [object, AtomicCheckpointIO]
