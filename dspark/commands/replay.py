"""Regenerate trajectories and compare them bit for bit.

First the files' hashes, then the models' (the manifest names them), then token ids, both fp32 log-probabilities and the
finish reason. Prints a count and exits with 0, or the first difference (trajectory, position, field, both values) and
exits with 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from dspark.commands.recipe_options import whole_number
from dspark.commands.running import load, progress
from dspark.contracts import DsparkError
from dspark.rollouts.replay import ReplayResult, replay, sampled_by_us
from dspark.rollouts.store import verify_hashes

EXAMPLES = """
examples:
  dspark replay runs/demo/rollouts
  dspark replay runs/demo/rollouts --sample 16 --rescore
  dspark replay runs/demo/rollouts --drafter "" --batch_size 1
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `dspark replay`."""
    parser.add_argument("folder", help="a folder that `dspark rollout` or `dspark prepare` wrote")
    parser.add_argument("--sample", type=whole_number(1), help="regenerate so many trajectories (default: all)")
    parser.add_argument("--seed", type=whole_number(0), default=0, help="which ones --sample takes")
    parser.add_argument(
        "--rescore", action="store_true", help="also compare one teacher-forced pass: the trainer's view"
    )
    parser.add_argument("--target", help="where the target is now (default: as recorded)")
    parser.add_argument("--drafter", help='where the draft model is now; "" for none (default: as recorded)')
    parser.add_argument("--batch_size", type=whole_number(1), default=32, help="sequences in flight; changes nothing")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """0 when every bit is equal, 1 when one differs. Raises DsparkError on damaged files or other models."""
    result = replay_folder(
        args.folder, args.sample, args.seed, args.rescore, args.target, args.drafter, args.batch_size, args.quiet
    )
    if args.json:
        print(
            json.dumps({**asdict(result), "first_difference": result.first_difference and str(result.first_difference)})
        )
    else:
        print(as_text(result))
    return 0 if result.ok else 1


def replay_folder(
    folder: str,
    sample: int | None = None,
    seed: int = 0,
    rescore: bool = False,
    target: str | None = None,
    drafter: str | None = None,
    batch_size: int = 32,
    quiet: bool = False,
) -> ReplayResult:
    """Replay with the models the manifest's config names, or those given instead."""
    recorded = verify_hashes(folder)["run"]  # damage is said before anything is loaded
    config = recorded["config"]
    sampled_by_us(folder, recorded, rescore)
    truncation = config.get("truncation") or "off"
    if rescore and truncation != "off":
        raise DsparkError(
            f"{folder}: expected whole prompts to rescore, but its prompts were cut ({truncation}, the last "
            f"{config['keep_tokens']} tokens kept), which a teacher-forced pass does not do. Leave out --rescore."
        )
    loaded = load(target or config["target"], config["dtype"], config["drafter"] if drafter is None else drafter)
    # Under rejection the lengths are part of what is sampled; else they show in nothing, and need no curve.
    lengths = {name: config[name] for name in ("policy", "threshold") if config["verifier"] == "rejection"
               and loaded.bundle and config.get(name)}  # fmt: skip
    prompts = {"truncation": truncation, "keep_tokens": config.get("keep_tokens", 0)}
    gamma = config["gamma"] if loaded.bundle else None
    engine = loaded.engine(config["verifier"], gamma, batch_size, **prompts, **lengths)
    with progress("replay", quiet=quiet) as bar:
        return replay(folder, engine, sample, seed, loaded.facts(config["verifier"]), rescore=rescore, on_progress=bar)


def as_text(result: ReplayResult) -> str:
    for note in result.notes:
        print(f"note: {note}", file=sys.stderr)
    how = "regenerated" if result.regenerated else "rescored (another engine sampled them)"
    counted = f"{result.checked} trajectories, {result.tokens} tokens {how}"
    if result.ok:
        return f"{counted}: every bit equal"
    return f"{counted}: {result.differing_bits} bits differ, first at {result.first_difference}"
