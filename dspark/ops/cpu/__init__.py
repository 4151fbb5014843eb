"""The operations on CPU tensors, fp32 and bf16: argument checks around the C kernels. Gradients are one level up."""

from __future__ import annotations

from dspark.ops.cpu.attention import attention
from dspark.ops.cpu.linear import forget, linear
from dspark.ops.cpu.rows import add_rms_norm, rms_norm, rotary, silu_mul
from dspark.ops.cpu.sampling import gumbel_argmax, log_of, log_softmax, raw_logprob, shape_probs, uniform

__all__ = [
    "add_rms_norm",
    "attention",
    "forget",
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
