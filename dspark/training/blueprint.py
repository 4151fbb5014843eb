"""From a recipe's options and a target to the draft model that is to be trained: its config, its reduced vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from torch import Tensor

from dspark.contracts import DsparkError
from dspark.drafter.config import DrafterConfig
from dspark.target.decoder import Target
from dspark.training.options import DrafterOptions
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


def draft_ids(config: DrafterConfig, target: Target, data: Callable[[], Any]) -> Tensor | None:
    """Ids [Vd] of the reduced draft vocabulary, the most frequent ones of the training responses; None without one.
    data: gives the TrajectoryDataModule that counts them."""
    if config.draft_vocab_size == 0:
        return None
    counts = data().response_counts(target.vocab_size)
    return draft_vocabulary(counts, config.draft_vocab_size, [*data().stop_ids(), *target.eos_ids])
