"""Which tensors a checkpoint must hold, and the fused weights the decoder runs on.

q, k and v projections become one matrix, gate and up another, so that a layer is few calls. Names on the checkpoint's
side are Hugging Face's; ours are ``layers.<i>.<field of Layer>``, ``embed``, ``norm``, ``head``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from dspark.contracts import DsparkError
from dspark.files import sha256_json, tensor_hash
from dspark.target.families import DecoderConfig

Part = tuple[str, tuple[int, ...]]  # a checkpoint tensor's name and shape
Plan = dict[str, tuple[Part, ...]]  # our name -> the parts it is stacked from, along dimension 0
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_HARMLESS = "rotary_emb.inv_freq"  # derived values that old checkpoints stored
_HASH_THREADS = 4


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer's weights, [out, in]; None where the family has none."""

    input_norm: Tensor
    qkv: Tensor
    output: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor
    qkv_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    output_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    cross_norm: Tensor | None = None
    cross_q: Tensor | None = None
    cross_output: Tensor | None = None


def plan(config: DecoderConfig) -> Plan:
    """Every weight of the decoder, from embedding to head, in a fixed order."""
    whole = (config.vocab_size, config.hidden_size)
    weights: Plan = {"embed": ((EMBED, whole),)}
    for i in range(config.num_layers):
        prefix = f"model.layers.{i}."
        layer = _layer_plan(config, prefix)
        if i >= config.num_layers - config.consumers:
            layer |= _cross_plan(config, prefix)
        weights |= {f"layers.{i}.{name}": parts for name, parts in layer.items()}
    if config.consumers:
        weights |= _shared_plan(config)
    weights["norm"] = (("model.norm.weight", (config.hidden_size,)),)
    if not config.tied:
        weights["head"] = ((HEAD, whole),)
    return weights


def check_names(weights: Plan, present: set[str]) -> None:
    """Raises DsparkError when the checkpoint lacks a tensor, or holds one that the config does not call for."""
    expected = {name for parts in weights.values() for name, _ in parts}
    ignorable = {name for name in present if name.endswith(_HARMLESS)} | {HEAD}  # a tied model's head: see check_tied
    for what, names in (("missing", expected - present), ("unexpected", present - expected - ignorable)):
        if names:
            some = ", ".join(sorted(names)[:3]) + (", ..." if len(names) > 3 else "")
            raise DsparkError(
                f"target weights: expected the tensors config.json calls for, but got {len(names)} {what}: {some}. "
                "Config and weights are not of the same model, or a file is incomplete."
            )


def check_tied(config: DecoderConfig, present: set[str], read: Callable[[str], Tensor]) -> None:
    """Raises DsparkError when a model that says it has no head of its own comes with a different one."""
    if config.tied and HEAD in present and not torch.equal(read(HEAD), read(EMBED)):
        raise DsparkError(
            f"target weights: expected {HEAD} to equal the embedding (config.json says tie_word_embeddings), but got "
            "another matrix. Set tie_word_embeddings to false in config.json to use it."
        )


