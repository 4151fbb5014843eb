"""Wrong arguments of the CPU operations: one DsparkError, never a traceback of another kind or memory unwritten."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dspark import ops
from dspark.contracts import DsparkError

X, K, AT = torch.zeros(2, 4), torch.zeros(3, 1, 4), torch.zeros(2, dtype=torch.int64)
CASES: dict[str, Callable[[], object]] = {
    "linear to fp16": lambda: ops.linear(X, X, out_dtype=torch.float16),
    "linear, 1-D weight": lambda: ops.linear(X, X[0]),
    "linear, fp16": lambda: ops.linear(X.half(), X.half()),
    "attention, 2-D q": lambda: ops.attention(X, K, K, AT, AT, 1.0),
    "attention, no key heads": lambda: ops.attention(torch.zeros(2, 2, 4), K[:, :0], K[:, :0], AT, AT, 1.0),
    "attention, k2 alone": lambda: ops.attention(torch.zeros(2, 2, 4), K, K, AT, AT, 1.0, k2=K),
    "attention past the arena": lambda: ops.attention(torch.zeros(2, 2, 4), K, K, AT, AT + 4, 1.0),
    "rms_norm, 1-D": lambda: ops.rms_norm(X[0], torch.zeros(4), 1e-5),
    "rms_norm, 4-D": lambda: ops.rms_norm(torch.zeros(5, 1, 8, 1), torch.zeros(1), 1e-5),
    "add_rms_norm, no columns": lambda: ops.add_rms_norm(X[:, :0], X[:, :0], torch.zeros(0), 1e-5),
    "rotary, 2-D": lambda: ops.rotary(X, X, X),
    "silu_mul, 3-D": lambda: ops.silu_mul(K),
    "raw_logprob, 1-D": lambda: ops.raw_logprob(X[0], AT),
}


@pytest.mark.parametrize("name", CASES)
def test_refused(name: str) -> None:
    with pytest.raises(DsparkError, match=r"expected .* but got"):
        CASES[name]()
