"""What every launcher does first: it checks its tensors, and brings them to the alignment that bits rest on."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16)
FP32 = (torch.float32,)
INT64 = (torch.int64,)
TRITON_TYPE = {torch.float32: "fp32", torch.bfloat16: "bf16"}

Wanted = tuple[
    Tensor, tuple[int, ...], tuple[torch.dtype, ...]
]  # a tensor, the shape and one of the dtypes it must have


def interpreting() -> bool:
    """Do kernels run in Triton's interpreter, on CPU tensors?"""
    return bool(triton.knobs.runtime.interpret)


def check(op: str, **wanted: Wanted) -> None:
    """Raises ValueError unless every tensor is contiguous, has its shape and dtype, and all lie on one device: a CUDA
    device, or the CPU when interpreting."""
    device = next(iter(wanted.values()))[0].device
    for name, (tensor, shape, dtypes) in wanted.items():
        if tensor.shape != shape or tensor.dtype not in dtypes:
            kinds = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
            raise ValueError(
                f"{op}: expected {name} {list(shape)} of {kinds}, but got {list(tensor.shape)} of {tensor.dtype}. "
                "Mend the argument's shape or dtype."
            )
        if not tensor.is_contiguous() or tensor.device != device or tensor.is_cpu != interpreting():
            place = "the CPU (TRITON_INTERPRET is set)" if interpreting() else "one CUDA device"
            raise ValueError(
                f"{op}: expected {name} contiguous and every tensor on {place}, but got strides {tensor.stride()} on "
                f"{tensor.device}, with the first tensor on {device}. Move it, or call .contiguous()."
            )


def matrix(op: str, name: str, tensor: Tensor) -> tuple[int, int]:
    """Its two sizes. Raises ValueError unless it has two dimensions."""
    if tensor.dim() != 2:
        raise ValueError(f"{op}: expected a matrix as {name}, but got shape {list(tensor.shape)}. Mend its shape.")
    return tensor.shape[0], tensor.shape[1]


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of it, at a multiple of 16 bytes.

    Triton compiles a second kernel for addresses that are not: with narrower loads, so other lanes hold other elements
    and a sum has another order. A row taken out of the middle of a tensor would change its bits.
    """
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()
