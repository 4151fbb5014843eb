"""The folder that both foreign formats are: config.json, model.safetensors, and beside them a record of ours.

    dspark_export.json  {format, kind, drafter_hash, tensors: sha256 by name}
Engines pass over the record. It tells our own exports from a folder that must not be replaced, and lets a reader notice
bytes that changed. A checkpoint without it (anybody else's) is read all the same.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dspark.contracts import DsparkError
from dspark.drafter.config import DrafterConfig
from dspark.drafter.identity import tensor_hashes
from dspark.drafter.model import Drafter
from dspark.export.tensors import check_hashes, load_tensors, save_tensors
from dspark.files import atomic_dir, canonical_json, read_json

CONFIG, WEIGHTS, RECORD = "config.json", "model.safetensors", "dspark_export.json"
FORMAT = "dspark-export/1"
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def write_folder(
    directory: Path, kind: str, config: dict[str, Any], tensors: dict[str, Tensor], drafter_hash: str
) -> None:
    """Writes the three files, whole or not at all. kind: the format's name. config: JSON-ready."""
    record = {
        "format": FORMAT,
        "kind": kind,
        "drafter_hash": drafter_hash,
        "tensors": tensor_hashes(tensors),
    }
    try:
        text = json.dumps(config, indent=2, sort_keys=True, allow_nan=False)
    except ValueError as error:  # the draft model's own fields are finite
        raise DsparkError(
            f"export: expected finite numbers in the target's config.json, but got NaN or infinity ({error})."
        ) from error
    with atomic_dir(directory) as temporary:
        (temporary / CONFIG).write_text(text + "\n", encoding="utf-8")
        save_tensors(temporary / WEIGHTS, tensors, {"format": "pt"})  # transformers opens no file without this entry
        (temporary / RECORD).write_text(canonical_json(record) + "\n", encoding="utf-8")


def read_config(directory: Path) -> dict[str, Any]:
    """config.json. Raises DsparkError when it is absent or no JSON object."""
    raw = read_json(directory / CONFIG, "draft model config")
    if not isinstance(raw, dict):
        raise DsparkError(f"{directory / CONFIG}: expected a JSON object, but got {type(raw).__name__}.")
    return raw


def read_weights(directory: Path) -> dict[str, Tensor]:
    """Every tensor; where the folder is an export of ours, each as it was written."""
    tensors = load_tensors(directory / WEIGHTS)
    if (directory / RECORD).is_file():
        record = read_json(directory / RECORD, "export record")
        hashes = record.get("tensors") if isinstance(record, dict) else None
        if not isinstance(hashes, dict):
            raise DsparkError(f"{directory / RECORD}: expected a hash for every tensor, but got none. Export it again.")
        check_hashes(directory / WEIGHTS, tensors, hashes)
    return tensors


def is_export(directory: Path, kind: str) -> bool:
    """Whether a folder holds an export of ours of that kind, whole or damaged, and nothing else."""
    names = {path.name for path in directory.iterdir()}
    if not {RECORD} <= names <= {CONFIG, WEIGHTS, RECORD}:
        return False
    try:
        record = read_json(directory / RECORD, "export record")
    except DsparkError:
        return False
    return isinstance(record, dict) and (record.get("format"), record.get("kind")) == (FORMAT, kind)


def rebuild(config: DrafterConfig, state: dict[str, Tensor], where: Path) -> Drafter:
    """The draft model of a checked state dict, in the file's dtype, not bound. Raises DsparkError unless all of it is
    of one dtype that we compute in."""
    found = {tensor.dtype for name, tensor in state.items() if name != "draft_ids"}
    dtype = found.pop()
    if found or dtype not in _DTYPES:
        raise DsparkError(
            f"{where}: expected all tensors in one dtype, float32 or bfloat16, but got "
            f"{', '.join(sorted(map(str, {dtype, *found})))}. Quantised and mixed checkpoints are not read."
        )
    drafter = Drafter(config).to(dtype)
    drafter.load_state_dict(state, strict=True)
    return drafter.eval()


def dtype_name(drafter: Drafter) -> str:
    """As config.json says it."""
    return _DTYPES[drafter.dtype]
