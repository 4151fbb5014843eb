"""What keeps a running collection safe: a lock against a second writer, and a journal of finished trajectories.

Journal: one JSON line per trajectory, each with its own sha256, fsynced as it is appended. A kill can tear only the
last line; opening the journal again drops a torn last line (its trajectory is generated again) and refuses damage
anywhere else.

Lock: a file with the writer's pid, held with flock, which the kernel releases when the process dies by whatever means;
so a stale lock is taken over, even when its pid has been given to another process since.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

from dspark.contracts import DsparkError
from dspark.files import canonical_json, sha256_json, sync_dir

JOURNAL_NAME = "journal.jsonl"
LOCK_NAME = ".lock"


def has_entries(folder: Path) -> bool:
    """Is there a journal with at least one finished line?"""
    path = folder / JOURNAL_NAME
    return path.exists() and b"\n" in path.read_bytes()


class Lock:
    """The exclusive right to write into `folder`, from creation to release().

    Raises DsparkError when another writer, in this or another process, has it.
    """

    def __init__(self, folder: Path):
        self._path = folder / LOCK_NAME
        self._handle = self._take(folder)
        try:
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, f"{os.getpid()}\n".encode(), 0)
        except OSError:  # a full disk
            self.release()
            raise

    def _take(self, folder: Path) -> int:
        while True:
            handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pid = os.pread(handle, 32, 0).decode("ascii", "replace").strip() or "unknown"
                os.close(handle)
                raise DsparkError(
                    f"{folder}: expected no other run here, but process {pid} is writing into it. "
                    "Wait for it, or choose another folder."
                ) from None
            if self._still_there(handle):
                return handle
            os.close(handle)  # the previous owner removed the file between our open and our lock: take the new one

    def _still_there(self, handle: int) -> bool:
        try:
            return os.fstat(handle).st_ino == os.stat(self._path).st_ino
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Removes the file and gives the right back. Twice is harmless."""
        if self._handle >= 0:
            self._path.unlink(missing_ok=True)
            os.close(self._handle)
            self._handle = -1


class Journal:
    """Append-only log of finished trajectories of one run.

    run: hash of the run's settings, part of every line's hash, so that lines of another run are never taken for ours.
    entries: what was read back when it was opened, oldest first.
    """

    def __init__(self, folder: Path, run: str):
        self._path = folder / JOURNAL_NAME
        self._run = run
        data = self._path.read_bytes() if self._path.exists() else b""
        self.entries, good = self._parse(data)
        self._stream = open(self._path, "ab", buffering=0)  # noqa: SIM115 - lives as long as the object
        if good < len(data):
            self._stream.truncate(good)
        os.fsync(self._stream.fileno())
        sync_dir(folder)

    def append(self, entry: dict[str, Any]) -> None:
        """Returns when the entry is on disk. Raises DsparkError when it cannot be written (a full disk)."""
        body = {"run": self._run, "entry": entry}
        line = canonical_json({**body, "sha256": sha256_json(body)}).encode() + b"\n"
        try:
            while line:
                line = line[self._stream.write(line) :]
            os.fsync(self._stream.fileno())
        except OSError as error:
            raise DsparkError(
                f"{self._path}: expected to append to it, but got: {error.strerror or error}. "
                "Mend that and run again; what is finished is kept."
            ) from error

    def close(self) -> None:
        self._stream.close()

    def delete(self) -> None:
        """For when everything in it is in shards."""
        self.close()
        self._path.unlink(missing_ok=True)
        sync_dir(self._path.parent)

    def _parse(self, data: bytes) -> tuple[list[dict[str, Any]], int]:
        """The entries and how many bytes hold them; a torn last line is left out of both."""
        entries: list[dict[str, Any]] = []
        good = 0
        lines = _split(data)
        for number, line in enumerate(lines, 1):
            entry = self._parse_line(line, number)
            if entry is None:
                if number == len(lines):
                    break
                raise DsparkError(
                    f"{self._path}: expected a whole line {number}, but its hash does not fit: the file is damaged. "
                    "Delete it and run again; the trajectories it held are generated again."
                )
            entries.append(entry)
            good += len(line)
        return entries, good

    def _parse_line(self, line: bytes, number: int) -> dict[str, Any] | None:
        """None for a line that is not whole."""
        if not line.endswith(b"\n"):
            return None
        try:
            row = json.loads(line)
            body = {"run": row["run"], "entry": row["entry"]}
            whole = row["sha256"] == sha256_json(body)
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        if whole and row["run"] != self._run:
            raise DsparkError(
                f"{self._path}: expected entries of this run, but line {number} belongs to one with other settings. "
                "Choose another folder, or delete the journal."
            )
        return row["entry"] if whole else None


def _split(data: bytes) -> list[bytes]:
    """Lines ended by a line feed only (damage may hold other line ends)."""
    parts = data.split(b"\n")
    return [part + b"\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])
