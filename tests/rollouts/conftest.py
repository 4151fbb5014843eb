from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest


def load_module(name: str, path: Path) -> ModuleType:
    """A helper file as a module: pytest's importlib mode puts no test folder on sys.path."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


@pytest.fixture(scope="session")
def fakes() -> ModuleType:
    """fakes.py."""
    return load_module("dspark_rollout_fakes", Path(__file__).with_name("fakes.py"))


@pytest.fixture(scope="session")
def models() -> ModuleType:
    """The runner tests' tiny random target and draft model: make_target, make_drafter."""
    return load_module("dspark_rollout_models", Path(__file__).parents[1] / "runner" / "conftest.py")


@pytest.fixture(autouse=True)
def _no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """No power cut is tested here, and waiting for a disk is most of the time these tests would take."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture
def finished(fakes: ModuleType, tmp_path: Path) -> Path:
    """A complete run: 18 trajectories of 6 prompts in 6 shards."""
    folder = tmp_path / "finished"
    fakes.run(folder)
    return folder
