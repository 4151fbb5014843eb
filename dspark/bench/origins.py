"""What a run's result follows from: the recipe after all overrides, the bytes of what it names, code and machine.

Every text of the recipe that is a file or a folder counts, whichever key it stands under: training data, prompts, a
tokenizer, a checkpoint. The target counts by the files of its checkpoint, wherever they were fetched from. Left out on
purpose: what a run writes (the trainer's folders, a cache of features, a report's folder), and data sets that are
fetched by name, whose bytes are not here.
"""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

import dspark
from dspark import __version__
from dspark.files import sha256_file, sha256_json
from dspark.ops import fingerprint
from dspark.target.load import checkpoint_dir

_PACKAGE = Path(dspark.__file__).parent

_NO_INPUTS = ("trainer", "cache", "out", "split")  # keys under which a run writes, or that name a part


class Hashes:
    """sha256 of files and folders; a file is read once while its size and time of change stay the same."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int, int, int], str] = {}

    def of(self, path: str | Path) -> str:
        """A file's hash; a folder's, over the names and hashes of all files below it."""
        path = Path(path)
        if path.is_file():
            return self._of_file(path)
        files = sorted(p for p in path.rglob("*") if p.is_file())
        return sha256_json([[str(p.relative_to(path)), self._of_file(p)] for p in files])

    def _of_file(self, path: Path) -> str:
        stat = path.stat()
        key = (str(path), stat.st_ino, stat.st_size, stat.st_mtime_ns)
        if key not in self._known:
            self._known[key] = sha256_file(path)
        return self._known[key]


def merged(recipe: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe with overrides ({dotted key: value, or its YAML}) put in; the recipe itself is left as it is."""
    result = copy.deepcopy(dict(recipe))
    for key, value in overrides.items():
        *parents, last = str(key).split(".")
        place = result
        for name in parents:
            if not isinstance(place.get(name), dict):
                place[name] = {}
            place = place[name]
        place[last] = _parsed(value)
    return result


def origins(recipe: Mapping[str, Any], hashes: Hashes) -> dict[str, Any]:
    """JSON-ready: two runs of equal origins have equal results. recipe: merged. Raises DsparkError when the target is
    not there."""
    inputs = {}
    for key, text in _texts(recipe):
        path = checkpoint_dir(text) if key == "target" else text
        if os.path.exists(path):
            inputs[text] = hashes.of(path)
    code = [[str(p.relative_to(_PACKAGE)), hashes.of(p)] for p in sorted(_PACKAGE.rglob("*.py"))]
    made_by = {"version": __version__, "code": sha256_json(code), "operations": fingerprint()}
    content = hashlib.sha256(yaml.safe_dump(dict(recipe), sort_keys=True).encode()).hexdigest()
    return {"dspark": made_by, "recipe": content, "inputs": inputs}


def _texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Every text below value with the last key on the way to it, without those that name what a run writes."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, one in value.items():
            if name not in _NO_INPUTS:
                yield from _texts(one, str(name))
    elif isinstance(value, list):
        for one in value:
            yield from _texts(one, key)


def _parsed(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError:
        return value
