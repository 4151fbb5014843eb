"""What was wrong with a recipe or an override, in one line: the parser's own many lines trimmed to the point.

Input is the text of a jsonargparse error, output a message that names the key, where it was given, and what would
have been accepted. An error of a form not known here keeps its innermost line, so nothing is lost that matters.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any

from dspark.signatures import arguments, class_at

Sources = Sequence[tuple[str, dict[str, Any]]]

CLASS_PATH = re.compile(r"Problem with given class_path '([^']+)'")
UNKNOWN = (
    re.compile(r"Group '(?P<group>[^']+)' does not accept option '(?P<name>[^']+)'"),
    re.compile(r"does not accept option '(?P<name>[^']+)'"),
    re.compile(r"Option '(?P<name>[^']+)' is not accepted"),
    re.compile(r"unrecognized arguments: (?:--)?(?P<name>[^\s=]+)"),
)
MISSING_SECTION = re.compile(r"arguments are required: (?:fit|validate|test|predict)\.(\w+)")
PARSER_KEY = re.compile(r'Parser key "([^"]+)"')
FRAME = re.compile(r"(Parser key|Problem with given class_path|Does not validate|Subtypes:|Errors:|Given value)")
EXPECTED = re.compile(r"Expected (?:an? )?(.+?)(?:\. Got value: (.*))?$")
LITERAL = re.compile(r"(?:an? )?typing\.Literal\[([^\]]*)\]")
NOT_NONE = "Expected a <class 'NoneType'>"


def explain(text: str, sources: Sources, overrides: Sequence[str], known: Iterable[str]) -> str:
    """One message for a parser's error.

    text: the error as jsonargparse words it. sources: (path, content) of the recipes given. overrides: the arguments
    after them. known: every dotted option of the parser, for the suggestion.
    """
    if match := MISSING_SECTION.search(text):
        return f"{_where('', sources, overrides)}: expected a section named {match[1]}, but there is none."
    class_paths = CLASS_PATH.findall(text)
    for pattern in UNKNOWN:
        if match := pattern.search(text):
            found = match.groupdict()
            name = f"{found['group']}.{found['name']}" if "group" in found else found["name"]
            allowed = options(class_paths[-1]) if class_paths else known
            of_class = f" (in {class_paths[-1]})" if class_paths else ""
            return f"{_where(name, sources, overrides)}: {_unknown(name, allowed)}{of_class}"
    key = ".".join(PARSER_KEY.findall(text.partition("Given value")[0])) or "the configuration"
    place = f": {class_paths[-1]}" if class_paths else ""
    return f"{_where(key, sources, overrides)}: {key}{place}: {_innermost(text)}"


def options(class_path: str) -> list[str]:
    """The arguments of a class named by its import path, those of nested dataclasses dotted; [] when not to be had."""
    if class_path.endswith(("LightningModule", "LightningDataModule")):  # the section itself, before it names a class
        return ["class_path", "init_args"]
    cls = class_at(class_path)
    try:
        return [argument.name for argument in arguments(cls)] if cls else []
    except (NameError, TypeError, ValueError):  # annotations that cannot be resolved: no suggestion then
        return []


def _unknown(name: str, allowed: Iterable[str]) -> str:
    allowed = [option for option in allowed if option not in ("", "help")]
    name = _first_unknown(name, allowed)
    near = difflib.get_close_matches(name, allowed, n=1, cutoff=0.6)
    if near:
        return f"unknown key {name}. Did you mean {near[0]}?"
    siblings = [option for option in allowed if option.rpartition(".")[0] == name.rpartition(".")[0]]
    shown = ", ".join(siblings[:12]) + (", …" if len(siblings) > 12 else "")
    return f"unknown key {name}. " + (f"Allowed here: {shown}." if shown else "Remove it.")


def _first_unknown(name: str, allowed: list[str]) -> str:
    """The shortest prefix of a dotted key that leads nowhere: `dta.class_path` is wrong at `dta`."""
    parts = name.split(".")
    for count in range(1, len(parts)):
        prefix = ".".join(parts[:count])
        if not any(option == prefix or option.startswith(prefix + ".") for option in allowed):
            return prefix
    return name


def _where(key: str, sources: Sources, overrides: Sequence[str]) -> str:
    last = key.rpartition(".")[2]
    if last and any(re.match(rf"--(?:[\w.]+\.)?{re.escape(last)}\+?(?:=|$)", argument) for argument in overrides):
        return "the command line"
    for path, content in reversed(sources):
        if _mentions(content, last):
            return path
    return sources[-1][0] if sources else "the command line"


def _mentions(content: Any, key: str) -> bool:
    if isinstance(content, dict):
        return key in content or any(_mentions(value, key) for value in content.values())
    return isinstance(content, list) and any(_mentions(value, key) for value in content)


def _innermost(text: str) -> str:
    lines = [line.strip().removeprefix("- ") for line in text.splitlines()]
    kept = [line for line in lines if line and not FRAME.match(line) and line != NOT_NONE]
    line = kept[0] if kept else re.sub(r'^Parser key "[^"]+":\s*', "", text.splitlines()[0])
    line = re.sub(r"<class '(?:[\w.]*\.)?(\w+)'>", r"\1", line)
    line = LITERAL.sub(lambda match: "one of " + match[1].replace("'", ""), line)
    if match := EXPECTED.match(line):
        line = f"expected {match[1]}{_got(match[2], text)}"
    return line if line.endswith(".") else line + "."


def _got(value: str | None, text: str) -> str:
    given = re.search(r"Given value: (.+)", text)
    value = value or (given[1] if given else None)
    return f", but got {value}" if value else ""
