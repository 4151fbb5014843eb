"""A checkpoint's draft model against the recipe's: a fit refuses another, an evaluation takes it as it is.

`candidates` is no part of the weights: the recipe's holds, so that one model may be tried with several.
"""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import fields, replace
from typing import Any

from dspark.contracts import DsparkError
from dspark.drafter.config import DrafterConfig
from dspark.training.checkpoint import CHECKPOINT_KEY
from dspark.training.options import DrafterOptions

_CHOSEN = {f.name for f in fields(DrafterOptions)} - {"candidates"}  # by a recipe; the rest follows the target
_OURS = _CHOSEN | {"confidence_with_law"}  # what confidence training may have added


def saved_config(checkpoint: dict[str, Any], given: DrafterConfig) -> DrafterConfig:
    """The config of the checkpoint's draft model, with the candidates of `given`, the recipe's. Fields that came after
    it was written have the defaults that describe it. Raises DsparkError when it was trained for another target."""
    if CHECKPOINT_KEY not in checkpoint:
        raise DsparkError("checkpoint: expected one of this project's, but it describes no draft model.")
    values = {**checkpoint[CHECKPOINT_KEY], "candidates": given.candidates}
    saved = DrafterConfig.from_dict(values, "checkpoint: draft model config")
    if foreign := [name for name in _differing(saved, given) if name not in _OURS]:
        raise DsparkError(
            "checkpoint: expected a draft model for this target, but got one for another: "
            f"{_told(saved, given, foreign)}. Use the target and target_dtype that it was trained with."
        )
    return saved


def refuse_other_shape(saved: DrafterConfig, given: DrafterConfig, advice: str = "") -> None:
    """Raises DsparkError when the two differ, with the overrides that would make the recipe fit, or other advice."""
    if differing := _differing(saved, given):
        values = {name: json.dumps(saved.to_dict()[name]) for name in differing}
        overrides = " ".join(f"--model.init_args.drafter.{name}={shlex.quote(v)}" for name, v in values.items())
        raise DsparkError(
            "checkpoint: expected the draft model of this recipe to go on with, but got another: "
            f"{_told(saved, given, differing)}. {advice or f'Add {overrides}, or start a new run.'}"
        )


def tell_adopted(saved: DrafterConfig, given: DrafterConfig) -> None:
    """One line on stderr: an evaluation is of the checkpoint's draft model, and in what it is not the recipe's."""
    told = _told(saved, given, _differing(saved, given))
    print(f"this is the checkpoint's draft model, not the recipe's: {told}", file=sys.stderr)


def shape_of(shape: DrafterOptions, config: DrafterConfig) -> DrafterOptions:
    """The options as they would have made `config`."""
    return replace(shape, **{name: config.to_dict()[name] for name in _CHOSEN})


def _differing(saved: DrafterConfig, given: DrafterConfig) -> list[str]:
    ours, theirs = given.to_dict(), saved.to_dict()
    return [name for name in ours if ours[name] != theirs[name]]


def _told(saved: DrafterConfig, given: DrafterConfig, names: list[str]) -> str:
    ours, theirs = given.to_dict(), saved.to_dict()
    return "; ".join(f"{name}: saved {theirs[name]!r}, given {ours[name]!r}" for name in names)
