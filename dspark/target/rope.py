"""Rotary position embedding: which frequencies a config asks for, and their cosines and sines by position.

Both config schemas are read: ``rope_parameters`` (newer) and ``rope_theta`` + ``rope_scaling`` (older). Scalings:
default, linear, llama3, yarn. Left out on purpose, and refused: dynamic and longrope (the angle would depend on the
sequence's length, so a token's bits would change as the sequence grows), partial rotary, a dict per layer type.
Formulas: arXiv:2104.09864 (rotary), arXiv:2309.00071 (yarn), the Llama 3.1 release (llama3).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dspark.contracts import DsparkError
from dspark.rotary import check_rotary, is_number

KINDS = ("default", "linear", "llama3", "yarn")
_DEFAULT_THETA = 10000.0
_NUMBERS = (
    "rope_theta", "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor",
    "mscale", "mscale_all_dim",
)  # fmt: skip
_NEEDED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary parameters, resolved: fields that the kind does not use keep their neutral value.

    original_max: context length of pretraining, in tokens (llama3, yarn). attention_factor multiplies cos and sin.
    """

    kind: str = "default"
    theta: float = _DEFAULT_THETA
    factor: float = 1.0
    original_max: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


def read_rope(raw: Mapping[str, Any]) -> RopeConfig:
    """The rotary parameters of a config.json dict, either schema. Raises DsparkError on what is refused or missing."""
    found = {key: _resolve(raw, key) for key in ("rope_parameters", "rope_scaling") if raw.get(key)}
    if len(set(found.values())) > 1:
        raise DsparkError(
            f"target config: expected rope_parameters and rope_scaling to agree, but got {found['rope_parameters']} "
            f"and {found['rope_scaling']}. Remove one of them from config.json."
        )
    return next(iter(found.values())) if found else _resolve({**raw, "rope_parameters": {}}, "rope_parameters")


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Angle per position of each rotated pair, [head_dim / 2] fp32."""
    periods = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    plain = 1.0 / periods
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(plain, rope)
    if rope.kind == "yarn":
        return _yarn(periods, rope, head_dim)
    return plain


@dataclass
class RopeTable:
    """cos and sin by position, [P, head_dim / 2] fp32, grown on demand.

    Angles are fp32 products (as the checkpoints were trained with), their cosines are taken in fp64 and rounded once,
    in blocks of fixed size: a position's bits do not depend on how far the table reaches or who asked first.
    """

    rope: RopeConfig
    head_dim: int
    block: int = 1024
    cos: Tensor = field(init=False)
    sin: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self._inverse = inverse_frequencies(self.rope, self.head_dim)
        self.cos = self.sin = torch.empty(0, self.head_dim // 2)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [N, head_dim / 2] fp32, for positions [N] int64 >= 0."""
        longest = int(positions.max()) if positions.numel() else -1
        while longest >= len(self.cos):
            self._grow()
        return self.cos.index_select(0, positions), self.sin.index_select(0, positions)

    def _grow(self) -> None:
        start = len(self.cos)
        steps = torch.arange(start, start + self.block, dtype=torch.float32)
        angles = (steps[:, None] * self._inverse).double()
        scale = self.rope.attention_factor
        self.cos = torch.cat([self.cos, angles.cos().float() * scale])
        self.sin = torch.cat([self.sin, angles.sin().float() * scale])


def _resolve(raw: Mapping[str, Any], key: str) -> RopeConfig:
    given = raw[key]
    if not isinstance(given, Mapping) or any(isinstance(value, Mapping) for value in given.values()):
        raise DsparkError(f"target config: expected {key} to be one flat dict for all layers, but got {given!r}.")
    kind = given.get("rope_type", given.get("type", "default"))
    if not isinstance(kind, str) or kind not in KINDS:
        raise DsparkError(f"target config: expected a rope type of {', '.join(KINDS)}, but got {kind!r} in {key}.")
    for place in (raw, given):
        if place.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise DsparkError(
                f"target config: expected whole heads to be rotated, but got partial_rotary_factor "
                f"{place['partial_rotary_factor']}. Partial rotary is not supported."
            )
    nullable = {"factor"} if kind == "yarn" else set()  # then it is what the context grew by
    missing = [name for name in _NEEDED[kind] if name not in given or (given[name] is None and name not in nullable)]
    if missing:
        raise DsparkError(f"target config: expected {key} of type {kind} to hold {missing}, but got {dict(given)}.")
    theta = next((place["rope_theta"] for place in (given, raw) if place.get("rope_theta") is not None), _DEFAULT_THETA)
    _check_numbers({"rope_theta": theta, **given}, raw, key)
    rope = _BUILD.get(kind, _build_plain)(kind, float(theta), given, raw)
    check_rotary(_as_read(rope), f"target config: {key}")
    return rope


