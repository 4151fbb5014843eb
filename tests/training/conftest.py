"""A tiny target, tiny trajectories (written as the rollout room writes them) and modules over them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest


def _load_tiny() -> Any:
    """tests/training/tiny.py as a module: shared with the worker of the two-process test, which pytest does not run."""
    if "dspark_training_tiny" not in sys.modules:
        spec = importlib.util.spec_from_file_location("dspark_training_tiny", Path(__file__).with_name("tiny.py"))
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    return sys.modules["dspark_training_tiny"]


@pytest.fixture(scope="session")
def tiny() -> Any:
    return _load_tiny()


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
