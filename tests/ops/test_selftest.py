"""The self-test passes here, and would not if an operation mixed rows."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from torch import Tensor

from dspark import ops
from dspark.contracts import DsparkError

HEADS = (6, 2, 32)
selftest = sys.modules["dspark.ops.selftest"]


def weights(dtype: torch.dtype) -> dict[str, Tensor]:
    return {"up": torch.randn(96, 64).to(dtype), "down": torch.randn(64, 96).to(dtype)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_passes_here(dtype: torch.dtype) -> None:
    assert ops.self_test(weights(dtype), HEADS) > 100


# Stack calls the code of the others, row by row: tests/target/test_stack.py holds it to their bits.
NOT_ROWWISE = {"Stack", "fingerprint", "forget", "self_test"}


@pytest.mark.parametrize("op", sorted(set(ops.__all__) - NOT_ROWWISE))
def test_an_operation_that_looks_at_the_batch_is_named(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = getattr(selftest, op)

    def mixed(x: Tensor, *args: object, **kwargs: object) -> Tensor | tuple[Tensor, ...]:
        out = honest(x, *args, **kwargs)
        return tuple(o + len(x) for o in out) if isinstance(out, tuple) else out + len(x)

    monkeypatch.setattr(selftest, op, mixed)
    with pytest.raises(DsparkError, match=rf"self-test: expected {op} .* same bits .*doctor"):
        ops.self_test(weights(torch.float32), HEADS)


def test_a_broken_weight_is_not_called_a_broken_machine() -> None:
    broken = weights(torch.float32)
    broken["down"][3, 4] = torch.nan
    with pytest.raises(DsparkError, match="finite numbers, but down"):
        ops.self_test(broken, HEADS)


def test_fingerprint_is_plain_and_stable() -> None:
    first = ops.fingerprint()
    assert json.loads(json.dumps(first)) == first == ops.fingerprint()
    assert {"cpu", "isa", "compiler", "kernels", "threads", "torch"} <= set(first)
