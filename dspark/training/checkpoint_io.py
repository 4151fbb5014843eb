"""Checkpoints that are whole or not there, however the process ends.

Lightning writes to the system's temporary folder and moves the file; to another file system a move is a copy into the
old checkpoint, truncated first, so a kill or a full disk in that moment leaves neither. Here the bytes go to a
temporary neighbour, are synced, and take the name by a rename (dspark.files).
Left out on purpose: remote file systems, and the folders of save_distributed_checkpoint, which sharding.py refuses.
"""

from __future__ import annotations

import glob
import io
import zipfile
import zlib
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from dspark.contracts import DsparkError
from dspark.files import atomic_write


def refuse_damaged(path: str | Path) -> None:
    """Raises DsparkError where a checkpoint's bytes are not those that were written: torch keeps a CRC-32 of each part
    and does not look at it when it reads. A file that is no archive at all is left to who reads it."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except (OSError, zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError) as error:
        damaged = str(error) if zipfile.is_zipfile(path) else None
    if damaged is not None:
        raise DsparkError(
            f"{path}: expected the bytes that were written, but {damaged} differs: the checkpoint is damaged. Take "
            "another copy, or make it again."
        )


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's reading, behind a check of every byte, and our writing. Give it to a Trainer as a plugin; the command
    line does."""

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        """Raises DsparkError for a file that is damaged."""
        refuse_damaged(path)
        return super().load_checkpoint(path, *args, **kwargs)

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Raises DsparkError when the place cannot be written or the disk is full; the older file is as it was."""
        assert storage_options is None, "no file here takes storage options"
        path = Path(path)
        for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):  # by a kill: as large as the checkpoint
            left.unlink(missing_ok=True)
        buffer = io.BytesIO()  # the file's size in memory, as Lightning has it too
        torch.save(checkpoint, buffer)
        atomic_write(path, buffer.getbuffer())
