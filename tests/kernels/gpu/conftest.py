"""The kernels of this folder run in Triton's interpreter, on CPU tensors. It reads the variable when a kernel is
defined, so it must be set before any of them is imported."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton", reason="Triton is not installed")

from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


@pytest.fixture(autouse=True)
def _poison() -> Iterator[None]:
    """Fresh memory is NaN, or the largest integer: an element left unwritten shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def _plain_dot(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's tl.dot is a BLAS call whose last bits change with a row's place in the tile. This one adds
    products in the order of k, so that what is compared is the kernel around it; whether a tensor core's product
    depends on the place is for kernels/device_check.py to see."""

    def chain(builder, a, b, acc, *_):
        total, left, right = acc.data, a.data.astype(np.float32), b.data.astype(np.float32)
        for k in range(left.shape[1]):
            total = total + left[:, k, None] * right[k]
        return TensorHandle(total, acc.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", chain)
