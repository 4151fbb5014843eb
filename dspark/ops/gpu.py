"""The operations on CUDA tensors: the Triton kernels under the names of ``dspark.ops``. Imported when one comes.

Where the CPU ops raise on a broken row, a kernel cannot (it would wait for the device): the row gives -1 or NaN.
Shaping by top-k and top-p has no kernel yet and runs row by row through the reference. **Not yet run on a GPU.**
"""

from __future__ import annotations

from dspark_kernels.gpu.attention import attention
from dspark_kernels.gpu.draw import gumbel_argmax, log_of
from dspark_kernels.gpu.logsoftmax import log_softmax, raw_logprob
from dspark_kernels.gpu.matmul import linear
from dspark_kernels.gpu.norm import add_rms_norm, rms_norm
from dspark_kernels.gpu.philox import uniform
from dspark_kernels.gpu.pointwise import rotary, silu_mul
from dspark_kernels.reference import shape_probs

__all__ = [
    "add_rms_norm",
    "attention",
    "gumbel_argmax",
    "linear",
    "log_of",
    "log_softmax",
    "raw_logprob",
    "rms_norm",
    "rotary",
    "shape_probs",
    "silu_mul",
    "uniform",
]
