"""Conversations with known counts, reports made of them, and the runner's tiny models."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dspark.scorecard.measure import Conversation, Outcome
from dspark.scorecard.rates import DEFINITIONS
from dspark.scorecard.report import SCHEMA, _entry
from dspark.scorecard.setting import Setting
from dspark.sealed import sealed


@pytest.fixture(scope="session")
def models() -> ModuleType:
    """tests/runner/conftest.py: make_target, make_drafter."""
    path = Path(__file__).parent.parent / "runner" / "conftest.py"
    spec = importlib.util.spec_from_file_location("dspark_scorecard_models", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def entry(setting: Setting, conversations: list[Conversation], **changes: Any) -> dict[str, Any]:
    counts = {
        "tokens": 99,
        "drafted": 9,
        "accepted": 3,
        "rejected": 2,
        "differing": 0 if setting.equals_plain else None,
    }
    return _entry(Outcome(setting, tuple(conversations), **{**counts, **changes}))


@pytest.fixture
def make_report() -> Callable[..., dict[str, Any]]:
    """make_report({setting: conversations}, hash=..., **changes of an outcome): a report without models behind it."""

    def make(settings: dict[Setting, list[Conversation]], identity: str = "a" * 64, **changes: Any) -> dict[str, Any]:
        return sealed(
            {
                "schema": SCHEMA,
                "definitions": DEFINITIONS,
                "target": {"name": "tiny", "fingerprint": "f" * 64, "dtype": "float32"},
                "drafter": {"hash": identity, "slots": 3},
                "prompts": {"source": "test.jsonl", "hash": "p" * 64, "count": 4},
                "run": {"max_tokens": 8, "run_seed": 0, "batch_size": 4},
                "settings": [entry(setting, some, **changes) for setting, some in settings.items()],
            }
        )

    return make
