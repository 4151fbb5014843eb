"""Invariant matrix product and its gradient."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dspark.contracts import DsparkError
from dspark.ops.backend import backend, recording


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    """x[N, I] @ weight[O, I].T (+ bias[O]) -> [N, O].

    fp32 or bf16 (all of one dtype); every output is a sum in fp32 of one fixed order over k, then the bias, then one
    rounding to ``out_dtype`` (default x's dtype; torch.float32 keeps bf16 products unrounded, for an LM head). On the
    CPU the weight is packed once per tensor object (cpu/linear.py). Raises DsparkError on other dtypes or shapes.
    """
    if recording(x, weight, bias):
        return _Linear.apply(x, weight, bias, out_dtype)
    return backend(x).linear(x, weight, bias, out_dtype)


def wide(dtype: torch.dtype) -> torch.dtype:
    """What gradients are accumulated in: fp32, or fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def plain_backward(formula: Callable[..., Any]) -> Callable[..., Any]:
    """For the backward of a Function: differentiable once (a second derivative is an error, never silently wrong), and
    outside autocast, which would compute it in bf16."""

    @functools.wraps(formula)
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if torch.is_grad_enabled():  # exactly under create_graph=True
            raise DsparkError(
                "ops: expected a first derivative, but got create_graph=True: a gradient of these operations cannot be "
                "differentiated again. Leave it out."
            )
        with torch.autocast(gradients[0].device.type, enabled=False):
            return formula(ctx, *gradients)

    return backward


class _Linear(torch.autograd.Function):
    """dx = dy W, dW = dy^T x, db = sum of dy over rows, in fp32 and rounded once. Only the forward is row-invariant."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return backend(x).linear(x, weight, bias, out_dtype)

    @staticmethod
    @plain_backward
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad[:3]
        dy = dy.to(wide(x.dtype))
        dx = (dy @ weight.to(dy.dtype)).to(x.dtype) if for_x else None
        dweight = (dy.T @ x.to(dy.dtype)).to(weight.dtype) if for_weight else None
        return dx, dweight, dy.sum(0).to(x.dtype) if for_bias else None, None
