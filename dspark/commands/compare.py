"""Draft models side by side: what `lightning test` reported of each, on the same prompts with the same settings.

Per setting and domain: tau with its interval, and its ratio to the first draft model's with an interval that resamples
the same conversations for both, so that what makes a prompt easy cancels out. One picture shows how acceptance
decays over the slots of a block, a curve a draft model.

Needs: at least two reports of the same target, prompts, lengths and seed with a setting in common, as they were
written: one that was edited, or is older than the hash of its content, is refused. Costs seconds: no model is loaded.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from dspark.calibration.figures import png
from dspark.contracts import DsparkError
from dspark.files import atomic_write
from dspark.scorecard.compare import compare, comparison_text
from dspark.scorecard.pictures import decay_figure
from dspark.scorecard.report import REPORT_NAME, load_report

EXAMPLES = """
examples:
  lightning test recipes/drafter.yaml --model.init_args.test.out=runs/a
  dspark compare dspark=runs/a dflash=runs/b --out runs/comparison
"""
DATA, PICTURE = "comparison.json", "comparison_slots.png"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `dspark compare`."""
    parser.add_argument(
        "reports", nargs="+", metavar="NAME=PATH", help=f"a {REPORT_NAME} or its folder; the first is the base"
    )
    parser.add_argument("--out", default="runs/comparison", help="the folder to write")
    parser.add_argument("--json", action="store_true", help="print the comparison as JSON")


def run(args: argparse.Namespace) -> int:
    """Compare, write and print; 0. Raises DsparkError on reports that cannot be compared."""
    reports = read_reports(args.reports)
    data = compare(reports)
    atomic_write(Path(args.out) / DATA, json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    atomic_write(Path(args.out) / PICTURE, png(decay_figure(reports, data["titles"])))
    print(json.dumps(data) if args.json else f"{comparison_text(data)}\n\nwritten to {args.out}")
    return 0


def read_reports(given: list[str]) -> dict[str, dict[str, Any]]:
    """name -> report; without a name a report is called by its path. Raises DsparkError when a name comes twice."""
    found: dict[str, dict[str, Any]] = {}
    for argument in given:
        name, _, path = argument.rpartition("=")
        name = name or path
        if name in found:
            raise DsparkError(f"compare: expected a name for each report, but got {name!r} twice. Write NAME=PATH.")
        found[name] = load_report(path)
    return found
