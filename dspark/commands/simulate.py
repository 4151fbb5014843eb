"""What a verification policy would yield with many users at once, before anyone tries it.

A discrete-event simulation of the runner over a capacity curve (`dspark profile`), with rounds drawn from real
rollouts: throughput against speed per user for no speculation, fixed lengths and the scheduled policies. With
`--drafter`, the one that the rollouts were made with, the real runner is run beside it in the same ways at some numbers
of users, and the report says how far the simulation is off. The pictures are those of the DSpark paper's figures 7 and
8, for this machine.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from dspark.bench import trying
from dspark.bench.simulated import as_lines, pictures, predict, ways
from dspark.bench.simulation import Job, Pools, Way, pools_of
from dspark.calibration.figures import png
from dspark.commands.recipe_options import share, whole_number
from dspark.commands.running import Loaded, drafters_rounds, load, load_curve, progress
from dspark.contracts import DsparkError, Round
from dspark.files import atomic_write, check_place
from dspark.rollouts.manifest import read_manifest
from dspark.rollouts.store import read_trajectories
from dspark.rollouts.trajectory import Trajectory
from dspark.runner.curve import CapacityCurve
from dspark.runner.schedule import Scheduler
from dspark.training.sources import refuse_chosen

EXAMPLES = """
examples:
  dspark simulate --curve runs/demo/curve.json --rollouts runs/demo/rollouts \\
      --out runs/demo/simulation
  dspark simulate --curve runs/demo/curve.json --rollouts runs/demo/rollouts \\
      --drafter runs/demo/bundle --out runs/demo/simulation
"""
_OF_THE_RUNNER: dict[str, Any] = {
    "tried": [1, 4, 16, 32], "requests": 8, "repeats": trying.REPEATS, "target": "smollm2-135m-instruct",
    "dtype": "bfloat16",
}  # fmt: skip
_MADE_BY = {"target": "target", "drafter": "draft model", "calibration": "calibration"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `dspark simulate`; those of the real runner are None where not given, so that one that would be
    ignored is refused."""
    many, of = whole_number(1), _OF_THE_RUNNER
    users = [1, 2, 4, 8, 16, 32, 64, 128]
    parser.add_argument("--curve", required=True, help="what `dspark profile` wrote, or a file of that form")
    parser.add_argument("--rollouts", required=True, nargs="+", help="rollouts with rounds of whole blocks")
    parser.add_argument("--users", type=many, nargs="+", default=users, help="requests at once")
    parser.add_argument("--threshold", type=share, default=0.3, help="of the threshold policy")
    parser.add_argument("--each", type=many, default=4, help="requests per user, one after the other")
    parser.add_argument("--seed", type=whole_number(0), default=0, help="fixes what is drawn")
    parser.add_argument("--drafter", default="", help="an exported draft model: also run the real runner")
    runner = parser.add_argument_group("the real runner (with --drafter)")
    tried = " ".join(map(str, of["tried"]))
    runner.add_argument("--tried", type=many, nargs="+", help=f"numbers of users it is run at (default: {tried})")
    runner.add_argument("--requests", type=many, help=f"requests at least, else one a user (default: {of['requests']})")
    runner.add_argument("--repeats", type=many, help=f"interleaved repeats (default: {of['repeats']})")
    runner.add_argument("--target", help=f"the draft model's target (default: {of['target']})")
    runner.add_argument("--dtype", choices=["bfloat16", "float32"], help=f"of the target (default: {of['dtype']})")
    parser.add_argument("--out", default="runs/simulation", help="the folder to write")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(args: argparse.Namespace) -> int:
    """Simulate, write, print; 0. Raises DsparkError on rollouts without whole blocks, of other models than those given,
    or a broken curve."""
    _fill(args)
    check_place(args.out, folder=True)
    curve = CapacityCurve.load(args.curve)
    made = _made_by(args.rollouts)
    trajectories, rounds = _recorded(args.rollouts)
    pools = pools_of(rounds)
    jobs = [Job(t.domain, len(t.prompt_ids), len(t.response_ids)) for t in trajectories]
    chosen = ways(len(next(iter(pools.values()))[0].drafted), args.threshold)
    if told := Scheduler("global", 0, 0.0, curve).told:
        print(f"note: {told}", file=sys.stderr)
    loaded = _load(args, made) if args.drafter else None
    report = predict(pools, curve, chosen, jobs, args.users, args.each, args.seed)
    if loaded:
        report["tried"] = _try(loaded, args, trajectories, pools, curve, chosen)
    _write(report, Path(args.out))
    print(json.dumps(report) if args.json else "\n".join([*as_lines(report), f"written to {args.out}"]))
    return 0


