"""The formats of a draft model, by name: what one cannot hold, writing it, and reading whichever a folder is.

    bundle       ours: hashes, calibration, the target's fingerprint; what the runner loads
    deepspec     the flat layout of the DeepSpec reference
    speculators  the nested layout of the speculators project
The foreign formats say nothing of calibrations and of the target's fingerprint; ``notes`` says so, and says
where an engine is known not to apply what a file holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dspark.contracts import DsparkError
from dspark.drafter.config import DrafterConfig
from dspark.drafter.model import Drafter
from dspark.export import bundle, deepspec, speculators
from dspark.export.folder import CONFIG, WEIGHTS, is_export, read_config, rebuild
from dspark.target.decoder import Target
from dspark.training.checkpoint import load_drafter

FORMATS = ("bundle", deepspec.KIND, speculators.KIND)
_SAYABLE = {
    "architecture": "dspark",
    "input_fusion": "false",
    "layer_fusion": "false",
    "convolution": "false",
    "candidates": "0",
    "markov_head": "vanilla",
    "qk_norm": "true",
    "sliding_window": "0",
    "sample_from_anchor": "true",
    "draft_vocab_size": "0",
}  # a field of recipes, and the value of it that every format can hold


@dataclass(frozen=True, slots=True)
class Draft:
    """A draft model bound to its target, in eval mode. calibration: calibration.json's content, where a bundle has one.
    unproved: nothing in the file ties it to this target."""

    drafter: Drafter
    calibration: dict[str, Any] | None = None
    unproved: bool = False


def load_draft(source: str | Path, target: Target) -> Draft:
    """The draft model at `source`: a training checkpoint (.ckpt) or a folder in any of the formats, in its own dtype.

    Raises DsparkError when nothing is there, it is incomplete or of another kind, or was made for another target.
    """
    path = Path(source)
    if not path.is_dir():
        return Draft(load_drafter(path, target))
    kind = format_of(path)
    if kind == "bundle":
        found = bundle.load_bundle(path)
        bundle.check_target(found, target)
        return Draft(found.drafter.bind(target.embed_weight, target.head_weight), found.calibration)
    if kind == deepspec.KIND:
        config, state, embed, head = deepspec.read_deepspec(path)
        _check_depth(path, config, target)
        return _imported(path, config, state, {deepspec.EMBED: embed, deepspec.HEAD: head}, target)
    return _imported(path, *speculators.read_speculators(path, target.num_layers), target)


def format_of(directory: Path) -> str:
    """One of FORMATS. Raises DsparkError for a folder that is none of them."""
    if (directory / bundle.MANIFEST).is_file() or not (directory / CONFIG).is_file():
        return "bundle"
    raw = read_config(directory)
    if "speculators_model_type" in raw:
        return speculators.KIND
    if raw.get("architectures") == [deepspec.ARCHITECTURE]:
        return deepspec.KIND
    raise DsparkError(
        f"{directory}: expected a draft model: a bundle ({bundle.MANIFEST}), or a {CONFIG} with architectures "
        f'["{deepspec.ARCHITECTURE}"] or a speculators_model_type, but got architectures {raw.get("architectures")}. '
        "Is this the target's own folder?"
    )


def check_sayable(kind: str, config: DrafterConfig) -> None:
    """Raises DsparkError, naming every field, when the format cannot hold this draft model."""
    refused = {deepspec.KIND: deepspec.refusals, speculators.KIND: speculators.refusals}
    fields = refused[kind](config) if kind in refused else []
    if fields:
        raise DsparkError(
            f"export: expected a draft model that the {kind} format can hold, but it has {'; '.join(fields)}. "
            f"Export it as a bundle{_remedy([clause.split()[0] for clause in fields])}."
        )


def _remedy(names: list[str]) -> str:
    """How a recipe avoids the fields that a format refuses."""
    fixed = [name for name in names if name not in _SAYABLE]
    if fixed:
        return f", which alone fits this target: {' and '.join(fixed)} can be set by no recipe"
    wanted = "; ".join(f"{name}: {_SAYABLE[name]}" for name in names)
    return f", or train one that can be said: {wanted} (in model.init_args.drafter; see recipes/engines.yaml)"


def notes(kind: str, draft: Draft) -> list[str]:
    """What was not checked, what this export leaves out, and what engines are known not to apply; a clause each."""
    unproved = "nothing in the checkpoint ties it to a target: that it was trained for this one was not checked"
    if kind == "bundle":
        return [unproved] if draft.unproved else []
    config = draft.drafter.config
    last = config.num_target_layers - 1
    checks = (
        (draft.unproved, unproved),
        (draft.calibration, f"{kind} has no place for a calibration: it is left out"),
        (config.stop_gradient, "stop_gradient is a setting of training and left out"),
        (
            config.markov_rank and config.markov_head != "vanilla",
            f"vLLM 0.32 applies vanilla heads alone: it will not apply this {config.markov_head} head",
        ),
        (config.markov_rank == 0, "vLLM 0.32 does not load a draft model without a Markov head (markov_rank 0)"),
        (
            config.target_layer_ids[-1] == last,
            f"it reads the target's last layer ({last}) before the final norm, which the reference refuses to decode",
        ),
    )
    return [text for holds, text in checks if holds]


def write_draft(
    kind: str, folder: Path, drafter: Drafter, target: Target, raw: Mapping[str, Any], meta: dict[str, Any]
) -> str:
    """Writes `folder` in that format and returns the draft model's hash. raw: the target's own config.json. meta: kept
    in a bundle; meta["target"] is the target's name in a speculators config."""
    if kind == deepspec.KIND:
        return deepspec.write_deepspec(folder, drafter, target, raw)
    if kind == speculators.KIND:
        return speculators.write_speculators(folder, drafter, target, raw, meta["target"])
    return bundle.save_bundle(folder, drafter, meta)


def is_ours(kind: str, folder: Path) -> bool:
    """Whether a folder holds an earlier export of that format, whole or damaged, and nothing else."""
    return bundle.is_bundle(folder) if kind == "bundle" else is_export(folder, kind)


def _imported(
    path: Path, config: DrafterConfig, state: dict[str, Tensor], lent: dict[str, Tensor], target: Target
) -> Draft:
    """lent: what the file holds of the target, by name; each must be the target's own."""
    drafter = rebuild(replace(config, target_fingerprint=target.fingerprint), state, path / WEIGHTS)
    drafter.bind(target.embed_weight, target.head_weight)
    for name, weight in lent.items():
        ours = target.embed_weight if name == deepspec.EMBED else target.head_weight
        ids = drafter.draft_ids if name == deepspec.HEAD else None
        _check_lent(path, name, weight, ours if ids is None else ours[ids])
    return Draft(drafter, unproved=not lent)


def _check_depth(path: Path, config: DrafterConfig, target: Target) -> None:
    if config.num_target_layers != target.num_layers:
        raise DsparkError(
            f"{path}: expected a target of {config.num_target_layers} layers, but got {target.name} with "
            f"{target.num_layers}. Give the target it was trained for."
        )


def _check_lent(path: Path, name: str, copy: Tensor, ours: Tensor) -> None:
    """A copy of the target's weights must be one, in the coarser of the two dtypes."""
    coarse = torch.bfloat16 if torch.bfloat16 in (copy.dtype, ours.dtype) else ours.dtype
    if not torch.equal(copy.to(coarse), ours.to(coarse)):
        raise DsparkError(
            f"{path}: expected {name} to be a copy of the target's, but it differs. Give the target it was made for; "
            "a draft model with weights of its own there is not supported."
        )
