"""The arguments of a class as one would write them in a recipe: dotted names, defaults, and their docstring's words."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

REQUIRED = inspect.Parameter.empty


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument. ``name`` is dotted inside nested dataclasses; ``default`` is REQUIRED when there is none."""

    name: str
    default: Any
    text: str


def arguments(cls: type, prefix: str = "", made: Any = None) -> Iterator[Argument]:
    """The arguments of ``cls`` in order; a dataclass argument is followed by its own fields. made: an object of it that
    stands where nothing is given: its values are the defaults.

    Words come from the ``Args:`` section of the class's docstring. Raises what `typing.get_type_hints` raises.
    """
    from docstring_parser import parse

    hints = typing.get_type_hints(getattr(cls, "__init__"))  # noqa: B009  # mypy: reading it off a type is unsound
    texts = {entry.arg_name: entry.description for entry in parse(cls.__doc__ or "").params}
    for name, parameter in inspect.signature(cls).parameters.items():
        if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            continue
        default = _default(cls, name) if made is None else getattr(made, name)
        nested = dataclasses.is_dataclass(default)
        yield Argument(
            prefix + name, parameter.default if nested or made is None else default,
            " ".join((texts.get(name) or "").split()),
        )  # fmt: skip
        for part in (hints.get(name), *typing.get_args(hints.get(name))):
            if isinstance(part, type) and dataclasses.is_dataclass(part):
                yield from arguments(part, f"{prefix}{name}.", default if nested else None)


def _default(cls: type, name: str) -> Any:
    """What a dataclass makes of a field that is not given; None where that is no dataclass' doing."""
    for field in dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ():
        if field.name == name and field.default_factory is not dataclasses.MISSING:
            return field.default_factory()
    return None


def class_at(path: str) -> type | None:
    """The class that an import path names, or None."""
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError):
        return None
    return found if isinstance(found, type) else None
