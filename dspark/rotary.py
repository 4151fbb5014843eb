"""What rotary settings may be: the values, one check for targets and draft models alike.

Names are those of config.json's rope_parameters. What a type needs, and what is done with the values, is the rooms' own
business (target/rope.py, drafter/rope.py); here stand the ranges in which their formulas give finite angles.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dspark.contracts import DsparkError

_MOST = 1e6
_RANGES = {
    "rope_theta": (1.0, 1e30),
    "factor": (1 / _MOST, _MOST),
    "low_freq_factor": (1 / _MOST, _MOST),
    "high_freq_factor": (1 / _MOST, _MOST),
    "original_max_position_embeddings": (1, 2**31 - 1),
    "beta_fast": (1 / _MOST, _MOST),
    "beta_slow": (1 / _MOST, _MOST),
    "attention_factor": (1 / _MOST, _MOST),
}


def check_rotary(parameters: Mapping[str, Any], where: str) -> None:
    """Raises DsparkError, naming the field, unless every value is a finite number in its range and they agree.

    parameters: rope_type and what that type reads; other keys are not looked at. where: opens the message.
    """
    for name, (least, most) in _RANGES.items():
        if name in parameters:
            value = parameters[name]
            _check(
                is_number(value) and least <= value <= most, where, name, value, f"a number from {least:g} to {most:g}"
            )
    kind, theta = parameters.get("rope_type"), parameters.get("rope_theta", 2)
    _check(theta > 1, where, "rope_theta", theta, "above 1 (every pair would turn alike)")
    truncate = parameters.get("truncate", True)
    _check(isinstance(truncate, bool), where, "truncate", truncate, "true or false")
    if kind == "yarn":
        factor, fast, slow = parameters["factor"], parameters.get("beta_fast", 32), parameters.get("beta_slow", 1)
        _check(factor >= 1, where, "factor", factor, "at least 1 with rope_type yarn")
        _check(fast >= slow, where, "beta_fast", fast, f"at least beta_slow {slow}")
    if kind == "llama3":
        low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
        _check(high > low, where, "high_freq_factor", high, f"above low_freq_factor {low}")


def is_number(value: Any) -> bool:
    """A finite int or float that a float can hold; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _check(ok: bool, where: str, name: str, value: Any, wanted: str) -> None:
    if not ok:
        raise DsparkError(f"{where}: expected {name} to be {wanted}, but got {value!r}. Mend the config.")
