"""Rewards: a function of the user's, named in the recipe, called on one finished sample at a time.

It gets a RewardInput and returns a number. It must depend on nothing else, or a resumed run's files are not those of an
uninterrupted one. When it raises, or returns something that is no finite number, that sample's reward is missing (null,
never 0) and counted; the run goes on.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from dspark.contracts import DsparkError


@dataclass(frozen=True, slots=True)
class RewardInput:
    """What a reward function sees. text: the response decoded ("" when collect was given no decoder)."""

    prompt_id: str
    domain: str
    messages: tuple[dict[str, str], ...]
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    text: str
    finish_reason: str


RewardFunction = Callable[[RewardInput], float]


def load_reward(name: str) -> RewardFunction | None:
    """The function that "module:function" or "path/to/file.py:function" names; None for "".

    Raises DsparkError when it cannot be loaded, with what the import said.
    """
    if not name:
        return None
    source, separator, attribute = name.rpartition(":")
    if not separator or not source or not attribute.isidentifier():
        raise DsparkError(f'reward: expected "module:function" or "file.py:function", but got {name!r}.')
    try:
        module = _load_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
    except Exception as error:  # whatever the user's module does at import
        raise DsparkError(
            f"reward {name!r}: expected a module that imports, but got {type(error).__name__}: {error}. "
            "Is its folder on PYTHONPATH? A path ending in .py works too."
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        got = "nothing of that name" if function is None else f"a {type(function).__name__}"
        raise DsparkError(f"reward {name!r}: expected a function {attribute} in {source}, but found {got}.")
    return function


@dataclass(slots=True)
class Scorer:
    """Calls the reward function and survives it. errors: messages of this process's failures, at most `keep`."""

    function: RewardFunction | None
    failed: int = 0
    errors: list[str] | None = None
    keep: int = 5

    def __call__(self, sample: RewardInput, where: str) -> float | None:
        if self.function is None:
            return None
        try:
            reward = float(self.function(sample))
            if not math.isfinite(reward):
                raise ValueError(f"expected a finite number, but got {reward}")
        except Exception as error:  # the user's code
            self.failed += 1
            self.errors = [*(self.errors or []), f"{where}: {type(error).__name__}: {error}"][: self.keep]
            return None
        return reward


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    spec = importlib.util.spec_from_file_location(f"_dspark_reward_{path.stem}", path)
    assert spec is not None, f"no loader for {path}"
    assert spec.loader is not None, f"no loader for {path}"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
