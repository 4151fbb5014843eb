"""JSON files that vouch for themselves: they hold the sha256 of their own content, so a damaged or edited one is none.

For what others are judged by (reports): a changed count there is a changed verdict. It guards against accidents and
forgetfulness, not against someone who makes the hash anew.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dspark.contracts import DsparkError
from dspark.files import read_json, sha256_json

SEAL = "content"


def sealed(values: dict[str, Any]) -> dict[str, Any]:
    """The values with the hash of their own content; one that they had already is left out and made anew."""
    content = {key: value for key, value in values.items() if key != SEAL}
    return {**content, SEAL: sha256_json(content)}


def read_sealed(path: str | Path, what: str, kind: tuple[str, str], again: str) -> dict[str, Any]:
    """What `sealed` gave, from its file. what: names it in errors. kind: the key and value that name its format.
    again: what to do when it is not as it was written, a sentence.

    Raises DsparkError then. One from before such files had a hash is refused as well: nothing vouches for its counts.
    """
    found = read_json(path, what)
    key, expected = kind
    if not isinstance(found, dict) or found.get(key) != expected:
        got = found.get(key) if isinstance(found, dict) else type(found).__name__
        raise DsparkError(f'{path}: expected a {what} of {key} "{expected}", but got {got!r}. {again}')
    if SEAL not in found:
        raise DsparkError(
            f"{path}: expected a hash of the {what}'s own content, but it has none: it was written before they were "
            f"kept, or edited. {again}"
        )
    if not _is_intact(found):
        raise DsparkError(
            f"{path}: expected a {what} as it was written, but its content is not what its hash says: it was edited or "
            f"damaged. {again}"
        )
    return found


def _is_intact(values: dict[str, Any]) -> bool:
    try:
        return sealed(values) == values
    except (ValueError, RecursionError):  # what no such file holds: NaN, half a character, an abyss of brackets
        return False
