"""Reading a Hugging Face checkpoint directory: config.json and safetensors, single or sharded.

Left out on purpose: pickled weights (pytorch_model.bin) are never opened. Tensors come straight from the mapped file;
callers copy them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from dspark.contracts import DsparkError
from dspark.files import read_json

SINGLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"


def read_config_dict(directory: Path) -> dict[str, Any]:
    """config.json as a dict. Raises DsparkError when the directory or the file is not there or not JSON."""
    if not directory.is_dir():
        raise DsparkError(f"target: expected a checkpoint directory, but got {directory}, which does not exist.")
    raw = read_json(directory / CONFIG, "target config")
    if not isinstance(raw, dict):
        raise DsparkError(f"target config: expected a JSON object in {directory / CONFIG}, but got {raw!r:.40}.")
    return raw


class Checkpoint:
    """The tensors of a directory by name. Opening reads the headers, so a truncated file is found here."""

    def __init__(self, directory: Path):
        self.directory = directory
        single = directory / SINGLE
        if single.is_file():
            self._files: Mapping[str, Any] = {SINGLE: _open(single)}
            self._home = dict.fromkeys(self._files[SINGLE].keys(), SINGLE)
        else:
            self._home = self._read_index()
            self._files = {name: _open(directory / name) for name in sorted(set(self._home.values()))}
            self._check_shards()

    @property
    def names(self) -> set[str]:
        return set(self._home)

    def read(self, name: str) -> Tensor:
        """One tensor, as stored. Backed by the file: copy it before the file may change."""
        try:
            return self._files[self._home[name]].get_tensor(name)
        except SafetensorError as error:
            raise DsparkError(f"target weights: expected {name} in {self.directory}, but got: {error}.") from error

    def _read_index(self) -> dict[str, str]:
        path = self.directory / INDEX
        if not path.is_file():
            raise DsparkError(
                f"target: expected {SINGLE} or {INDEX} in {self.directory}, but got neither. Only safetensors "
                "checkpoints are read: save the model with safetensors."
            )
        index = read_json(path, "target weight index")
        home = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(home, dict) or not home:
            raise DsparkError(f"target weight index: expected a weight_map in {path}, but got none.")
        for shard in home.values():
            if not isinstance(shard, str) or shard in ("", ".", "..") or any(c in shard for c in "/\\\0"):
                raise DsparkError(f"target weight index: expected plain file names in {path}, but got {shard!r}.")
        return home

    def _check_shards(self) -> None:
        held = {shard: set(file.keys()) for shard, file in self._files.items()}
        for name, shard in self._home.items():
            if name not in held[shard]:
                raise DsparkError(
                    f"target weights: expected {name} in {shard} (says {INDEX}), but got a file without it. "
                    "Fetch the checkpoint again."
                )


def _open(path: Path) -> Any:
    try:
        return safe_open(str(path), framework="pt")
    except (SafetensorError, OSError) as error:
        raise DsparkError(
            f"target weights: expected a whole safetensors file at {path}, but got: {error}. Fetch or copy it again."
        ) from error
