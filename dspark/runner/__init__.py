"""The deterministic runner: draft, schedule, verify, commit, over a continuous batch of requests."""

from dspark.runner.engine import Engine
from dspark.runner.options import EngineOptions

__all__ = ["Engine", "EngineOptions"]
