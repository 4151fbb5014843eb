"""Collections that run out of room, each in a process forked from this one; prints what became of them as JSON.

    python full_driver.py limit FOLDER        RLIMIT_FSIZE: no file may grow beyond so many bytes, swept
    python full_driver.py disk MOUNT          a tmpfs mounted at MOUNT, its size swept

After every failure there is room again and the same collection goes on. A line a try: {"room", "code", "said", "left"}:
exit code and stderr of the first run, and the files it left.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import fakes
import pyarrow as pa
from kill_driver import no_sync

from dspark.cli import guarded
from dspark.rollouts import store


def exit_code(work: Callable[[], object], said: Path) -> int:
    """Of `work` as the command line would run it, in a fork whose stderr goes to a file."""
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), 2)
        os._exit(guarded(lambda args, debug: 0 if work() else 1, []))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def limited(size: int, folder: Path) -> object:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    return fakes.run(folder)


def cramped(size: int, folder: Path) -> object:
    """No shard is larger than the journal it comes from: to cut one short, the limit falls when the first is due."""
    write = store.write_shard

    def late(*args: object) -> dict[str, object]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        return write(*args)  # type: ignore[arg-type]

    store.write_shard = late  # type: ignore[assignment]
    return fakes.run(folder)


def limits(root: Path, said: Path) -> Iterator[dict[str, object]]:
    for size in [300, 1200, *range(401, 4000, 400), *range(4001, 32002, 4000)]:
        folder = root / str(size)
        code = exit_code(partial(limited if size % 100 == 1 else cramped, size, folder), said)
        yield told(size, code, said, folder)
        assert exit_code(partial(fakes.run, folder), said) == 0, said.read_text()


def disks(mount: Path, said: Path) -> Iterator[dict[str, object]]:
    for pages in range(2, 40):
        resize(mount, pages * 4096)
        folder = mount / "run"
        code = exit_code(partial(fakes.run, folder), said)
        yield told(pages, code, said, folder)
        resize(mount, 1 << 20)
        assert exit_code(partial(fakes.run, folder), said) == 0, said.read_text()
        shutil.copytree(folder, mount.with_name("kept") / str(pages))
        shutil.rmtree(folder)


def resize(mount: Path, size: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", str(mount)], check=True)


def told(room: int, code: int, said: Path, folder: Path) -> dict[str, object]:
    left = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    return {"room": room, "code": code, "said": said.read_text(), "left": left}


if __name__ == "__main__":
    os.fsync = no_sync  # type: ignore[assignment]
    pa.array([0])  # pyarrow imports pandas at its first conversion: once here, not in every fork
    sweep = {"limit": limits, "disk": disks}[sys.argv[1]]
    words = Path(sys.argv[2]).with_name("stderr.txt")
    for line in sweep(Path(sys.argv[2]), words):
        print(json.dumps(line))
