"""The operations on CUDA tensors: the Triton kernels under the names of ``dspark.ops``. Imported when one comes.

Every call runs on its tensors' own device, and what a launcher refuses becomes a DsparkError. Where the CPU ops raise
on a broken row or a range outside the arena, a kernel cannot (it would wait for the device): the row gives -1 or NaN,
the range is cut to the arena. Shaping by top-k and top-p has no kernel yet: it goes through the CPU's. Also missing:
hints of the longest context and of tiles, so attention launches for the whole arena. **Not yet run on a GPU.**
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dspark.contracts import DsparkError
from dspark.ops import cpu
from dspark_kernels.gpu import attention as _attention
from dspark_kernels.gpu import draw, logsoftmax, matmul, norm, philox, pointwise


def _on_its_device(launch: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(launch)
    def call(first: Tensor, *args: Any, **kwargs: Any) -> Any:
        try:
            with torch.cuda.device(first.device if first.is_cuda else -1):  # -1: leave it (the interpreter's CPU)
                return launch(first, *args, **kwargs)
        except ValueError as error:
            raise DsparkError(str(error)) from error

    return call


linear = _on_its_device(matmul.linear)
rms_norm = _on_its_device(norm.rms_norm)
add_rms_norm = _on_its_device(norm.add_rms_norm)
rotary = _on_its_device(pointwise.rotary)
silu_mul = _on_its_device(pointwise.silu_mul)
log_softmax = _on_its_device(logsoftmax.log_softmax)
raw_logprob = _on_its_device(logsoftmax.raw_logprob)
gumbel_argmax = _on_its_device(draw.gumbel_argmax)
log_of = _on_its_device(draw.log_of)
uniform = _on_its_device(philox.uniform)


@_on_its_device
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    begin: Tensor,
    end: Tensor,
    scale: float,
    k2: Tensor | None = None,
    v2: Tensor | None = None,
    begin2: Tensor | None = None,
    end2: Tensor | None = None,
) -> Tensor:
    if k2 is not None and begin2 is not None and end2 is not None:
        begin2, end2 = (t.clamp(0, k2.shape[0]) for t in (begin2, end2))
    begin, end = (t.clamp(0, k.shape[0]) for t in (begin, end))
    return _attention.attention(q, k, v, begin, end, scale, k2, v2, begin2, end2)


def shape_probs(logits: Tensor, *law: Tensor) -> Tensor:
    return cpu.shape_probs(logits.cpu(), *(t.cpu() for t in law)).to(logits.device)
