"""The capacity curve of this machine: what a round costs by the rows in it.

Rounds of the real runner are timed over batch sizes and verification widths. The scheduling policies (early_stop,
lagged_global, global) weigh tokens against this curve; `dspark rollout --curve` and `dspark simulate` read it. Measure
with nothing else running.
"""

from __future__ import annotations

import argparse
import json

from dspark import ops
from dspark.commands.running import load, progress
from dspark.files import check_place
from dspark.runner.curve import CapacityCurve
from dspark.runner.profile import ProfileOptions, measure

EXAMPLES = """
examples:
  dspark profile --drafter runs/demo/bundle --out runs/demo/curve.json
"""
_SHOWN = 14  # sizes in the table; all are in the file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `dspark profile`."""
    default = ProfileOptions()
    parser.add_argument("--target", default="smollm2-135m-instruct", help="folder, hub id or the embedded default")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="dtype of the target")
    parser.add_argument("--drafter", default="", help="an exported draft model; '' for the target alone")
    parser.add_argument("--requests", type=int, nargs="+", default=list(default.requests), help="batch sizes to try")
    parser.add_argument("--context", type=int, default=default.context, help="prompt tokens of each request")
    parser.add_argument("--repeats", type=int, default=default.repeats, help="rounds per batch size and width")
    parser.add_argument("--out", default="runs/curve.json", help="the file to write")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.add_argument("--json", action="store_true", help="print the curve as JSON")


def run(args: argparse.Namespace) -> int:
    """Measure, write, print; 0. Raises DsparkError when the models do not fit together."""
    check_place(args.out)
    options = ProfileOptions(tuple(args.requests), args.context, args.repeats)
    loaded = load(args.target, args.dtype, args.drafter)
    drafter = loaded.bundle.drafter if loaded.bundle else None
    facts = {
        "machine": ops.fingerprint(), "target": loaded.target.fingerprint, "dtype": args.dtype,
        "drafter": loaded.bundle.hash if loaded.bundle else None, "repeats": options.repeats,
    }  # fmt: skip
    with progress("profile", "batch", args.quiet) as update:
        sizes = sorted(set(options.requests))
        curve = measure(
            loaded.target, drafter, options, facts, lambda size: update(sizes.index(size) + 1, len(sizes), 0)
        )
    curve.save(args.out)
    width = drafter.config.num_predictions if drafter else 0
    print(json.dumps(curve.to_dict()) if args.json else "\n".join([*_table(curve, width), f"written to {args.out}"]))
    return 0


def _table(curve: CapacityCurve, width: int) -> list[str]:
    """At most 80 columns."""
    step = -(-len(curve.rows) // _SHOWN)
    shown = sorted({*range(0, len(curve.rows), step), len(curve.rows) - 1})
    lines = [f"{'rows in a pass':>14}{'ms':>9}{'ms per row':>12}{'passes/s':>10}"]
    for i in shown:
        rows, seconds = curve.rows[i], curve.seconds[i]
        lines.append(f"{rows:>14}{1e3 * seconds:>9.1f}{1e3 * seconds / rows:>12.2f}{1 / seconds:>10.1f}")
    for rows, seconds in zip(curve.prompt_rows, curve.prompt_seconds, strict=True):
        lines.append(f"{f'{rows} (prompt)':>14}{1e3 * seconds:>9.1f}{1e3 * seconds / rows:>12.2f}{1 / seconds:>10.1f}")
    if curve.flat:
        why = "is flat" if len(curve.rows) > 1 else "has one size alone (give --drafter, or more --requests)"
        lines.append(f"The curve {why}: policies that need one will verify everything.")
    if width:
        lines += ["", f"break-even: accepted drafts per round from which a block of {width} pays"]
        lines.append(f"{'requests':>14}{'drafting, ms':>14}{'1 verified':>12}{f'{width} verified':>12}")
        for requests in curve.requests:
            even = [curve.break_even(requests, w) for w in (1, width)]
            lines.append(f"{requests:>14}{1e3 * curve.drafting(requests):>14.1f}{even[0]:>12.2f}{even[1]:>12.2f}")
    return lines