def _check_numbers(given: Mapping[str, Any], raw: Mapping[str, Any], key: str) -> None:
    """Before any is converted. null counts as absent."""
    lengths = ("original_max_position_embeddings", "max_position_embeddings")
    for name, value in [*given.items(), *((name, raw.get(name)) for name in lengths)]:
        numeric = name in _NUMBERS or name in lengths
        if numeric and value is not None and not is_number(value):
            raise DsparkError(f"target config: expected {name} ({key}) to be a finite number, but got {value!r}.")
        if numeric and value is not None and abs(value) > 1e30:
            raise DsparkError(f"target config: expected {name} ({key}) to be at most 1e30, but got {value!r}.")


def _as_read(rope: RopeConfig) -> dict[str, Any]:
    """What the kind reads, under config.json's names: ``check_rotary``'s argument."""
    found = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.kind != "default":
        found["factor"] = rope.factor
    if rope.kind == "llama3":
        found |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        found |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "attention_factor": rope.attention_factor}
    return found | ({"original_max_position_embeddings": rope.original_max} if rope.original_max else {})


def _build_plain(kind: str, theta: float, given: Mapping[str, Any], raw: Mapping[str, Any]) -> RopeConfig:
    return RopeConfig(kind, theta, factor=float(given["factor"]) if kind == "linear" else 1.0)


def _build_llama3(kind: str, theta: float, given: Mapping[str, Any], raw: Mapping[str, Any]) -> RopeConfig:
    return RopeConfig(
        kind,
        theta,
        factor=float(given["factor"]),
        original_max=_original_max(given, raw),
        low_freq_factor=float(given["low_freq_factor"]),
        high_freq_factor=float(given["high_freq_factor"]),
    )


def _build_yarn(kind: str, theta: float, given: Mapping[str, Any], raw: Mapping[str, Any]) -> RopeConfig:
    original = _original_max(given, raw)
    ratio = (raw.get("max_position_embeddings") or original) / original
    factor = float(ratio if given["factor"] is None else given["factor"])
    scale = given.get("attention_factor")
    if scale is None:
        scale = _yarn_scale(max(factor, 1.0), given.get("mscale"), given.get("mscale_all_dim"))
    return RopeConfig(
        kind,
        theta,
        factor,
        original,
        beta_fast=float(_or(given.get("beta_fast"), 32.0)),
        beta_slow=float(_or(given.get("beta_slow"), 1.0)),
        truncate=bool(given.get("truncate", True)),
        attention_factor=float(scale),
    )


def _or(value: Any, default: float) -> Any:
    """null counts as absent, 0 does not."""
    return default if value is None else value


_BUILD = {"llama3": _build_llama3, "yarn": _build_yarn}


def _original_max(given: Mapping[str, Any], raw: Mapping[str, Any]) -> int:
    for place, key in (
        (raw, "original_max_position_embeddings"),
        (given, "original_max_position_embeddings"),
        (raw, "max_position_embeddings"),
    ):
        if place.get(key):
            return int(place[key])
    raise DsparkError("target config: expected original_max_position_embeddings for this rope type, but got none.")


def _yarn_scale(factor: float, mscale: float | None, mscale_all: float | None) -> float:
    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    return scale(mscale) / scale(mscale_all) if mscale and mscale_all else scale(1.0)


def _llama3(plain: Tensor, rope: RopeConfig) -> Tensor:
    """Long wavelengths are divided by factor, short ones kept, those between blended."""
    wavelength = 2 * math.pi / plain
    longest, shortest = rope.original_max / rope.low_freq_factor, rope.original_max / rope.high_freq_factor
    blend = (rope.original_max / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * plain / rope.factor + blend * plain
    return torch.where(wavelength > longest, plain / rope.factor, torch.where(wavelength < shortest, plain, blended))


def _yarn(periods: Tensor, rope: RopeConfig, head_dim: int) -> Tensor:
    """Pairs that turn often keep their frequency, pairs that turn seldom are divided by factor, a ramp between."""

    def pair_of(turns: float) -> float:
        return head_dim * math.log(rope.original_max / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high = high + 0.001 if low == high else high  # a ramp of no width would divide by zero
    keep = 1 - ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return 1.0 / (rope.factor * periods) * (1 - keep) + 1.0 / periods * keep
