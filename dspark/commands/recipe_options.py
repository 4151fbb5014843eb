"""A frozen dataclass as a command's options: one recipe file, and one `--field VALUE` a field that overrides it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, Protocol

import yaml

from dspark.contracts import DsparkError
from dspark.recipe import read_recipe


class RecipeConfig(Protocol):
    """A dataclass that is made from a parsed recipe and says what is wrong with it."""

    @classmethod
    def from_dict(cls, values: dict[str, Any], where: str = ...) -> Any: ...


def add_recipe_options(parser: argparse.ArgumentParser, config: type, skip: tuple[str, ...] = ()) -> None:
    """RECIPE.yaml (optional) and an option a field. Values are read as YAML, as they would be in the recipe."""
    parser.add_argument("recipe", nargs="?", help="YAML file with any of the fields below")
    group = parser.add_argument_group("fields (each overrides the recipe; defaults in brackets)")
    for f in fields(config):
        if f.name not in skip:
            default = "required" if f.default is MISSING else _shown(f.default)
            group.add_argument(
                f"--{f.name}",
                metavar=str(f.type).split("[")[0].split(" ")[0].upper(),
                default=None,
                help=f"[{default}]",
            )


def read_options(args: argparse.Namespace, config: type[RecipeConfig]) -> Any:
    """The config of ``args``: the recipe's fields, then the given options. Raises DsparkError on an unknown key."""
    names = [f.name for f in fields(config)]  # type: ignore[arg-type]
    values = read_recipe(args.recipe) if args.recipe else {}
    given = {n: _value(n, getattr(args, n)) for n in names if getattr(args, n, None) is not None}
    return config.from_dict({**values, **given}, args.recipe or "options")


def whole_number(least: int) -> Callable[[str], int]:
    """An argparse type: an integer not below ``least``."""

    def parse(text: str) -> int:
        number = int(text) if text.lstrip("-").isdigit() else least - 1
        if number < least:
            raise argparse.ArgumentTypeError(f"expected a whole number >= {least}, but got {text!r}")
        return number

    return parse


def share(text: str) -> float:
    """An argparse type: a number from 0 to 1."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0.0 <= number <= 1.0:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 1, but got {text!r}")
    return number


def _value(name: str, text: Any) -> Any:
    if not isinstance(text, str) or text == "":  # a flag's value is no text
        return text
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError):
        raise DsparkError(f"--{name}: expected a YAML value, but got {text!r}.") from None


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    return '""' if value == "" else str(value).lower() if isinstance(value, bool) else str(value)
