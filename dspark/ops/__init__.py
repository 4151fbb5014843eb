"""Operations whose result for a row depends on that row alone: not on the rows beside it, their number, the thread
count, or where its keys lie. fp32 and bf16, fp32 arithmetic inside; fp64 by the plain references, to check gradients.

Every operation but the drawing ones has a gradient, with the same forward, taken whenever gradients are recorded: a
trainer's log-probabilities are the sampler's. backend.py chooses the implementation by device; cpu/ and gpu.py lead to
the kernels. The one importer of ``dspark_kernels``.
"""

from __future__ import annotations

from dspark.ops.attention import attention
from dspark.ops.cpu.layers import Stack
from dspark.ops.cpu.linear import forget
from dspark.ops.linear import linear
from dspark.ops.rows import add_rms_norm, rms_norm, rotary, silu_mul
from dspark.ops.sampling import gumbel_argmax, law_logprob, log_of, log_softmax, raw_logprob, shape_probs, uniform
from dspark.ops.selftest import fingerprint, self_test

__all__ = [
    "Stack",
    "add_rms_norm",
    "attention",
    "fingerprint",
    "forget",
    "gumbel_argmax",
    "law_logprob",
    "linear",
    "log_of",
    "log_softmax",
    "raw_logprob",
    "rms_norm",
    "rotary",
    "self_test",
    "shape_probs",
    "silu_mul",
    "uniform",
]
