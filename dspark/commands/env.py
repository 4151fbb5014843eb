"""Switches, versions and the machine's fingerprint: what a rollout's reproducibility depends on.

Prints every DEEPINFER_* switch with its value and where it came from, the releases installed, and the fingerprint
under which this machine's operations give the same bits. Two machines with the same fingerprint regenerate each
other's rollouts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from importlib import metadata
from typing import Any

from dspark import __version__
from dspark.contracts import DsparkError
from dspark.help_text import table
from dspark.settings import SWITCHES, Settings, foreign_variables, show, variable

PACKAGES = ("torch", "triton", "lightning", "transformers", "datasets", "torchmetrics", "numpy", "pyarrow", "gguf")
EXAMPLES = f"""
what the switches mean:
{table([(variable(name), f"{switch.meaning}: {switch.wanted}") for name, switch in SWITCHES.items()])}

examples:
  dspark env
  dspark env --json > machine.json
  DEEPINFER_USE_NEXTN_DECODE=7 dspark env
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `dspark env`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def run(args: argparse.Namespace) -> int:
    """Print the report; 0. Raises DsparkError when a switch has an invalid value."""
    facts = collect()
    print(json.dumps(facts, indent=2, sort_keys=True) if args.json else as_text(facts))
    return 0


def collect() -> dict[str, Any]:
    """Everything `dspark env` prints, as plain values."""
    settings = Settings.from_env()
    return {
        "switches": settings.as_dict(),
        "origins": dict(settings.origins),
        "other_variables": foreign_variables(),
        "versions": {"dspark": __version__, "python": platform.python_version(), **_versions()},
        "machine": {"system": f"{platform.system()} {platform.machine()}", **_threads()},
        "fingerprint": _fingerprint(),
    }


def as_text(facts: dict[str, Any]) -> str:
    """The report as tables of 80 columns."""
    parts = ["switches\n" + _switch_rows(facts)]
    if facts["other_variables"]:
        others = table([(name, "") for name in facts["other_variables"]])
        parts.append(f"set, but not known here (never read)\n{others}")
    for title in ("versions", "machine", "fingerprint"):
        parts.append(f"{title}\n" + table([(name, _plain(value)) for name, value in facts[title].items()], left=14))
    return "\n\n".join(parts)


def _switch_rows(facts: dict[str, Any]) -> str:
    rows = []
    for name in SWITCHES:
        value = facts["switches"][name]
        shown = show(tuple(value) if isinstance(value, list) else value)
        origin = facts["origins"].get(name, "")
        rows.append((variable(name), f"{shown} ({'set' if origin else 'default'})"))
    return table(rows)


def _versions() -> dict[str, str]:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def _threads() -> dict[str, Any]:
    import torch

    cuda = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"
    return {"cores": os.cpu_count() or 0, "torch_threads": torch.get_num_threads(), "gpu": cuda}


def _fingerprint() -> dict[str, Any]:
    try:
        from dspark import ops

        return dict(ops.fingerprint())
    except (DsparkError, ImportError, OSError) as error:
        # This page is where one looks when something is missing: it says so and stays standing.
        return {"unavailable": str(error)}


def _plain(value: Any) -> str:
    return ", ".join(str(part) for part in value) if isinstance(value, list | tuple) else str(value)
