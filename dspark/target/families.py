"""What a checkpoint's config.json says, as one frozen record: the differences between the supported families.

Families: Llama, Qwen2, Qwen3, Mistral; and Yoco, a decoder-decoder of our own making (the idea: arXiv:2405.05254). Its
first layers attend a sliding window; the last `num_consumer_layers` attend a window of their own, then one set of keys
and values that all of them share, made from what the first ones put out. Where a file leaves a field out, the value
that the family's own configuration gives it is used (_DEFAULTS); sizes have no default. A field that would change the
arithmetic in a way we do not do is refused, never ignored. Left out on purpose: mixtures of experts, multimodal
wrappers, quantised checkpoints (GGUF is dequantised by load.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dspark.contracts import DsparkError
from dspark.rotary import is_number
from dspark.target.rope import RopeConfig, read_rope

FAMILIES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM", "YocoForCausalLM")
_BY_MODEL_TYPE = {name.removesuffix("ForCausalLM").lower(): name for name in FAMILIES}
_QWEN: dict[str, Any] = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"max_position_embeddings": 2048},
    "Qwen2ForCausalLM": _QWEN,
    "Qwen3ForCausalLM": {**_QWEN, "head_dim": 128},
    "MistralForCausalLM": {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    "YocoForCausalLM": {},
}
_LARGEST = 2**31 - 1
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """All that decides the decoder's arithmetic and shapes.

    windows: per layer, how many keys a query sees, itself included (0 = all). bias flags: which projections carry one
    (qkv; attention output; MLP). qk_norm: RMSNorm on each query and key head before rotation. tied: the LM head is the
    embedding. consumers: the last so many layers also attend the shared keys and values. max_position_embeddings:
    tokens the checkpoint was made for; the decoder itself does not stop there.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    windows: tuple[int, ...]
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied: bool = False
    consumers: int = 0

    def __post_init__(self) -> None:
        checks = (
            (self.num_heads % self.num_kv_heads == 0, "num_attention_heads a multiple of num_key_value_heads"),
            (self.head_dim % 2 == 0, "an even head_dim"),
            (len(self.windows) == self.num_layers, "one attention window per layer"),
            (0 <= self.consumers < self.num_layers, "fewer consumer layers than layers"),
        )
        for holds, wanted in checks:
            if not holds:
                raise DsparkError(f"target config: expected {wanted}, but got {self}.")

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready: what the target's fingerprint covers. Without consumers nothing is said of them, so that
        fingerprints are what they were before there were any."""
        plain = {**asdict(self), "windows": list(self.windows)}
        return plain if self.consumers else {name: value for name, value in plain.items() if name != "consumers"}

    @property
    def cached_windows(self) -> tuple[int, ...]:
        """The window of every set of keys and values that is cached: each layer's, then the shared ones."""
        return self.windows + (0,) * bool(self.consumers)


def read_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """DecoderConfig from a Hugging Face config.json dict.

    Raises DsparkError for an architecture, an activation, a rope type or a quantisation that is not supported, and
    for a size that is missing.
    """
    architecture = _architecture(raw)
    merged = {**_DEFAULTS[architecture], **raw}
    _refuse(merged)
    sizes = {key: _positive(merged, key) for key in _SIZES}
    heads, layers = sizes["num_attention_heads"], sizes["num_hidden_layers"]
    bias = bool(merged.get("attention_bias", False))
    return DecoderConfig(
        architecture=architecture,
        vocab_size=sizes["vocab_size"],
        hidden_size=sizes["hidden_size"],
        intermediate_size=sizes["intermediate_size"],
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=_positive(merged, "num_key_value_heads", heads),
        head_dim=_positive(merged, "head_dim", sizes["hidden_size"] // heads),
        rms_norm_eps=_epsilon(merged),
        max_position_embeddings=_positive(merged, "max_position_embeddings"),
        rope=read_rope(merged),
        windows=_windows(architecture, merged, layers),
        qkv_bias=_has_bias(architecture, bias) or architecture == "Qwen2ForCausalLM",
        output_bias=_has_bias(architecture, bias),
        mlp_bias=architecture == "LlamaForCausalLM" and bool(merged.get("mlp_bias", False)),
        qk_norm=architecture == "Qwen3ForCausalLM",
        tied=bool(merged.get("tie_word_embeddings", False)),
        consumers=_positive(merged, "num_consumer_layers") if architecture == "YocoForCausalLM" else 0,
    )


def _architecture(raw: Mapping[str, Any]) -> str:
    named = raw.get("architectures") or []
    architecture = named[0] if named else _BY_MODEL_TYPE.get(str(raw.get("model_type")), raw.get("model_type"))
    if architecture not in FAMILIES:
        raise DsparkError(
            f"target config: expected an architecture of {', '.join(FAMILIES)}, but got {architecture!r}. "
            "Choose a checkpoint of one of these families."
        )
    return str(architecture)


def _refuse(merged: Mapping[str, Any]) -> None:
    if merged.get("quantization_config"):
        method = dict(merged["quantization_config"]).get("quant_method")
        raise DsparkError(
            f"target config: expected an unquantised checkpoint, but got quantization_config ({method!r}). "
            "Use the model's original weights, or a .gguf file."
        )
    if merged.get("hidden_act", "silu") != "silu":
        raise DsparkError(f"target config: expected hidden_act 'silu', but got {merged['hidden_act']!r}.")


def _has_bias(architecture: str, attention_bias: bool) -> bool:
    """attention_bias is a field of Llama and Qwen3 only; the other two families fix theirs."""
    return attention_bias and architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM")


def _windows(architecture: str, merged: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Per-layer window. Mistral: one for all layers. Qwen: only with use_sliding_window, by layer_types when given,
    else from layer max_window_layers on. Llama: none."""
    if architecture == "LlamaForCausalLM":
        return (0,) * layers
    if architecture == "YocoForCausalLM":
        return (_positive(merged, "sliding_window"),) * layers
    window = int(merged.get("sliding_window") or 0)
    types = merged.get("layer_types")
    if architecture == "MistralForCausalLM":
        expected = "sliding_attention" if window else "full_attention"
        if types and set(types) != {expected}:
            raise DsparkError(f"target config: expected Mistral's layers all to be {expected}, but got {types}.")
        return (window,) * layers
    window = window if merged.get("use_sliding_window", False) else 0
    if types is None:
        first = int(merged["max_window_layers"])
        return tuple(window if i >= first else 0 for i in range(layers))
    return tuple(_window_of(kind, window) for kind in types)


def _window_of(kind: str, window: int) -> int:
    if kind == "full_attention":
        return 0
    if kind == "sliding_attention" and window:
        return window
    raise DsparkError(
        f"target config: expected layer_types of full_attention, or sliding_attention with use_sliding_window and a "
        f"sliding_window, but got {kind!r} with window {window}."
    )


def _epsilon(merged: Mapping[str, Any]) -> float:
    value = merged.get("rms_norm_eps", 1e-6)
    if not is_number(value) or not 1e-30 <= value <= 1:
        raise DsparkError(f"target config: expected rms_norm_eps to be a number from 1e-30 to 1, but got {value!r}.")
    return float(value)


def _positive(merged: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = merged.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _LARGEST:
        raise DsparkError(
            f"target config: expected {key} to be a whole number >= 1 and below 2**31, but got {value!r}."
        )
    return value
