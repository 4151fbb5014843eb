"""Fit a map per slot, so that a confidence of 0.8 is right eight times in ten.

Sequential temperature scaling (or Platt scaling, or isotonic regression) on rounds whose verdicts are known: a rollout
of the calibration split, whole blocks verified. The result is one JSON file, bound to these weights by hash; `dspark
export --calibration` puts it beside them, and the runner refuses it for any others.
"""

from __future__ import annotations

import argparse
import json

from dspark.calibration.fitting import fit
from dspark.calibration.record import METHODS, Calibration
from dspark.commands.events import gather_events

EXAMPLES = """
examples:
  dspark calibrate --drafter runs/demo/confidence/last.ckpt \\
      --rollouts runs/demo/events/calibration --out runs/demo/calibration.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `dspark calibrate`."""
    add_event_arguments(parser)
    parser.add_argument("--method", default="temperature", choices=METHODS, help="what is fitted to each slot")
    parser.add_argument("--out", default="runs/calibration.json", help="the file to write")
    parser.add_argument("--json", action="store_true", help="print the calibration as JSON")


def add_event_arguments(parser: argparse.ArgumentParser) -> None:
    """Where confidences and verdicts come from; shared with `dspark report`."""
    parser.add_argument("--drafter", required=True, help="a checkpoint of a draft model, or an exported folder")
    parser.add_argument("--rollouts", required=True, nargs="+", help="rollout folders with rounds (dspark rollout)")
    parser.add_argument("--target", default="smollm2-135m-instruct", help="the target the draft model was trained for")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="dtype of the target")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def run(args: argparse.Namespace) -> int:
    """Fit and write; 0. Raises DsparkError when there is nothing to fit on or the models do not fit together."""
    events, identity = gather_events(args.drafter, args.rollouts, args.target, args.dtype, args.quiet)
    calibration = fit(events, identity, args.method)
    calibration.save(args.out)
    print(json.dumps(calibration.to_dict()) if args.json else as_text(calibration, args.out))
    return 0


def as_text(calibration: Calibration, out: str) -> str:
    """One line a slot, at 80 columns."""
    lines = [f"{calibration.num_events} rounds; survival ECE on them, before and after:"]
    rows = zip(calibration.maps, calibration.ece_before, calibration.ece_after, strict=True)
    for slot, (fitted, before, after) in enumerate(rows, start=1):
        said = "no data" if before is None or after is None else f"{before:7.2%} -> {after:7.2%}"
        lines.append(f"  slot {slot}: {fitted.told():<36}{said}")
    return "\n".join([*lines, f"written to {out}"])
