"""Kills collections with SIGKILL and lets them go on, in processes forked from this one. Prints how often it killed.

    python kill_driver.py times FOLDER SEED     one folder, killed at random times until a run gets through
    python kill_driver.py points FOLDER         a folder per durable step (fsync, rename), killed exactly there, resumed

A fresh process of its own, so that forking meets no threads.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import fakes
import pyarrow as pa


def forked(work: Callable[[], object]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException as error:
            print(f"child: {error!r}", file=sys.stderr)
            os._exit(1)
        os._exit(0)
    return pid


def wait(pid: int) -> int:
    """The signal that ended it, 0 for a normal end."""
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return os.WTERMSIG(status)
    assert os.WEXITSTATUS(status) == 0, "the collection failed"
    return 0


def kill_at_times(folder: Path, seed: int) -> int:
    rng, kills = random.Random(seed), 0
    while True:
        pid = forked(partial(fakes.run, folder, fakes.FakeEngine(seed=kills, delay=0.004)))
        time.sleep(rng.uniform(0.0, 0.03) + max(0, kills - 10) * 0.04)
        os.kill(pid, signal.SIGKILL)  # harmless to one that has ended
        if wait(pid) != signal.SIGKILL:
            return kills
        kills += 1


def kill_at_step(step: int, before: bool) -> None:
    """From here on, this process dies before or after its `step`-th fsync or rename."""
    left = [step]

    def deadly(function: Callable[..., None]) -> Callable[..., None]:
        def call(*args: object) -> None:
            left[0] -= 1
            if left[0] == 0 and before:
                os.kill(os.getpid(), signal.SIGKILL)
            function(*args)
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        return call

    os.fsync, os.replace = deadly(os.fsync), deadly(os.replace)  # type: ignore[assignment]


def no_sync(handle: int) -> None:
    """What a process wrote survives its death without it: only a power cut needs the real one."""


def kill_at_points(root: Path) -> int:
    step = 0
    while True:
        step += 1
        folder = root / f"step-{step:03d}"

        def work(folder: Path = folder, step: int = step) -> None:
            kill_at_step(step, before=step % 2 == 0)
            fakes.run(folder, config=fakes.SMALL)

        if wait(forked(work)) == 0:
            return step - 1
        wait(forked(partial(fakes.run, folder, fakes.FakeEngine(batch=3, seed=5), fakes.SMALL)))


if __name__ == "__main__":
    os.fsync = no_sync  # type: ignore[assignment]
    pa.array([0])  # pyarrow imports pandas at its first conversion: once here, not in every fork
    mode, where = sys.argv[1], Path(sys.argv[2])
    print(kill_at_times(where, int(sys.argv[3])) if mode == "times" else kill_at_points(where))
