"""Reads a trained draft model back: from a Lightning checkpoint of DrafterModule or an exported bundle directory.

The bundle is read from its two files (config.json, model.safetensors), because the room that writes it lies below.
Every tensor must be there and none too many. Checkpoints are loaded with weights_only=True: no code runs.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from dspark.contracts import DsparkError
from dspark.drafter.confidence import LAW_FEATURES
from dspark.drafter.config import DrafterConfig
from dspark.drafter.model import Drafter
from dspark.files import read_json, tensor_hash
from dspark.target.decoder import Target

CHECKPOINT_KEY = "dspark_drafter"  # where a Lightning checkpoint holds the draft model's config
HASHES_KEY = "dspark_tensor_hashes"
PREFIX = "drafter."  # of the draft model's tensors in a Lightning checkpoint


def seal(checkpoint: dict[str, Any], config: DrafterConfig) -> None:
    """Puts the draft model's config and a hash of each of its tensors into a Lightning checkpoint."""
    checkpoint[CHECKPOINT_KEY] = config.to_dict()
    checkpoint[HASHES_KEY] = {n: tensor_hash(t) for n, t in checkpoint["state_dict"].items() if n.startswith(PREFIX)}


def name_moments(checkpoint: dict[str, Any], names: list[str]) -> None:
    """Keys AdamW's moments by parameter name, where torch numbers them, each strategy in an order of its own; so that a
    run may be resumed under another one. names: of parameter 0, 1, ... of the checkpoint's optimizer.

    torch and Lightning take either kind of key when they load."""
    for state in filter(None, checkpoint.get("optimizer_states", ())):
        state["state"] = {names[index]: moments for index, moments in state["state"].items()}
        groups = state["param_groups"]
        state["param_groups"] = [{**group, "params": [names[index] for index in group["params"]]} for group in groups]


def _check_hashes(path: Path, tensors: dict[str, Tensor], hashes: dict[str, str]) -> None:
    changed = sorted(name for name, tensor in tensors.items() if hashes.get(name) != tensor_hash(tensor))
    if changed:
        raise DsparkError(
            f"{path}: expected the tensors that were written, but {', '.join(changed[:3])} differ: the file is "
            "damaged. Take another copy, or make it again."
        )


def load_drafter(source: str | Path, target: Target) -> Drafter:
    """The draft model at `source` (.ckpt file or bundle directory), bound to its target, in eval mode.

    Raises DsparkError when nothing is there, it is incomplete, or it was trained for another target.
    """
    path = Path(source)
    if not path.exists():
        raise DsparkError(f"draft model: expected {path} to exist. Train it first: lightning fit recipes/drafter.yaml.")
    values, tensors = _bundle(path) if path.is_dir() else _checkpoint(path)
    config = DrafterConfig.from_dict(values, f"{path}: draft model config")
    if config.target_fingerprint and config.target_fingerprint != target.fingerprint:
        raise DsparkError(
            f"{path}: expected the target it was trained for ({config.target_fingerprint[:12]}…), but got "
            f"{target.name} ({target.fingerprint[:12]}…). It was {target.told_apart(config.target_fingerprint)}."
        )
    drafter = _filled(config, tensors, path)
    return drafter.bind(target.embed_weight, target.head_weight).eval()


def drafter_in(checkpoint: dict[str, Any], config: DrafterConfig) -> Drafter:
    """The draft model of a Lightning checkpoint that is in memory, unbound."""
    tensors = {n.removeprefix(PREFIX): t for n, t in checkpoint["state_dict"].items() if n.startswith(PREFIX)}
    return _filled(config, tensors, Path("checkpoint"))


def served(drafter: Drafter, target: Target) -> Drafter:
    """A copy as an exported bundle runs: in the target's dtype, bound to it, in eval mode."""
    with torch.inference_mode(False):  # tensors made inside it have no version, which the draft model's caches look at
        running = Drafter(drafter.config)
        running.load_state_dict(drafter.state_dict())
        return running.to(target.dtype).bind(target.embed_weight, target.head_weight).eval()


def reading_the_law(drafter: Drafter, target: Target) -> Drafter:
    """The same draft model with a confidence head that can read the draft's law, and says what it said before."""
    if drafter.config.confidence_with_law:
        return drafter
    wider = Drafter(replace(drafter.config, confidence_with_law=True))
    assert wider.confidence_head is not None, "asked of draft models with the head"
    state, name = drafter.state_dict(), "confidence_head.proj.weight"
    wider.load_state_dict(state | {name: torch.nn.functional.pad(state[name], (0, LAW_FEATURES))})
    return wider.to(drafter.dtype).bind(target.embed_weight, target.head_weight).eval()


def _filled(config: DrafterConfig, tensors: dict[str, Tensor], path: Path) -> Drafter:
    """Names and shapes are compared before any weight is made."""
    with torch.device("meta"):
        wanted = {name: tuple(t.shape) for name, t in Drafter(config).state_dict().items()}
    got = {name: tuple(t.shape) for name, t in tensors.items()}
    wrong = sorted(name for name in wanted.keys() | got.keys() if wanted.get(name) != got.get(name))
    if wrong:
        raise DsparkError(f"{path}: expected exactly the draft model's tensors, but these differ: {', '.join(wrong)}.")
    drafter = Drafter(config)
    drafter.load_state_dict(tensors)
    return drafter


def _bundle(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    values = read_json(path / "config.json", "draft model config")
    try:
        tensors = load_file(path / "model.safetensors")
    except Exception as error:  # safetensors raises a type of its own that it does not export
        raise DsparkError(
            f"{path}: expected a readable model.safetensors, but got: {error}. Export it again."
        ) from error
    _check_hashes(path, tensors, read_json(path / "manifest.json", "draft model manifest").get("tensors", {}))
    return values, tensors


def _checkpoint(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        config, state = saved[CHECKPOINT_KEY], saved["state_dict"]
    except Exception as error:  # torch raises many types for a file that is none of its own
        raise DsparkError(f"{path}: expected a checkpoint of DrafterModule, but it cannot be read as one.") from error
    if HASHES_KEY not in saved:
        raise DsparkError(
            f"{path}: expected a hash for every tensor, but got a checkpoint written before they were kept. "
            "Train it again."
        )
    tensors = {name: t for name, t in state.items() if name.startswith(PREFIX)}
    _check_hashes(path, tensors, saved[HASHES_KEY])
    return config, {name.removeprefix(PREFIX): t for name, t in tensors.items()}
