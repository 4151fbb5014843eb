"""Reads draft checkpoints in the DeepSpec layout (DSpark / DFlash for Qwen3): config.json + model.safetensors.

The layout's config is a target config with draft fields in it; only the fields the draft layers follow are read, by
name. It stores the target's embedding and LM head beside the draft weights; they are handed back apart, to be bound.
Such drafts always predict from the anchor's slot (sample_from_anchor). Left out: writing the layout.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from dspark.contracts import DsparkError
from dspark.drafter.config import DrafterConfig
from dspark.files import read_json

ARCHITECTURE = "Qwen3DSparkModel"
_RENAMED = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
}
_SAME = (
    "block_size", "mask_token_id", "target_layer_ids", "vocab_size", "hidden_size", "intermediate_size", "head_dim",
    "num_target_layers", "rms_norm_eps", "markov_rank",
)  # fmt: skip


def read_deepspec(directory: str | Path) -> tuple[DrafterConfig, dict[str, Tensor], Tensor, Tensor]:
    """Returns (config, the draft model's state dict, embedding [V,H], LM head [V,H]).

    Raises DsparkError when a file or field is missing, or the checkpoint is of another kind.
    """
    directory = Path(directory)
    config = deepspec_config(read_json(directory / "config.json", "DeepSpec draft config"))
    try:
        tensors = load_file(directory / "model.safetensors")
    except OSError as error:
        raise DsparkError(f"{directory}: expected model.safetensors of a draft model, but got: {error}.") from error
    lent = [tensors.pop(name, None) for name in ("embed_tokens.weight", "lm_head.weight")]
    if lent[0] is None or lent[1] is None:
        raise DsparkError(f"{directory}: expected embed_tokens.weight and lm_head.weight, but one is missing.")
    return config, tensors, lent[0], lent[1]


def deepspec_config(raw: dict[str, Any]) -> DrafterConfig:
    """The layout's config.json -> DrafterConfig. Fields that do not concern the draft layers are not read."""
    if raw.get("architectures") != [ARCHITECTURE]:
        raise DsparkError(
            f'DeepSpec draft config: expected architectures ["{ARCHITECTURE}"], but got {raw.get("architectures")}. '
            "Is this the target's own folder?"
        )
    if raw.get("hidden_act", "silu") != "silu":
        raise DsparkError(f"DeepSpec draft config: expected hidden_act silu, but got {raw['hidden_act']!r}.")
    names = {**{name: name for name in _SAME}, **_RENAMED}
    missing = sorted(theirs for theirs in names.values() if theirs not in raw)
    if missing:
        raise DsparkError(f"DeepSpec draft config: expected the fields {', '.join(missing)}, but they are absent.")
    bias = bool(raw.get("attention_bias", False))
    return DrafterConfig(
        **{ours: raw[theirs] for ours, theirs in names.items()},
        sample_from_anchor=True,
        rope_parameters=_rope(raw),
        qk_norm=True,
        attention_bias=bias,
        attention_out_bias=bias,
        markov_head=raw.get("markov_head_type", "vanilla"),
        confidence_head=bool(raw.get("enable_confidence_head", False)),
        confidence_with_markov=bool(raw.get("confidence_head_with_markov", False)),
    )


def _rope(raw: dict[str, Any]) -> dict[str, Any]:
    """Both schemas: rope_parameters, or a top-level rope_theta with an optional rope_scaling."""
    scaling = raw.get("rope_parameters") or {"rope_theta": raw.get("rope_theta"), **(raw.get("rope_scaling") or {})}
    if scaling.get("rope_theta") is None:
        raise DsparkError("DeepSpec draft config: expected rope_parameters.rope_theta or rope_theta, but got neither.")
    return {"rope_type": "default", **scaling}
