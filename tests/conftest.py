"""What every test shares: few threads, a hypothesis profile that repeats itself, and no seed left to chance."""

from __future__ import annotations

import os

import hypothesis
import pytest
import torch

BESIDE_OTHERS = "PYTEST_XDIST_WORKER" in os.environ
THREADS = int(os.environ.get("OMP_NUM_THREADS") or (1 if BESIDE_OTHERS else min(2, os.cpu_count() or 1)))

torch.set_num_threads(THREADS)
hypothesis.settings.register_profile("dspark", derandomize=True, deadline=None, print_blob=True, database=None)
hypothesis.settings.load_profile("dspark")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Tests may draw inputs from torch's global generator; the package itself never does."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's own DEEPINFER_* variables must not steer the tests."""
    for name in [name for name in os.environ if name.startswith("DEEPINFER_")]:
        monkeypatch.delenv(name)
