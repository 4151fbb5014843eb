"""Which implementation computes a tensor: the one place that looks at devices and at whether gradients are recorded.

CPU fp32 and bf16 go to the C kernels, CUDA tensors to the Triton kernels (imported only then: nothing here needs Triton
or a GPU), fp64 to the plain references, which is what gradients are checked in.
"""

from __future__ import annotations

import functools
from types import ModuleType

import torch
from torch import Tensor

from dspark.contracts import DsparkError
from dspark.ops import cpu
from dspark_kernels import reference


def backend(x: Tensor) -> ModuleType:
    """The module whose functions compute for tensors like x. Raises DsparkError for a device without kernels."""
    return reference if x.dtype == torch.float64 else kernels(x)


def kernels(x: Tensor) -> ModuleType:
    """As backend, for operations that have no fp64 form: keyed noise is fp32 by definition."""
    if x.is_cpu:
        return cpu
    if x.is_cuda:
        return _gpu()
    raise DsparkError(f"ops: expected a tensor on cpu or cuda, but got one on {x.device}. Move it there first.")


@functools.cache
def _gpu() -> ModuleType:
    try:
        from dspark.ops import gpu
    except ImportError as error:
        raise DsparkError(f"ops: expected Triton for CUDA tensors, but got: {error}. Install triton.") from error
    return gpu


def recording(*tensors: Tensor | None) -> bool:
    """Are gradients recorded, and does one of these want them?"""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
