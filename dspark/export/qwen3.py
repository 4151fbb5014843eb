"""Draft layers as a Qwen3 config, which both foreign formats carry: writing it, reading it, and what it cannot say.

Every key is listed here and is the draft model's own; of the target's config only token ids, the context length and
the initial weights' range are taken. A copy of the target's config would describe other layers than the trained ones
(partial rotary, sliding windows). RoPE is written in both schemas, because engines read one or the other: the newer
rope_parameters, and rope_theta with rope_scaling. What is read and would change the arithmetic is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dspark.contracts import DsparkError
from dspark.drafter.config import DrafterConfig

_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
}  # ours: theirs
_TARGET = ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings")
_KINDS: dict[type, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    list: "a list of whole numbers",
    dict: "an object",
}
_NEEDED: Any = object()
_LARGEST = 2**31 - 1


def unsayable(config: DrafterConfig) -> list[str]:
    """The fields of a draft model that a Qwen3 config has no place for, each with its value and what it means."""
    biased = config.attention_bias != config.attention_out_bias
    checks = (
        (config.architecture != "dspark", f"architecture {config.architecture} (no parallel block)"),
        (config.input_fusion, "input_fusion true (block inputs that are not embeddings)"),
        (config.layer_fusion, "layer_fusion true (one map of the tapped layers serves all draft layers)"),
        (config.convolution, "convolution true (Qwen3 layers have none)"),
        (config.candidates > 0, f"candidates {config.candidates} (the draft law is over all columns)"),
        (config.confidence_with_law, "confidence_with_law true (a confidence head reads hidden state and Markov part)"),
        (config.markov_head == "pair", "markov_head pair (the known kinds are vanilla, gated, rnn)"),
        (not config.qk_norm, "qk_norm false (Qwen3 layers norm queries and keys)"),
        (biased, "attention_bias unlike attention_out_bias (one switch sets both)"),
        (config.mlp_bias, "mlp_bias true"),
        (config.sliding_window > 0, f"sliding_window {config.sliding_window} (of a whole block, not of each query)"),
    )
    return [text for holds, text in checks if holds]


def layer_keys(config: DrafterConfig, target: Mapping[str, Any]) -> dict[str, Any]:
    """The Qwen3 config of the draft layers. target: the target's own config.json."""
    rope = dict(config.rope_parameters)
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    return {
        "model_type": "qwen3",
        **{theirs: getattr(config, ours) for ours, theirs in _SIZES.items()},
        **{key: target.get(key) for key in _TARGET},
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": target.get("initializer_range", 0.02),
        "layer_types": ["full_attention"] * config.num_layers,
        "max_window_layers": config.num_layers,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": rope,
        "rope_scaling": None if rope["rope_type"] == "default" else scaling,
        "rope_theta": rope["rope_theta"],
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
    }


def read_layers(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """DrafterConfig's fields of the draft layers. Raises DsparkError, naming it, for a field that is missing, of
    another type, or of a value that our layers do not compute."""
    only(raw, {"model_type": "qwen3", "hidden_act": "silu", "mlp_bias": False, "partial_rotary_factor": 1}, where)
    sliding = take(raw, "use_sliding_window", bool, where, False)
    kinds = raw.get("layer_types")
    kinds = ["sliding_attention" if sliding else "full_attention"] if kinds is None else kinds
    if not isinstance(kinds, list) or not kinds or any(kind != "full_attention" for kind in kinds):
        raise DsparkError(f"{where}: expected layer_types all full_attention, but got {kinds!r}.")
    bias = take(raw, "attention_bias", bool, where, False)
    return {
        **{ours: take(raw, theirs, int, where) for ours, theirs in _SIZES.items()},
        "rms_norm_eps": take(raw, "rms_norm_eps", float, where),
        "rope_parameters": read_rope_parameters(raw, where),
        "qk_norm": True,
        "attention_bias": bias,
        "attention_out_bias": bias,
    }


def read_rope_parameters(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """RoPE from either schema, as DrafterConfig keeps it. Raises DsparkError when both are there and disagree."""
    found = [
        _flat_rope(raw, key, where) for key in ("rope_parameters", "rope_scaling") if raw.get(key) not in (None, {})
    ]
    found = found or [{"rope_type": "default", "rope_theta": raw.get("rope_theta")}]
    rope = found[0]
    if rope["rope_theta"] is None:
        raise DsparkError(f"{where}: expected rope_parameters.rope_theta or rope_theta, but got neither.")
    if found[-1] != rope or raw.get("rope_theta") not in (None, rope["rope_theta"]):
        got = {key: raw.get(key) for key in ("rope_parameters", "rope_scaling", "rope_theta")}
        raise DsparkError(f"{where}: expected the same RoPE in both schemas, but got {got}. Remove the wrong one.")
    wrong = [key for key, value in rope.items() if key != "rope_type" and not isinstance(value, int | float)]
    if wrong:
        raise DsparkError(f"{where}: expected numbers in rope_parameters, but got {wrong[0]} {rope[wrong[0]]!r}.")
    return rope


def _flat_rope(raw: Mapping[str, Any], key: str, where: str) -> dict[str, Any]:
    """One of the two schemas, its theta and type filled in, with the older name of the type read too."""
    given = raw[key]
    if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
        raise DsparkError(f"{where}: expected {key} to be one flat object for all layers, but got {given!r}.")
    only(given, {"partial_rotary_factor": 1}, f"{where}: {key}")
    kind = given.get("rope_type") or given.get("type") or "default"
    rest = {k: v for k, v in given.items() if k not in ("type", "partial_rotary_factor")}
    return {"rope_theta": raw.get("rope_theta"), **rest, "rope_type": kind}


def take(raw: Mapping[str, Any], name: str, kind: type, where: str, default: Any = _NEEDED) -> Any:
    """A field of a JSON object. A null counts as absent. Raises DsparkError when it is absent and has no default, or of
    another type."""
    value = raw.get(name)
    if value is None and default is not _NEEDED:
        return default
    if value is None:
        raise DsparkError(f"{where}: expected {name} ({_KINDS[kind]}), but it is absent.")
    fits = type(value) is kind or (kind is float and type(value) is int)
    if not fits or (kind is list and any(type(item) is not int for item in value)):
        raise DsparkError(f"{where}: expected {name} to be {_KINDS[kind]}, but got {value!r}.")
    if type(value) is int and abs(value) > _LARGEST:
        raise DsparkError(f"{where}: expected {name} to be a number up to {_LARGEST}, but got {value}.")
    return value


def only(raw: Mapping[str, Any], values: Mapping[str, Any], where: str) -> None:
    """Raises DsparkError for a field that is there with another value than the one our layers compute."""
    for name, value in values.items():
        got = raw.get(name)
        if got is not None and got != value:
            wanted = "no value" if value is None else repr(value)
            raise DsparkError(f"{where}: expected {name} to be absent or {wanted}, but got {got!r}.")
