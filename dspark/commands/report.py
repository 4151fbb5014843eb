"""The report on a draft model: does it get accepted, and can its confidence be trusted.

Acceptance per domain and slot from recorded rounds; calibration before and after with intervals, beside two baselines;
one self-contained HTML page, the pictures, the numbers as JSON, and the same in TensorBoard. Report on a split that
nothing was fitted on.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dspark.calibration.record import Calibration
from dspark.calibration.report import Report, build_report, format_table, load_report
from dspark.commands.calibrate import add_event_arguments
from dspark.commands.events import gather_events
from dspark.commands.running import drafters_rounds
from dspark.rollouts.store import read_trajectories
from dspark.runner.acceptance import Acceptance, Drafted, by_domain
from dspark.training.sources import refuse_chosen, sampled_as

EXAMPLES = """
examples:
  dspark report --drafter runs/demo/bundle --calibration runs/demo/calibration.json \\
      --rollouts runs/demo/events/test --out runs/demo/report
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `dspark report`."""
    add_event_arguments(parser)
    parser.add_argument("--calibration", required=True, help="what `dspark calibrate` wrote for these weights")
    parser.add_argument(
        "--fitted-on",
        nargs="*",
        default=[],
        help="rollouts of the calibration split: for baselines, other methods, shift",
    )
    parser.add_argument("--against", default="", help="an older report.json (or its folder): has calibration moved?")
    parser.add_argument("--tensorboard", default="tb_logs/report", help="TensorBoard folder; '' for none")
    parser.add_argument("--out", default="runs/report", help="the folder to write")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")


def run(args: argparse.Namespace) -> int:
    """Write the report and print its table; 0. Raises DsparkError on a stale calibration or missing rounds."""
    report, accepted = make_report(
        args.drafter, args.rollouts, args.target, args.dtype, args.calibration, args.out,
        fitted_on=args.fitted_on, against=args.against, tensorboard=args.tensorboard or None, quiet=args.quiet,
    )  # fmt: skip
    if args.json:
        print(json.dumps({"acceptance": plain(accepted), "calibration": report.data}))
        return 0
    print(acceptance_table(accepted) + "\n\n" + format_table(report) + f"\nwritten to {args.out}/report.html")
    return 0


def make_report(
    drafter: str,
    rollouts: list[str],
    target: str,
    dtype: str,
    calibration: str,
    out: str,
    fitted_on: list[str] | None = None,
    against: str = "",
    tensorboard: str | None = None,
    quiet: bool = False,
) -> tuple[Report, dict[str, Acceptance]]:
    """(calibration report, acceptance by domain) of one draft model on the rounds of ``rollouts``."""
    older = load_report(against).data if against else None
    events, identity = gather_events(drafter, rollouts, target, dtype, quiet)
    fitted = Calibration.load(calibration, identity, events.num_slots)
    earlier = gather_events(drafter, fitted_on, target, dtype, quiet)[0] if fitted_on else None
    accepted = rollout_acceptance(rollouts)
    extra = {"drafter": str(drafter), "rollouts": rollouts, "target": target, "sampled": sampled_as(rollouts)}
    report = build_report(
        events, fitted, Path(out), extra=extra, events_calibration=earlier, against=older, tensorboard_dir=tensorboard
    )
    return report, accepted


def rollout_acceptance(folders: list[str]) -> dict[str, Acceptance]:
    """Acceptance by domain over the rounds of rollout folders."""
    sequences: list[Drafted] = []
    for folder in folders:
        refuse_chosen(folder)
        recorded = drafters_rounds(folder)
        for t in read_trajectories(folder):
            last = len(t.prompt_ids) + len(t.response_ids) - 1
            sequences.append(Drafted(t.domain, recorded.get(t.trajectory_id, []), last))
    slots = max((len(r.drafted) for s in sequences for r in s.rounds), default=0)
    return by_domain(sequences, slots)


def plain(accepted: dict[str, Acceptance]) -> dict[str, dict[str, Any]]:
    return {domain: asdict(one) for domain, one in accepted.items()}


def acceptance_table(accepted: dict[str, Acceptance]) -> str:
    """A row a domain, at 80 columns: tokens per round (the target's own included), accepted drafts, rate per slot."""
    slots = max((len(a.per_slot) for a in accepted.values()), default=0)
    head = f"{'acceptance':<12}{'rounds':>8}{'tau':>7}{'drafts':>8}   " + "".join(
        f"{f'slot {k + 1}':>8}" for k in range(slots)
    )
    lines = [head]
    for domain, one in accepted.items():
        rates = "".join(f"{'-' if rate is None else f'{rate:.1%}':>8}" for rate in one.per_slot)
        lines.append(f"{domain:<12}{one.rounds:>8}{one.tau:>7.2f}{one.accepted:>8.2f}   {rates}")
    return "\n".join(lines)