def _fill(args: argparse.Namespace) -> None:
    """The defaults of what was not given. Raises DsparkError for an option that would be ignored."""
    given = [f"--{name}" for name in _OF_THE_RUNNER if getattr(args, name) is not None]
    if given and not args.drafter:
        raise DsparkError(
            f"simulate: expected --drafter with {', '.join(given)}, but got none. Give it, or leave them out."
        )
    for name, default in _OF_THE_RUNNER.items():
        if getattr(args, name) is None:
            setattr(args, name, default)


def _made_by(folders: list[str]) -> dict[str, Any]:
    """The hashes of the models that all of them were rolled out with. Raises DsparkError when there are several, or a
    verifier that accepts otherwise than the runner that is simulated."""
    made: dict[str, Any] = {}
    for folder in folders:
        facts = read_manifest(folder)["run"]
        refuse_chosen(folder)
        if facts.get("verifier") not in ("coupled", "greedy"):
            raise DsparkError(
                f"{folder}: expected rollouts of the coupled or the greedy verifier, but got {facts.get('verifier')}, "
                "which accepts other drafts than the runner that is simulated. Roll out with --verifier coupled."
            )
        here = {name: facts.get(name) for name in _MADE_BY}
        _refuse_others(folder, here, made or here, f"those of {folders[0]}")
        made = here
    return made


def _refuse_others(folder: str, found: dict[str, Any], wanted: dict[str, Any], whose: str) -> None:
    others = [title for name, title in _MADE_BY.items() if found[name] != wanted[name]]
    if others:
        raise DsparkError(
            f"{folder}: expected rollouts with the models {whose}, but got another {' and another '.join(others)}. "
            "Roll out with them first: dspark rollout."
        )


def _recorded(folders: list[str]) -> tuple[list[Trajectory], dict[str, list[Round]]]:
    trajectories: list[Trajectory] = []
    rounds: dict[str, list[Round]] = {}
    for folder in folders:
        recorded = drafters_rounds(folder)
        for t in read_trajectories(folder):
            trajectories.append(t)
            rounds.setdefault(t.domain, []).extend(recorded.get(t.trajectory_id, []))
    return trajectories, rounds


def _load(args: argparse.Namespace, made: dict[str, Any]) -> Loaded:
    """The models that the rollouts were made with. Raises DsparkError when those given are others."""
    loaded = load(args.target, args.dtype, args.drafter)
    facts = loaded.facts("coupled")
    _refuse_others(" ".join(args.rollouts), made, facts, f"of --target {args.target} and --drafter {args.drafter}")
    load_curve(args.curve, loaded)  # says it when it is another machine's
    return loaded


def _try(
    loaded: Loaded, args: argparse.Namespace, trajectories: list[Trajectory], pools: Pools, curve: CapacityCurve,
    chosen: list[Way],
) -> list[dict[str, Any]]:  # fmt: skip
    assert loaded.bundle is not None, "load() was given a draft model"
    trial = trying.Trial(
        loaded.target, loaded.bundle.drafter, trajectories, args.requests, args.repeats, args.seed
    )  # fmt: skip
    with progress("runner", "run", args.quiet) as update:
        return trying.try_out(trial, pools, curve, chosen, args.tried, update)


def _write(report: dict[str, Any], folder: Path) -> None:
    """simulation.json and the pictures."""
    text = json.dumps(report, indent=1, allow_nan=False) + "\n"
    drawn = {name: png(figure) for name, figure in pictures(report).items()}
    for name, picture in drawn.items():
        atomic_write(folder / f"{name}.png", picture)
    atomic_write(folder / "simulation.json", text)
