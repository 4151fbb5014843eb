"""Rotary position tables of the draft layers: cos and sin [N, D/2] fp32 for any positions.

Angles are position * inverse frequency, rounded to fp32 as in the usual implementations; cosines are then taken in
fp64 over chunks of fixed shape, so the bits of a position's row depend on the position alone: a vectorised cosine may
differ in its last bit between the body and the tail of a tensor.
Types: default, linear, llama3 (arXiv:2407.21783), yarn (arXiv:2309.00071). Left out: dynamic scaling, whose values
depend on the sequence's length.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dspark.contracts import DsparkError
from dspark.rotary import check_rotary

_CHUNK = 64  # positions per table chunk: small enough that no thread count splits it
_REQUIRED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
_OPTIONAL: dict[str, tuple[str, ...]] = {"yarn": ("beta_fast", "beta_slow", "attention_factor", "truncate")}


def check_rope(parameters: Any) -> None:
    """Raises DsparkError unless the parameters are {"rope_theta", "rope_type"} and what the type needs, no more, each
    value in its range."""
    if not isinstance(parameters, dict):
        raise DsparkError(f"drafter config: expected rope_parameters to be an object, but got {parameters!r}.")
    kind = parameters.get("rope_type")
    if not isinstance(kind, str) or kind not in _REQUIRED:
        raise DsparkError(
            f"drafter config: expected rope_parameters.rope_type to be one of {', '.join(_REQUIRED)}, but got {kind!r}."
        )
    required = {"rope_theta", "rope_type", *_REQUIRED[kind]}
    missing, unknown = required - parameters.keys(), parameters.keys() - required - set(_OPTIONAL.get(kind, ()))
    if missing or unknown:
        raise DsparkError(
            f"drafter config: expected rope_parameters of type {kind} to hold {', '.join(sorted(required))}, but got "
            f"{', '.join(sorted(map(str, parameters)))}."
        )
    check_rotary(parameters, "drafter config: rope_parameters")


def rope_parameters_of(rope: Any) -> dict[str, Any]:
    """A target's rotary settings (dspark.target.rope.RopeConfig) as the draft model's own rope_parameters."""
    values = {
        "factor": rope.factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_max,
        "beta_fast": rope.beta_fast,
        "beta_slow": rope.beta_slow,
        "attention_factor": rope.attention_factor,
        "truncate": rope.truncate,
    }
    used = (*_REQUIRED[rope.kind], *_OPTIONAL.get(rope.kind, ()))
    return {"rope_theta": rope.theta, "rope_type": rope.kind, **{name: values[name] for name in used}}


class Rope:
    """Tables for one head size, grown on demand. Plain object: nothing of it belongs in a checkpoint."""

    def __init__(self, parameters: dict[str, Any], head_dim: int):
        self.inverse, self.factor = _frequencies(parameters, head_dim)
        self._cos = torch.empty(0, head_dim // 2)
        self._sin = torch.empty(0, head_dim // 2)

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [...] int64 >= 0 -> cos, sin [..., D/2] fp32."""
        if positions.numel():
            self._grow(int(positions.max()) + 1)
        if self._cos.device != positions.device:
            self._cos, self._sin = self._cos.to(positions.device), self._sin.to(positions.device)
        return self._cos[positions], self._sin[positions]

    def _grow(self, rows: int) -> None:
        have = self._cos.shape[0]
        if rows <= have:
            return
        wanted = max(rows, 2 * have)
        angles = [self._angles(start) for start in range(have, wanted, _CHUNK)]
        parts = [((a.cos() * self.factor).float(), (a.sin() * self.factor).float()) for a in angles]
        self._cos = torch.cat([self._cos.cpu(), *(c for c, _ in parts)])
        self._sin = torch.cat([self._sin.cpu(), *(s for _, s in parts)])

    def _angles(self, start: int) -> Tensor:
        positions = torch.arange(start, start + _CHUNK, dtype=torch.float32)
        return (positions[:, None] * self.inverse[None, :]).double()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., heads, D] by cos, sin [..., D/2] (halves rotated), with autograd. The inference twin is ops.rotary."""
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def _frequencies(parameters: dict[str, Any], head_dim: int) -> tuple[Tensor, float]:
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    inverse = 1.0 / (float(parameters["rope_theta"]) ** exponent)
    kind = parameters["rope_type"]
    if kind == "linear":
        return inverse / parameters["factor"], 1.0
    if kind == "llama3":
        return _llama3(inverse, parameters), 1.0
    if kind == "yarn":
        return _yarn(inverse, parameters, head_dim)
    return inverse, 1.0


def _llama3(inverse: Tensor, p: dict[str, Any]) -> Tensor:
    original, low, high = p["original_max_position_embeddings"], p["low_freq_factor"], p["high_freq_factor"]
    wavelength = 2 * math.pi / inverse
    smooth = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - smooth) * inverse / p["factor"] + smooth * inverse


def _yarn(inverse: Tensor, p: dict[str, Any], head_dim: int) -> tuple[Tensor, float]:
    original, base = p["original_max_position_embeddings"], float(p["rope_theta"])

    def dimension(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension(p.get("beta_fast", 32)), dimension(p.get("beta_slow", 1))
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = ((torch.arange(head_dim // 2).float() - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
    factor = p.get("attention_factor") or 0.1 * math.log(p["factor"]) + 1.0
    return inverse / p["factor"] * ramp + inverse * (1 - ramp), float(factor)
