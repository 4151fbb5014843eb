"""A draft model's tensors in one safetensors file: written finite, read whole, held against names and shapes.

All formats share it. Safetensors only: nothing pickled is opened, no code runs. Left out: files in several shards.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dspark.contracts import DsparkError
from dspark.drafter.config import DrafterConfig
from dspark.drafter.model import Drafter
from dspark.files import share, tensor_hash

Shapes = Mapping[str, tuple[int, ...]]


def finite_state(drafter: Drafter) -> dict[str, Tensor]:
    """The state dict on the CPU. Raises DsparkError when a weight is NaN or infinite."""
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in drafter.state_dict().items()}
    for name, tensor in state.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise DsparkError(
                f"export: expected finite weights, but {name} holds NaN or infinity. Did training diverge?"
            )
    return state


def save_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Raises DsparkError when there is no room, or the place cannot be written."""
    try:
        save_file(tensors, path, metadata)
        share(path)
    except (OSError, SafetensorError) as error:
        raise DsparkError(f"{path}: expected room for the weights, but got: {error}.") from error


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Raises DsparkError when the file is absent, cut off or no safetensors file."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise DsparkError(
            f"{path}: expected a readable safetensors file, but got: {error}. Export it again, or take another copy."
        ) from error


def expected_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of such a draft model by name, without making its weights."""
    with torch.device("meta"):
        return shapes(Drafter(config).state_dict())


def check_depth(where: Path, config: DrafterConfig, got: Mapping[str, Tensor]) -> None:
    """Raises DsparkError unless the file has as many draft layers as the config says: told before any is built."""
    found = len({name.split(".")[1] for name in got if name.startswith("layers.")})
    if found != config.num_layers:
        raise DsparkError(
            f"{where}: expected tensors of {config.num_layers} draft layers (num_layers, num_hidden_layers in other "
            f"formats), but got {found}. Config and weights are not of one model: export it again."
        )


def shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def check_shapes(where: Path, wanted: Shapes, got: Mapping[str, Tensor]) -> None:
    """Raises DsparkError, naming them, for tensors that are missing, unexpected or of another shape."""
    missing, unexpected = sorted(wanted.keys() - got.keys()), sorted(got.keys() - wanted.keys())
    if missing or unexpected:
        raise DsparkError(
            f"{where}: expected exactly the draft model's tensors, but missing: {', '.join(missing) or 'none'};"
            f" unexpected: {', '.join(unexpected) or 'none'}. Config and weights are not of one model: export it again."
        )
    for name, tensor in got.items():
        if tuple(tensor.shape) != wanted[name]:
            raise DsparkError(f"{where}: expected {name} of shape {list(wanted[name])}, but got {list(tensor.shape)}.")


def check_hashes(where: Path, got: Mapping[str, Tensor], hashes: Mapping[str, str]) -> None:
    """Raises DsparkError, naming it, for a tensor that is not the one that was exported."""
    for name, tensor in got.items():
        if tensor_hash(tensor) != hashes.get(name):
            raise DsparkError(f"{where}: expected {name} as exported, but its bytes differ. Export it again.")
