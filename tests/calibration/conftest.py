from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def heads() -> ModuleType:
    """heads.py as a module: pytest's importlib mode puts no test folder on sys.path."""
    name = "dspark_calibration_heads"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("heads.py"))
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


@pytest.fixture(autouse=True)
def _no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """No power cut is tested here, and waiting for a disk is most of the time these tests would take."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)
