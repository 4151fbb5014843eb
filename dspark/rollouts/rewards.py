"""Rewards: a function of the user's, named in the recipe, called on one finished sample at a time.

It gets a RewardInput of its own and returns a real number. It must depend on nothing else, or a resumed run's files are
not those of an uninterrupted one. When it raises, exits, or returns anything but a finite real number, that sample's
reward is missing (null, never 0) and counted by kind; the run goes on. What it prints goes to stderr: stdout is the
summary's. It runs in the process that writes, one sample at a time.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from dspark.contracts import DsparkError
from dspark.files import sha256_file

_LONGEST = 300  # characters of a failure's message


@dataclass(frozen=True, slots=True)
class RewardInput:
    """What a reward function sees. text: the response decoded, special tokens left out ("" when collect was
    given no decoder)."""

    prompt_id: str
    domain: str
    messages: tuple[dict[str, Any], ...]
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    text: str
    finish_reason: str


RewardFunction = Callable[[RewardInput], float]


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward function. code: sha256 of the file it was found in (None where there is none), so that a run is not
    continued with another version of it."""

    function: RewardFunction
    code: str | None


class NoReward(ValueError):
    """A value that is no finite real number. kind: what it is counted as."""

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind


def load_reward(name: str) -> Reward | None:
    """The function that "module:function" or "path/to/file.py:function" names; None for "".

    Raises DsparkError when it cannot be loaded, with what the import said.
    """
    if not name:
        return None
    source, separator, attribute = name.rpartition(":")
    if not separator or not source or not attribute.isidentifier():
        raise DsparkError(f'reward: expected "module:function" or "file.py:function", but got {name!r}.')
    try:
        with redirect_stdout(sys.stderr):
            module = _load_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
    except (Exception, SystemExit) as error:  # whatever the user's module does at import
        raise DsparkError(
            f"reward {name!r}: expected a module that imports, but got {type(error).__name__}: {error}. "
            "Is its folder on PYTHONPATH? A path ending in .py works too."
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        got = "nothing of that name" if function is None else f"a {type(function).__name__}"
        raise DsparkError(f"reward {name!r}: expected a function {attribute} in {source}, but found {got}.")
    file = getattr(module, "__file__", None)
    return Reward(function, sha256_file(file) if file else None)


def as_number(value: Any) -> float:
    """A real number as a float: int, float, bool, a numpy scalar or an array or tensor of no dimensions.

    Raises NoReward for anything else, text that reads like a number included, and for NaN and infinities.
    """
    if isinstance(value, (np.ndarray, np.generic, torch.Tensor)) and value.ndim == 0:
        value = value.item()
    if not isinstance(value, (int, float)):
        raise NoReward(f"returned {type(value).__name__}", f"expected a real number, but got {value!r}")
    number = float(value)
    if not math.isfinite(number):
        raise NoReward("not finite", f"expected a finite number, but got {number}")
    return number


@dataclass(slots=True)
class Scorer:
    """Calls the reward function and survives it.

    failures: this process's, by kind: an exception's name, "returned str", "not finite". errors: the first `keep` of
    them in words. folder: the working directory, which a function that runs code may leave: paths in a recipe are
    relative to it.
    """

    function: RewardFunction | None
    failures: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    keep: int = 5
    folder: str = field(default_factory=os.getcwd)

    def __call__(self, sample: RewardInput, where: str) -> float | None:
        if self.function is None:
            return None
        try:
            with redirect_stdout(sys.stderr), _same_folder(self.folder):
                return as_number(self.function(sample))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # the user's code: SystemExit and its like end a sample, not the run
            self._note(error, where)
            return None

    def _note(self, error: BaseException, where: str) -> None:
        self.failures[error.kind if isinstance(error, NoReward) else type(error).__name__] += 1
        if len(self.errors) < self.keep:
            said = str(error) if isinstance(error, NoReward) else traceback.format_exception_only(error)[-1].strip()
            self.errors.append(f"{where}: {said[:_LONGEST]}")


@contextmanager
def _same_folder(folder: str) -> Iterator[None]:
    """Leaves the process where it was, whatever happened inside."""
    try:
        yield
    finally:
        os.chdir(folder)


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    spec = importlib.util.spec_from_file_location(f"_dspark_reward_{path.stem}", path)
    assert spec is not None, f"no loader for {path}"
    assert spec.loader is not None, f"no loader for {path}"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
