"""A tiny target, tiny trajectories (written as the rollout room writes them) and modules over them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch


def _load(name: str) -> Any:
    """tests/training/<name>.py as a module: shared with the workers of two-process tests, which pytest does not run."""
    full = f"dspark_training_{name}"
    if full not in sys.modules:
        spec = importlib.util.spec_from_file_location(full, Path(__file__).with_name(f"{name}.py"))
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    return sys.modules[full]


@pytest.fixture(scope="session")
def tiny() -> Any:
    return _load("tiny")


@pytest.fixture(scope="session")
def runs() -> Any:
    return _load("runs")


@pytest.fixture(scope="session")
def shared_data(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Runs that two processes share out in different ways, by name: arguments of runs.fit."""
    root = tmp_path_factory.mktemp("shared")
    rows, more = tiny.make_rows(12), tiny.make_rows(17, seed=1)
    train, val = (str(tiny.write_directory(root / name, rows=r)) for name, r in (("train", rows), ("val", more)))
    # Two sequences of 17 tokens: one that is all prompt but for a token, so that the rank that gets it has no anchor.
    short = [
        {**rows[0], "trajectory_id": i, "prompt_ids": [6] * (17 - n), "response_ids": [7] * n}
        for i, n in (("a", 13), ("b", 1))
    ]
    total = sum(len(r["prompt_ids"]) + len(r["response_ids"]) for r in rows)
    whole = {"train": train, "val": val, "budget": 10_000, "steps": 3}
    half = {**whole, "budget": -(-total // 2)}
    few = {**whole, "train": str(tiny.write_directory(root / "short", rows=short))}
    return {"idle": whole, "halves": half, "short": {**few, "budget": 17}, "short whole": few}


@pytest.fixture
def target(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The tiny target, and load_target giving it to every module of the test."""
    made = tiny.make_target()
    monkeypatch.setattr("dspark.training.frozen.load_target", lambda source, dtype: made)
    return made


@pytest.fixture
def data_dir(tiny: Any, tmp_path: Path) -> Path:
    """A trajectory directory of 12 sequences with rounds."""
    return tiny.write_directory(tmp_path / "train", count=12)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As the processes that the tests of this room start: gradients depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
