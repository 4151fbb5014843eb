"""Linear map, norm and token table, each with two arithmetic paths behind one call.

``module.training`` chooses: plain torch with autograd, or the inference ops, whose bits for a row depend on that row
alone. Weights start from a generator that the caller hands in (``start``): no global randomness.
``sigmoid`` and ``tanh`` are here too: torch's own may round the tail of a tensor differently from its body, so a row's
bits would depend on its neighbours.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark import ops


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, training: bool, out_dtype: torch.dtype | None = None
) -> Tensor:
    """x [..., I], weight [O, I] -> [..., O] in out_dtype (default: x's)."""
    if training:
        y = F.linear(x, weight, bias)
        return y if out_dtype is None else y.to(out_dtype)
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    return ops.linear(flat, weight, bias, out_dtype=out_dtype).view(*x.shape[:-1], weight.shape[0])


class Dense(nn.Module):
    """y = x W^T + b; weight [n_out, n_in]. out_fp32: result in fp32 whatever the weights' dtype."""

    def __init__(self, n_in: int, n_out: int, bias: bool = False, out_fp32: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_out, n_in))
        self.bias = nn.Parameter(torch.zeros(n_out)) if bias else None
        self.out_dtype = torch.float32 if out_fp32 else None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias, self.training, self.out_dtype)


class Constant(Dense):
    """A map that starts as a constant: weight 0, the given bias [n_out]. `start` draws nothing for it, so a model with
    one more of these has the same other weights."""

    def __init__(self, n_in: int, bias: Tensor):
        super().__init__(n_in, len(bias), bias=True)
        self.weight, self.bias = nn.Parameter(torch.zeros(len(bias), n_in)), nn.Parameter(bias)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, computed in fp32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return F.rms_norm(x.float(), x.shape[-1:], None, self.eps).to(x.dtype) * self.weight
        return ops.rms_norm(x.reshape(-1, x.shape[-1]).contiguous(), self.weight, self.eps).view(x.shape)


class Table(nn.Module):
    """Rows looked up by id: ids [...] -> [..., width]."""

    def __init__(self, rows: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


@torch.no_grad()
def start(module: nn.Module, generator: torch.Generator) -> None:
    """Fresh weights below `module`, in the order of its tree: normal with deviation 1/sqrt(n_in), tables 0.02;
    constants stay as they were made."""
    for part in module.modules():
        if isinstance(part, Constant):
            continue
        if isinstance(part, Dense):
            part.weight.normal_(0.0, 1.0 / math.sqrt(part.weight.shape[1]), generator=generator)
        elif isinstance(part, Table):
            part.weight.normal_(0.0, 0.02, generator=generator)


def sigmoid(x: Tensor, training: bool) -> Tensor:
    """Logistic function of x, in x's dtype."""
    if training:
        return torch.sigmoid(x)
    return (1.0 / (1.0 + _exp(-x.float()))).to(x.dtype)


def tanh(x: Tensor, training: bool) -> Tensor:
    """Hyperbolic tangent of x, in x's dtype; off training within 1e-7 absolute (not relative: it feeds sums)."""
    if training:
        return torch.tanh(x)
    return (2.0 / (1.0 + _exp(-2.0 * x.float())) - 1.0).to(x.dtype)


_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4  # ln 2 split so that n * high is exact (Cody and Waite)


def _exp(x: Tensor) -> Tensor:
    """exp in fp32 from multiplications and additions alone, each correctly rounded: the same bits wherever x stands."""
    x = x.clamp(-87.0, 87.0)
    n = torch.floor(x * (1.0 / math.log(2.0)) + 0.5)
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    y = torch.full_like(r, 1.0 / 5040.0)
    for divisor in (720.0, 120.0, 24.0, 6.0, 2.0, 1.0, 1.0):
        y = y * r + 1.0 / divisor
    return y * ((n.to(torch.int32) + 127) << 23).view(torch.float32)  # 2**n by its bits: n is in -126..126
