"""The DEEPINFER_* switches: one typed record, read from the environment, merged with a configuration's values.

This is the one list of environment variables the package reads; `dspark env` prints it. A field of ``Settings`` is a
variable without its prefix, in lower case. Left out on purpose: per-command options (they belong to the command) and
every variable of other programs that happens to share the prefix (those are listed by `dspark env`, never read).
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Literal, get_args

from dspark.contracts import DsparkError

PREFIX = "DEEPINFER_"
TruncationMode = Literal["off", "compact", "mask"]
TRUNCATIONS: tuple[TruncationMode, ...] = get_args(TruncationMode)
MIN_BACKTRACKING = 6


@dataclass(frozen=True, slots=True)
class Switch:
    """One variable: how its text becomes a value, what a valid value is, and what it means."""

    parse: Callable[[Any], Any]
    wanted: str
    meaning: str


def _integer(value: Any) -> int:
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        raise ValueError(value)
    return int(value)


def _at_least(least: int) -> Callable[[Any], int]:
    def parse(value: Any) -> int:
        number = _integer(value)
        if number < least:
            raise ValueError(value)
        return number

    return parse


def _flag(value: Any) -> bool:
    words = {"0": False, "1": True, "false": False, "true": True}
    text = str(value).strip().lower()
    if text not in words:
        raise ValueError(value)
    return words[text]


def _mode(value: Any) -> TruncationMode:
    # YAML 1.1 reads a bare `off` as False; the reader of a recipe meant the word.
    text = "off" if value is False else str(value).strip().lower()
    modes: dict[str, TruncationMode] = {"off": "off", "compact": "compact", "mask": "mask"}
    if text not in modes:
        raise ValueError(value)
    return modes[text]


def _temperatures(value: Any) -> tuple[float, ...]:
    if isinstance(value, str):
        parts: list[Any] = value.strip().strip("[]").split(",")
    else:
        parts = list(value) if isinstance(value, list | tuple) else [value]
    numbers = tuple(float(part) for part in parts)
    if not all(math.isfinite(n) and n > 0 for n in numbers):
        raise ValueError(value)
    return numbers


SWITCHES: Mapping[str, Switch] = MappingProxyType(
    {
        "use_nextn_decode": Switch(_at_least(1), "an integer >= 1", "most draft tokens a round proposes"),
        "dflash_confidence_head_temperature": Switch(
            _temperatures,
            "a number > 0, or a comma-separated list of them, one per slot",
            "confidence temperature(s); calibration writes them",
        ),
        "enable_mtp_varlen": Switch(_flag, "0 or 1", "variable verification length"),
        "max_backtracking_tokens": Switch(
            _at_least(MIN_BACKTRACKING), f"an integer >= {MIN_BACKTRACKING}", "most tokens a step may roll back"
        ),
        "yoco_prefill_truncation_mode": Switch(_mode, "off, compact or mask", "how prefill of consumer layers is cut"),
        "yoco_prefill_keep_tokens": Switch(_at_least(0), "an integer >= 0", "suffix that a cut prefill keeps"),
        "batch_invariant": Switch(_flag, "0 or 1", "insist on invariant operations (always on here)"),
    }
)


def variable(name: str) -> str:
    """The environment variable of a field."""
    return PREFIX + name.upper()


@dataclass(frozen=True, slots=True)
class Settings:
    """Every switch, validated. ``origins`` says where a value that is not the default came from.

    A round may roll back its whole block and the anchor, so ``max_backtracking_tokens`` is at least
    use_nextn_decode + 1; 0 (not given) becomes the least allowed. A suffix that a cut prefill keeps goes with a mode,
    and is longer than what a step may roll back. Raises DsparkError on a value out of range, and one for all settings
    that contradict each other.
    """

    use_nextn_decode: int = 5
    dflash_confidence_head_temperature: tuple[float, ...] = (1.0,)
    enable_mtp_varlen: bool = False
    max_backtracking_tokens: int = 0
    yoco_prefill_truncation_mode: TruncationMode = "off"
    yoco_prefill_keep_tokens: int = 0
    batch_invariant: bool = False
    origins: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), compare=False)

    def __post_init__(self) -> None:
        follows = self.max_backtracking_tokens == 0
        if follows:
            object.__setattr__(self, "max_backtracking_tokens", MIN_BACKTRACKING)
        for name in SWITCHES:
            object.__setattr__(self, name, _parse(name, getattr(self, name), self.origins.get(name, name)))
        object.__setattr__(self, "origins", MappingProxyType(dict(self.origins)))
        if follows:
            needed = max(MIN_BACKTRACKING, self.use_nextn_decode + 1)
            object.__setattr__(self, "max_backtracking_tokens", needed)
        if found := self._contradictions():
            raise DsparkError(" And: ".join(found))

    def _contradictions(self) -> list[str]:
        """Settings that cannot be together, a sentence each."""
        found: list[str] = []
        back, mode, keep = (
            self.max_backtracking_tokens,
            self.yoco_prefill_truncation_mode,
            self.yoco_prefill_keep_tokens,
        )
        if back <= self.use_nextn_decode:
            found.append(
                f"{self._origin('max_backtracking_tokens')}: expected at least {self.use_nextn_decode + 1} "
                f"(use_nextn_decode + 1), but got {back}. Raise it, or lower use_nextn_decode."
            )
        if mode == "off" and keep:
            found.append(
                f"{self._origin('yoco_prefill_keep_tokens')}: expected yoco_prefill_truncation_mode compact or mask "
                f"given in the same place, but got {keep} tokens to keep and mode off. Give the mode, or unset it."
            )
        if mode != "off" and keep <= back:
            found.append(
                f"{self._origin('yoco_prefill_truncation_mode')}: expected yoco_prefill_keep_tokens given in the same "
                f"place, more than max_backtracking_tokens ({back}), but got {mode} and {keep}. Give both."
            )
        return found

    def _origin(self, name: str) -> str:
        return self.origins.get(name, name)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """The switches of an environment (default: this process's). An empty value counts as not set.

        Raises DsparkError on an invalid value, and on a name that is nearly one of ours (a slip of the pen).
        """
        environ = os.environ if environ is None else environ
        _refuse_near_misses(environ)
        given = {name: environ[variable(name)] for name in SWITCHES if environ.get(variable(name), "").strip()}
        origins = {name: f"{variable(name)} in the environment" for name in given}
        values = {name: _parse(name, text, origins[name]) for name, text in given.items()}
        return cls(**values, origins=origins)

    def merge(self, config_values: Mapping[str, Any], source: str = "the configuration") -> Settings:
        """These settings with a configuration's values on top; None means not given.

        Raises DsparkError on an unknown name, an invalid value, and a setting given here and there with different
        values: the message names both places.
        """
        values: dict[str, Any] = {}
        origins = dict(self.origins)
        for name, raw in config_values.items():
            _known(name, source)
            if raw is None:
                continue
            origin = f"{name} in {source}"
            value, mine = _parse(name, raw, origin), getattr(self, name)
            if name in self.origins and value != mine:
                raise DsparkError(
                    f"settings: expected one value for {name}, but got {show(mine)} from {self.origins[name]} and "
                    f"{show(value)} from {origin}. Remove one of them."
                )
            values[name] = value
            origins.setdefault(name, origin)
        if "max_backtracking_tokens" not in origins:
            values["max_backtracking_tokens"] = 0  # follows use_nextn_decode anew
        return replace(self, **values, origins=origins)

    def as_dict(self) -> dict[str, Any]:
        """Plain values by field name, for manifests and JSON."""
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "origins"}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in plain.items()}


def show(value: Any) -> str:
    """A value as one would write it in the variable."""
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, tuple):
        return ",".join(str(part) for part in value)
    return str(value)


def foreign_variables(environ: Mapping[str, str] | None = None) -> list[str]:
    """Variables with our prefix that are not ours, sorted: never read, listed so that nobody waits for their effect."""
    environ = os.environ if environ is None else environ
    ours = {variable(name) for name in SWITCHES}
    return sorted(name for name in environ if name.startswith(PREFIX) and name not in ours)


def _parse(name: str, raw: Any, origin: str) -> Any:
    switch = SWITCHES[name]
    try:
        return switch.parse(raw)
    except (ValueError, TypeError, OverflowError):
        raise DsparkError(f"{origin}: expected {switch.wanted}, but got {raw!r}.") from None


def _known(name: str, source: str) -> None:
    if name not in SWITCHES:
        near = difflib.get_close_matches(name, SWITCHES, n=1)
        hint = f"Did you mean {near[0]}?" if near else f"Known: {', '.join(SWITCHES)}."
        raise DsparkError(f"{source}: expected the name of a setting, but got {name!r}. {hint}")


def _refuse_near_misses(environ: Mapping[str, str]) -> None:
    ours = [variable(name) for name in SWITCHES]
    for name in foreign_variables(environ):
        near = difflib.get_close_matches(name, ours, n=1, cutoff=0.94)
        if near:
            raise DsparkError(f"environment: expected {near[0]}, but got {name}. Rename the variable, or unset it.")
