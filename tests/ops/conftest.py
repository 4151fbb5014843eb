"""Fresh memory is poisoned: under deterministic algorithms torch.empty fills floats with NaN and integers with their
maximum, so an element an op forgot to write shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

THREAD_COUNTS = (1, 2, 3)


@pytest.fixture(autouse=True)
def _poison() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    assert torch.empty(4).isnan().all(), "torch.empty is not poisoned"
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def per_thread_count() -> Iterator[Callable[[Callable[[], torch.Tensor]], list[torch.Tensor]]]:
    """Calls a function under each thread count; restores the count afterwards."""
    before = torch.get_num_threads()

    def run(call: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
        results = []
        for count in THREAD_COUNTS:
            torch.set_num_threads(count)
            results.append(call())
        return results

    yield run
    torch.set_num_threads(before)
