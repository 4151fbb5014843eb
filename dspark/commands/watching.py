"""A command of ours in a process of its own, watched: its output goes to a log, its time to the terminal; and one
process at a time in a folder.

On a terminal a line counts the time up; elsewhere nothing is drawn. Left out on purpose: progress from within the
process, whose bars are in the log.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from dspark.contracts import DsparkError

_TICK = 1.0  # seconds


@contextmanager
def alone_in(folder: Path, what: str) -> Iterator[None]:
    """Holds the folder's lock. The processes started meanwhile hold it too: they may outlive this one. Raises
    DsparkError when another process has it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise DsparkError(f"{folder}: expected a folder that can be written, but got: {error.strerror}.") from error
    try:
        os.set_inheritable(handle, True)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DsparkError(
                f"{what}: expected {folder} to itself, but another run works there. Wait for its end, or give another "
                "--out."
            ) from None
        except OSError as error:
            raise DsparkError(
                f"{what}: expected to lock {folder}, but got: {error.strerror}. Give another --out."
            ) from error
        yield
    finally:
        os.close(handle)


def run_logged(command: Sequence[str], log: Path, title: str, expected: float | None) -> float:
    """Runs `python -m command`, both its streams into the log (the command on its first line); seconds it took.

    expected: seconds it may take, for the time left; None: not known. Raises DsparkError with the log's last line when
    it ends with an exit code other than 0.
    """
    started = time.monotonic()
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "w", encoding="utf-8") as stream:
        print(shlex.join(command), file=stream, flush=True)
        process = subprocess.Popen(
            [sys.executable, "-m", *command], stdout=stream, stderr=subprocess.STDOUT, close_fds=False
        )
        try:
            _watch(process, title, expected, started)
        except BaseException:
            process.kill()
            process.wait()
            raise
    if process.returncode:
        raise DsparkError(f"{title}: ended with exit code {process.returncode}: {_last_line(log)} All of it: {log}.")
    return time.monotonic() - started


def duration(seconds: float) -> str:
    """42 s, 12 min, 3 h 05 min."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02} min"


def time_left(expected: float | None, elapsed: float) -> str:
    """What a line says of the time, "" when nothing is known of it."""
    if expected is None:
        return ""
    left = expected - elapsed
    return f", about {duration(left)} left" if left > 0 else ", longer than expected"


def _watch(process: subprocess.Popen[bytes], title: str, expected: float | None, started: float) -> None:
    shown = sys.stderr.isatty()
    while True:
        try:
            process.wait(_TICK)
            break
        except subprocess.TimeoutExpired:
            elapsed = time.monotonic() - started
            if shown:
                sys.stderr.write(f"\r\x1b[K{title}: {duration(elapsed)}{time_left(expected, elapsed)}")
                sys.stderr.flush()
    if shown:
        sys.stderr.write("\r\x1b[K")


def _last_line(log: Path) -> str:
    text = log.read_text(encoding="utf-8", errors="replace").replace("\r", "\n")
    said = [line.strip() for line in text.splitlines()[1:] if line.strip()]
    return said[-1] if said else "it said nothing."
