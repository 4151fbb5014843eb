"""From a recipe's options and a target to the draft model that is to be trained: its config, its reduced vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from torch import Tensor

from dspark.contracts import DsparkError
from dspark.drafter.config import CHANNEL_GROUP, DrafterConfig
from dspark.target.decoder import Target
from dspark.training.options import DrafterOptions, InitOptions
from dspark.training.vocabulary import draft_vocabulary


def draft_config(shape: DrafterOptions, target: Target) -> DrafterConfig:
    """The options with the target's own shapes. Raises DsparkError on a combination that means nothing."""
    if shape.mask_token_id in target.eos_ids:
        raise DsparkError(
            f"drafter.mask_token_id: expected an id no text uses, but got the stop id {shape.mask_token_id}."
        )
    mine = target.config
    norm = mine.qk_norm if shape.qk_norm is None else shape.qk_norm
    kept = {"qk_norm": norm, "attention_bias": mine.qkv_bias, "mlp_bias": mine.mlp_bias}
    kept |= {"attention_out_bias": mine.output_bias}
    width = shape.draft_vocab_size if shape.draft_vocab_size < target.vocab_size else 0
    return DrafterConfig.for_target(target, **{**asdict(shape), **kept, "draft_vocab_size": width})


def refuse_contradictions(shape: DrafterOptions, init: InitOptions) -> None:
    """Raises one DsparkError for all that a recipe's options say against each other, before a target is loaded: the
    config is made for a target that takes whatever depends on it."""
    taps = list(shape.target_layer_ids)
    agreeable = {
        "vocab_size": 2**31 - 1,
        "qk_norm": True,
        "hidden_size": CHANNEL_GROUP,
        "intermediate_size": 1,
        "num_heads": 1,
    }
    agreeable |= {"num_kv_heads": 1, "head_dim": 2, "num_target_layers": max([0, *taps]) + 1}
    wrong = _init_against_shape(shape, init)
    try:
        DrafterConfig(**{**asdict(shape), **agreeable})
    except DsparkError as error:
        wrong.insert(0, str(error))
    if wrong:
        raise DsparkError(" ".join(wrong))


def _init_against_shape(shape: DrafterOptions, init: InitOptions) -> list[str]:
    wrong = []
    if init.regression and not shape.input_fusion and shape.architecture == "dspark":
        wrong.append(
            "init.regression: expected drafter.input_fusion: true with it, but got false. Switch that on, or set "
            "init.regression: 0."
        )
    copied = init.layers if init.from_target else None
    if copied and (len(copied) != shape.num_layers or min(copied) < 0):
        wrong.append(
            f"init.layers: expected {shape.num_layers} target layers from 0 on, one per draft layer "
            f"(drafter.num_layers), but got {copied}."
        )
    return wrong


def draft_ids(config: DrafterConfig, target: Target, data: Callable[[], Any]) -> Tensor | None:
    """Ids [Vd] of the reduced draft vocabulary, the most frequent ones of the training responses; None without one.
    data: gives the TrajectoryDataModule that counts them."""
    if config.draft_vocab_size == 0:
        return None
    counts = data().response_counts(target.vocab_size)
    return draft_vocabulary(counts, config.draft_vocab_size, [*data().stop_ids(), *target.eos_ids])
