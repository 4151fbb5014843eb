"""Checks this machine: compiler, kernels, the invariance of every operation at a target's own weights, Triton, GPU.

Prints one line per check with what was found, and exits with 1 when one of them fails: then bit-for-bit reproducible
rollouts are not promised here, and the line says which operation and shape.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch

from dspark import ops
from dspark.contracts import DsparkError
from dspark.help_text import table
from dspark.target.load import EMBEDDED, load_target

EXAMPLES = """
examples:
  dspark doctor
  dspark doctor --target ~/models/Qwen3-0.6B --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `dspark doctor`."""
    parser.add_argument("--target", default=EMBEDDED, help="whose weights: a folder, hub id or .gguf file")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """0 when every check passed, 1 when one failed."""
    try:
        checks = examine(args.target)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("nothing was changed; the same command starts anew") from None
    if args.json:
        print(json.dumps(checks, indent=2))
    else:
        print(table([(name, f"{'ok' if ok else 'FAILED'}: {text}") for name, (ok, text) in checks.items()]))
    return 0 if all(ok for ok, _ in checks.values()) else 1


def examine(source: str) -> dict[str, tuple[bool, str]]:
    """{check: (passed, what was found)}."""
    checks = {
        "C kernels": _kernels,
        "float32": lambda: _invariance(source, "float32"),
        "bfloat16": lambda: _invariance(source, "bfloat16"),
        "Triton": _triton,
        "GPU": _gpu,
    }
    return {name: _attempt(check) for name, check in checks.items()}


def _attempt(check: Callable[[], str]) -> tuple[bool, str]:
    try:
        return True, check()
    except DsparkError as error:
        return False, str(error)


def _kernels() -> str:
    found: dict[str, Any] = ops.fingerprint()
    isa = ", ".join(found["isa"]) or "no vector instructions known"
    return f"built by {found['compiler']} for {found['cpu'].split(' / ')[-1]} ({isa}); {found['threads']} threads"


def _invariance(source: str, dtype: str) -> str:
    target = load_target(source, dtype)
    started = time.perf_counter()
    compared = target.self_tested
    spent = time.perf_counter() - started
    return f"{compared} rows of {target.name}'s operations computed alone and in batches, 0 differ ({spent:.1f} s)"


def _triton() -> str:
    try:
        return f"{metadata.version('triton')}: GPU kernels can be compiled here"
    except metadata.PackageNotFoundError:
        return "not installed: CPU tensors do not need it"


def _gpu() -> str:
    if not torch.cuda.is_available():
        return "none: the GPU kernels are tested in Triton's interpreter, and nothing was measured on a GPU here"
    return f"{torch.cuda.get_device_name(0)}: run kernels/device_check.py"
