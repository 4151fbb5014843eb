"""A recipe file, read strictly before anything is built from it: it must exist, be YAML, and say each thing once.

YAML itself lets a doubled key pass and keeps the last; whoever wrote two meant one of them. Left out on purpose: what
the keys mean, which is the parser's to check against the classes' own signatures.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import yaml

from dspark.contracts import DsparkError

SUFFIXES = (".yaml", ".yml")


def read_recipe(path: str | Path) -> dict[str, Any]:
    """The recipe as a plain dict. Raises DsparkError: no such file, not YAML, a doubled key, or not a mapping."""
    path = Path(path)
    try:
        node = _compose(path)
        if node is None:
            raise DsparkError(f"{path}: expected sections such as model and data, but the file is empty.")
        _refuse_doubled_keys(node, path, prefix="")
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:  # a tag, a date, an alias of itself, ...
        place = _place(error) if isinstance(error, yaml.YAMLError) else ""
        raise DsparkError(f"{path}{place}: expected plain YAML values, but got: {_problem(error)}.") from None
    if not isinstance(content, dict):
        raise DsparkError(f"{path}: expected sections such as model and data, but got a {type(content).__name__}.")
    if not isinstance(content.get("trainer", {}), dict):
        raise DsparkError(f"{path}: expected trainer to be a section of keys, but got {content['trainer']!r}.")
    return content


def first_comment(path: Path) -> str:
    """The first sentence of the comment a recipe opens with (a line that shows the command is passed over), or ''."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        if not line.lstrip("# ").startswith(("dspark ", "lightning ")):
            lines.append(line.lstrip("# ").strip())
    return " ".join(lines).split(". ")[0].rstrip(".")


def _compose(path: Path) -> yaml.Node | None:
    try:
        return yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (FileNotFoundError, IsADirectoryError):
        raise DsparkError(f"{path}: expected a recipe file, but there is none.{_neighbours(path)}") from None
    except UnicodeDecodeError:
        raise DsparkError(f"{path}: expected a recipe in UTF-8 text, but the file is not text.") from None
    except OSError as error:
        raise DsparkError(f"{path}: expected a readable recipe, but got: {error.strerror or error}.") from None
    except yaml.YAMLError as error:
        raise DsparkError(f"{path}{_place(error)}: not valid YAML: {_problem(error)}.") from None


def _refuse_doubled_keys(node: yaml.Node, path: Path, prefix: str) -> None:
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _refuse_doubled_keys(item, path, f"{prefix}{index}.")
    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[str, int] = {}
    for key, value in node.value:
        name, line = str(key.value), key.start_mark.line + 1
        if name in seen:
            raise DsparkError(
                f"{path}:{line}: expected each key once, but {prefix}{name} is given again "
                f"(first in line {seen[name]}). Remove one of them."
            )
        seen[name] = line
        _refuse_doubled_keys(value, path, f"{prefix}{name}.")


def _neighbours(path: Path) -> str:
    folder = path.parent if path.parent.is_dir() else Path("recipes")
    names = sorted(str(p) for p in folder.glob("*.y*ml")) if folder.is_dir() else []
    near = difflib.get_close_matches(str(path), names, n=1, cutoff=0.5) or names[:4]
    return f" Is it {' or '.join(near)}?" if near else ""


def _place(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    return f":{mark.line + 1}" if mark is not None else ""


def _problem(error: Exception) -> str:
    return str(getattr(error, "problem", None) or error).replace("\n", " ")
