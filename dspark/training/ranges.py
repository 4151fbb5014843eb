"""What the numbers of a recipe may be, with words for whoever gave another. NaN is in no range."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from dspark.contracts import DsparkError

Rule = tuple[str, Callable[[Any], bool]]

POSITIVE: Rule = ("> 0 and finite", lambda value: 0 < value < math.inf)
NOT_NEGATIVE: Rule = (">= 0 and finite", lambda value: 0 <= value < math.inf)
COUNT: Rule = ("a whole number >= 0", lambda value: _is_whole(value) and value >= 0)
NATURAL: Rule = ("a whole number >= 1", lambda value: _is_whole(value) and value >= 1)
SHARE: Rule = ("from 0 to 1", lambda value: 0 <= value <= 1)
DECAY: Rule = (">= 0 and below 1", lambda value: 0 <= value < 1)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def one_of(names: tuple[str, ...]) -> Rule:
    return f"one of {', '.join(names)}", lambda value: value in names


def check(where: str, options: object, **rules: Rule) -> None:
    """Raises one DsparkError for all fields of `options` that break their rule; None (not given) breaks none."""
    given = [(name, getattr(options, name), rule) for name, rule in rules.items()]
    wrong = [
        f"{name} {words}, but got {value!r}"
        for name, value, (words, holds) in given
        if value is not None and not holds(value)
    ]
    if wrong:
        raise DsparkError(f"{where}: expected {'; '.join(wrong)}.")
