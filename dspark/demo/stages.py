"""A stage is skipped when its output is there and was made from the same inputs; otherwise it runs again.

A stamp (JSON beside the outputs) holds the hash of the inputs, a hash for every output, and what the stage measured.
It is written last, so a stage that was killed has none and runs again. It goes on with what it had finished when its
inputs are still the same (a second file says what it was started with); outputs of other inputs are removed first.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.files import atomic_write, sha256_file, sha256_json

Result = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Stage:
    """title: a few words for the terminal. inputs: everything the outcome depends on, JSON values. outputs: files, or
    folders with a manifest.json. run: does the work, returns what was measured (JSON values). good: whether the result
    may be kept; a stage whose result is not runs again next time."""

    name: str
    title: str
    inputs: Mapping[str, Any]
    outputs: tuple[Path, ...]
    run: Callable[[], Result]
    good: Callable[[Result], bool] = lambda result: True


class Stages:
    """Runs stages in order, telling ``say`` one line about each. ``results`` holds what each measured."""

    def __init__(self, folder: Path, say: Callable[[str], None]):
        self.folder, self.say = folder, say
        self.results: dict[str, Result] = {}
        self.digests: dict[str, dict[str, str | None]] = {}
        self.skipped: list[str] = []

    def do(self, stage: Stage) -> Result:
        """The stage's result: measured now, or taken from its stamp."""
        path = self.folder / f"{stage.name}.json"
        wanted = sha256_json(dict(stage.inputs))
        stamp = read_stamp(path)
        if stamp and stamp["inputs"] == wanted and stamp["outputs"] == hashes(stage.outputs):
            self.say(f"{stage.title}: there already, made from the same inputs")
            self.skipped.append(stage.name)
        else:
            started = time.monotonic()
            self.say(f"{stage.title} ...")
            self._clear_unless_resuming(stage, wanted)
            result = stage.run()
            stamp = {"inputs": wanted, "outputs": hashes(stage.outputs), "result": result}
            stamp["seconds"] = round(time.monotonic() - started, 1)
            if stage.good(result):
                atomic_write(path, json.dumps(stamp, indent=1) + "\n")
            else:
                path.unlink(missing_ok=True)
            self.say(f"{stage.title}: {stamp['seconds']:.0f} s")
        self.results[stage.name], self.digests[stage.name] = stamp["result"], stamp["outputs"]
        return self.results[stage.name]

    def _clear_unless_resuming(self, stage: Stage, wanted: str) -> None:
        """Removes outputs below our folder's parent that were made from other inputs; a user's files are elsewhere."""
        mark = self.folder / f"{stage.name}.started"
        before = mark.read_text(encoding="utf-8") if mark.is_file() else ""
        root = self.folder.parent.resolve()
        for path in stage.outputs if before != wanted else ():
            if root in path.resolve().parents and path.exists():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        atomic_write(mark, wanted)


def read_stamp(path: Path) -> dict[str, Any] | None:
    """None when there is no stamp, or not one of ours: then the stage runs."""
    try:
        stamp = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return stamp if isinstance(stamp, dict) and {"inputs", "outputs", "result"} <= stamp.keys() else None


def hashes(outputs: tuple[Path, ...]) -> dict[str, str | None]:
    """sha256 of every output (of a folder: of its manifest, which holds the hashes of the rest); None = not there."""
    found: dict[str, str | None] = {}
    for path in outputs:
        file = path / "manifest.json" if path.is_dir() else path
        found[str(path)] = sha256_file(file) if file.is_file() else None
    return found
