"""Loads the kernels and holds what every op shares: dtype codes, argument checks, the thread count.

The checks are few and cheap on purpose: an op is called a few hundred times per decode step.
"""

from __future__ import annotations

import ctypes
import functools

import torch

import dspark_kernels
from dspark.contracts import DsparkError

DTYPE_CODE = {torch.float32: 0, torch.bfloat16: 1}
threads = torch.get_num_threads


@functools.cache
def lib() -> ctypes.CDLL:
    """The compiled kernels. Raises DsparkError when they cannot be built here."""
    try:
        return dspark_kernels.library()
    except RuntimeError as error:
        raise DsparkError(str(error)) from error


def dtype_code(op: str, x: torch.Tensor) -> int:
    """0 for fp32, 1 for bf16; DsparkError for anything else."""
    code = DTYPE_CODE.get(x.dtype)
    if code is None:
        raise DsparkError(f"{op}: expected float32 or bfloat16, but got {x.dtype}. Convert the tensor first.")
    return code


def check(op: str, *tensors: torch.Tensor) -> None:
    """Every tensor must be a contiguous CPU tensor, and none may want a gradient while gradients are recorded."""
    for t in tensors:
        if not t.is_contiguous() or t.device.type != "cpu":
            _refuse_layout(op, t)
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise DsparkError(
            f"{op}: expected inputs without requires_grad (the op has no backward), but got one that records "
            "gradients. Call it under torch.no_grad(), or detach the input."
        )


def _refuse_layout(op: str, t: torch.Tensor) -> None:
    got = f"a {t.device.type} tensor" if t.device.type != "cpu" else f"shape {tuple(t.shape)} strides {t.stride()}"
    raise DsparkError(f"{op}: expected contiguous CPU tensors, but got {got}. Call .cpu() or .contiguous() first.")


def require(ok: bool, op: str, expected: str, got: object) -> None:
    """DsparkError unless ok."""
    if not ok:
        raise DsparkError(f"{op}: expected {expected}, but got {got}. Mend the shapes or dtypes of the arguments.")


def out_of_memory(op: str) -> None:
    raise MemoryError(f"{op}: the kernel could not allocate its scratch buffer.")