def gather(weights: Plan, read: Callable[[str], Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The fused weights in ``dtype``, each in memory of its own. ``read`` returns a checkpoint tensor by name."""
    return {name: torch.cat([_part(read, part).to(dtype) for part in parts]) for name, parts in weights.items()}


def random_weights(config: DecoderConfig, seed: int, dtype: torch.dtype, scale: float = 0.1) -> dict[str, Tensor]:
    """Fused weights drawn at random (norms near one): a target of any shape for tests and benches, no checkpoint."""
    generator = torch.Generator().manual_seed(seed)

    def read(name: str) -> Tensor:
        noise = torch.randn(shapes[name], generator=generator) * scale
        return noise + 1 if "norm" in name else noise

    weights = plan(config)
    shapes = dict(part for parts in weights.values() for part in parts)
    return gather(weights, read, dtype)


def starting_weights(config: DecoderConfig, seed: int, dtype: torch.dtype, scale: float) -> dict[str, Tensor]:
    """As random_weights, with norms held between 1/2 and 3/2: where training from nothing starts."""
    drawn = random_weights(config, seed, dtype, scale)
    return {name: t.clamp(0.5, 1.5) if "norm" in name else t for name, t in drawn.items()}


def layer_of(tensors: Mapping[str, Tensor], index: int) -> Layer:
    found = {field.name: tensors.get(f"layers.{index}.{field.name}") for field in fields(Layer)}
    return Layer(**found)  # type: ignore[arg-type]  # plan() names every field that may not be None


def fingerprint(config: DecoderConfig, tensors: Mapping[str, Tensor]) -> str:
    """sha256 over the config and each weight's name, dtype, shape and bytes, as used. hashlib lets threads overlap."""
    with ThreadPoolExecutor(_HASH_THREADS) as pool:
        hashes = dict(zip(tensors, pool.map(tensor_hash, tensors.values()), strict=True))
    return sha256_json({"config": config.as_dict(), "tensors": hashes})


def _layer_plan(config: DecoderConfig, prefix: str) -> Plan:
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * head_dim, config.num_kv_heads * head_dim
    attn, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    qkv = ((f"{attn}q_proj", q, hidden), (f"{attn}k_proj", kv, hidden), (f"{attn}v_proj", kv, hidden))
    linears = {
        "qkv": (qkv, config.qkv_bias),
        "output": (((f"{attn}o_proj", hidden, q),), config.output_bias),
        "gate_up": (((f"{mlp}gate_proj", inner, hidden), (f"{mlp}up_proj", inner, hidden)), config.mlp_bias),
        "down": (((f"{mlp}down_proj", hidden, inner),), config.mlp_bias),
    }
    weights: Plan = {
        "input_norm": ((f"{prefix}input_layernorm.weight", (hidden,)),),
        "post_norm": ((f"{prefix}post_attention_layernorm.weight", (hidden,)),),
    }
    for name, (parts, biased) in linears.items():
        weights[name] = tuple((f"{part}.weight", (rows, columns)) for part, rows, columns in parts)
        if biased:
            weights[f"{name}_bias"] = tuple((f"{part}.bias", (rows,)) for part, rows, _ in parts)
    if config.qk_norm:
        weights["q_norm"] = ((f"{attn}q_norm.weight", (head_dim,)),)
        weights["k_norm"] = ((f"{attn}k_norm.weight", (head_dim,)),)
    return weights


def _cross_plan(config: DecoderConfig, prefix: str) -> Plan:
    """What a consumer layer has more: queries for the shared keys and values."""
    hidden, q = config.hidden_size, config.num_heads * config.head_dim
    return {
        "cross_norm": ((f"{prefix}cross_attention_layernorm.weight", (hidden,)),),
        "cross_q": ((f"{prefix}cross_attn.q_proj.weight", (q, hidden)),),
        "cross_output": ((f"{prefix}cross_attn.o_proj.weight", (hidden, q)),),
    }


def _shared_plan(config: DecoderConfig) -> Plan:
    hidden, kv = config.hidden_size, config.num_kv_heads * config.head_dim
    names = [f"model.shared_kv.{name}_proj.weight" for name in "kv"]
    return {
        "shared_norm": (("model.shared_kv.norm.weight", (hidden,)),),
        "shared_kv": tuple((name, (kv, hidden)) for name in names),
    }


def _part(read: Callable[[str], Tensor], part: Part) -> Tensor:
    name, shape = part
    tensor = read(name)
    if tuple(tensor.shape) != shape or not tensor.is_floating_point():
        raise DsparkError(
            f"target weights: expected {name} to be floating point of shape {list(shape)}, but got {tensor.dtype} "
            f"{list(tensor.shape)}. Config and weights are not of the same model."
        )
    return tensor
