"""Loads the kernels and holds what every op shares: dtype codes, argument checks, the thread count.

The checks are few and cheap, and their messages are built only on failure: an op is called a few hundred times per
decode step. Ranges and ids are checked inside the kernels, which return a status.
"""

from __future__ import annotations

import ctypes
import functools
from typing import NoReturn

import torch

import dspark_kernels
from dspark.contracts import DsparkError

DTYPE_CODE = {torch.float32: 0, torch.bfloat16: 1}
threads = torch.get_num_threads
OUT_OF_MEMORY, BROKEN_ROW, OUTSIDE, STALE = 1, 2, 4, 8  # status bits a kernel returns


@functools.cache
def lib() -> ctypes.CDLL:
    """The compiled kernels. Raises DsparkError when they cannot be built here."""
    try:
        return dspark_kernels.library()
    except RuntimeError as error:
        raise DsparkError(str(error)) from error


def refuse(op: str, expected: str, got: object, remedy: str = "Mend the arguments' shapes or dtypes.") -> NoReturn:
    """Raises the DsparkError of a wrong argument."""
    raise DsparkError(f"{op}: expected {expected}, but got {got}. {remedy}")


def dtype_code(op: str, x: torch.Tensor) -> int:
    """0 for fp32, 1 for bf16; DsparkError for anything else."""
    code = DTYPE_CODE.get(x.dtype)
    if code is None:
        refuse(op, "float32 or bfloat16", x.dtype, "Convert the tensor first.")
    return code


def check(op: str, *tensors: torch.Tensor) -> None:
    """Every tensor must be a contiguous CPU tensor, and none may want a gradient while gradients are recorded."""
    for t in tensors:
        if not (t.is_cpu and t.is_contiguous()):
            _refuse_layout(op, t)
    check_grad(op, *tensors)


def check_grad(op: str, *tensors: torch.Tensor) -> None:
    """DsparkError when gradients are recorded and a tensor wants one: what has a gradient comes here unrecorded."""
    if torch.is_grad_enabled():
        for t in tensors:
            if t.requires_grad:
                refuse(
                    op, "inputs without requires_grad (drawing has no gradient)", "one that records gradients",
                    "Call it under torch.no_grad(), or detach the input.",
                )  # fmt: skip


def row_stride(op: str, x: torch.Tensor) -> int:
    """Elements from one row of x[N, heads, D] (or [N, H]) to the next; within a row x must be contiguous."""
    inner = x.stride()[1:]
    packed = inner == (1,) if x.dim() == 2 else inner == (x.shape[2], 1) or (inner[1] == 1 and x.shape[1] == 1)
    if not (x.is_cpu and packed):
        _refuse_layout(op, x)
    return x.stride(0)


def _refuse_layout(op: str, t: torch.Tensor) -> NoReturn:
    got = f"shape {tuple(t.shape)} strides {t.stride()}" if t.is_cpu else f"a {t.device.type} tensor"
    refuse(op, "contiguous CPU tensors", got, "Call .cpu() or .contiguous() first.")


def raise_status(op: str, status: int) -> NoReturn:
    """Turns a kernel's non-zero status into an exception."""
    if status & BROKEN_ROW:
        refuse(
            op, "logits without NaN or +inf and with a finite entry in every row", "a row that breaks that",
            "The weights or inputs of the model are broken, or its dtype overflowed.",
        )  # fmt: skip
    if status & OUTSIDE:
        refuse(op, "indices inside their tables", "one outside", "Mend begin / end, or the ids.")
    if status & STALE:
        refuse(op, "weights that stay as they are during a call", "one that something writes meanwhile", "Wait for it.")
    raise MemoryError(f"{op}: the kernel could not allocate its scratch buffer.")
