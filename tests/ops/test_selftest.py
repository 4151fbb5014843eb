"""The start-up proof and the record of what computed the bits."""

from __future__ import annotations

import json

import pytest
import torch

from dspark import ops
from dspark.contracts import DsparkError
from dspark.ops import selftest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_self_test_passes_here(dtype: torch.dtype) -> None:
    ops.self_test([(96, 64), (7, 13), (96, 64)], dtype)


def test_self_test_fails_on_an_op_that_looks_at_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = selftest.linear
    monkeypatch.setattr(selftest, "linear", lambda x, w: honest(x, w) + 1e-6 * x.shape[0])
    with pytest.raises(DsparkError, match="linear 7x13"):
        ops.self_test([(7, 13)])


def test_fingerprint_is_plain_and_stable() -> None:
    first = ops.fingerprint()
    assert json.loads(json.dumps(first)) == first == ops.fingerprint()
    assert {"cpu", "isa", "compiler", "kernels", "threads", "torch"} <= set(first)
