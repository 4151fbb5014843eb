"""Inference operations whose result for a row depends on that row alone: not on the rows beside it, their number,
the thread count, or where its keys lie. fp32 and bf16, fp32 arithmetic inside, contiguous CPU tensors, no autograd
(an input that records gradients is refused). The one importer of ``dspark_kernels``; GPU kernels are not here yet.
"""

from __future__ import annotations

from dspark.ops.attention import attention
from dspark.ops.linear import forget, linear
from dspark.ops.rows import add_rms_norm, rms_norm, rotary, silu_mul
from dspark.ops.sampling import gumbel_argmax, log_of, raw_logprob, shape_probs, uniform
from dspark.ops.selftest import fingerprint, self_test

__all__ = [
    "add_rms_norm",
    "attention",
    "fingerprint",
    "forget",
    "gumbel_argmax",
    "linear",
    "log_of",
    "raw_logprob",
    "rms_norm",
    "rotary",
    "self_test",
    "shape_probs",
    "silu_mul",
    "uniform",
]
