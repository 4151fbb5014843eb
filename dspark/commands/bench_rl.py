"""`dspark bench rl`, `rl-runs` and `following`: what an RL step costs, and RL runs side by side."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from dspark.bench import following, rl_runs, rl_step
from dspark.calibration.figures import png
from dspark.commands.recipe_options import whole_number
from dspark.commands.running import Loaded, load
from dspark.contracts import DsparkError, Request, SamplingParams
from dspark.corpus.prompts import load_prompts
from dspark.files import atomic_write, check_place
from dspark.noise import derive_seed

BELONGS = {"runs": ("following",), "out": ("following", "runner"), "recipe": ("rl-runs",), "steps": ("rl-runs",)}
RECIPE, STEPS, KILLS = "recipes/rl.yaml", 8, 2
SAVING = [{"class_path": "dspark.training.callbacks.LastCheckpoint", "init_args": {"every_n_train_steps": 2}}]


@dataclass(frozen=True)
class RlOptions:
    """What the step is made of: `samples` answers to each of the first `limit` prompts, at temperature 1, each of
    `max_tokens` tokens, `batch` at once."""

    prompts: str = "data/prompts/test.jsonl"
    limit: int = 4
    samples: int = 8
    max_tokens: int = 48
    batch: int = 32
    repeats: int = rl_step.REPEATS


def add_rl_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that only these have; None where not given."""
    parser.add_argument(
        "--runs", nargs="+", metavar="NAME=FOLDER", help="for following: folders with the history.jsonl of an RL run"
    )
    parser.add_argument("--out", help="for following: a picture to write (.png); for runner: a file (.json)")
    parser.add_argument("--recipe", help=f"for rl-runs: of the run (default: {RECIPE})")
    parser.add_argument("--steps", type=whole_number(1), help=f"for rl-runs: updates of each run (default: {STEPS})")


def rl(args: argparse.Namespace) -> int:
    """Measure and print; 0. Raises DsparkError where log-probabilities that must match do not."""
    names = RlOptions.__dataclass_fields__
    options = RlOptions(**{name: getattr(args, name) for name in names if getattr(args, name) is not None})
    loaded = load(args.target, args.dtype or "bfloat16", args.drafter or "")
    sides = 3 + bool(args.drafter)
    with tqdm(desc="rl", unit="step", total=sides * options.repeats, disable=args.quiet, file=sys.stderr,
              leave=False) as bar:  # fmt: skip
        found = rl_step.bench_rl(
            loaded.target, loaded.bundle.drafter if loaded.bundle else None, _requests(loaded, options), options.batch,
            options.repeats, bar.update,
        )  # fmt: skip
    print(json.dumps({name: asdict(one) for name, one in found.items()}) if args.json else _text(found, options))
    return 0


def _requests(loaded: Loaded, options: RlOptions) -> list[Request]:
    prompts = load_prompts(options.prompts, loaded.tokenizer).prompts[: options.limit]
    longest = loaded.target.config.max_position_embeddings
    if max(len(p.prompt_ids) for p in prompts) + options.max_tokens > longest:
        raise DsparkError(f"bench rl: expected prompts that fit {longest} tokens with their answers. Lower max_tokens.")
    params = SamplingParams(temperature=1.0, max_tokens=options.max_tokens)  # nothing stops early: equal work
    return [
        Request(p.prompt_ids, params.with_seed(derive_seed(0, p.prompt_id, sample)))
        for p in prompts
        for sample in range(options.samples)
    ]


def _text(found: dict[str, rl_step.Timing], options: RlOptions) -> str:
    lines = [
        f"{torch.get_num_threads()} threads; {options.limit} prompts x {options.samples} samples x "
        f"{options.max_tokens} tokens, {options.repeats} interleaved repeats",
        f"{'seconds, medians':<16}{'rollout':>9}{'update':>9}{'step / plain: min, median, max':>33}{'differs':>10}",
    ]
    for name, one in found.items():
        low, middle, high = one.ratio
        ratio = f"{low:.2f} {middle:.2f} {high:.2f}"
        lines.append(f"{name:<16}{one.rollout[1]:>9.2f}{one.update[1]:>9.2f}{ratio:>33}{one.differs:>10.1e}")
    equal = found[rl_step.WHOLE].ratio[1]
    lines.append(f"matching over plain at equal work (whole prompts): {equal:.2f}")
    if rl_step.SPECULATIVE in found:
        drafted, alone = found[rl_step.SPECULATIVE], found[rl_step.MATCHING]
        lines.append(
            f"speculative rollout: {alone.rollout[1] / drafted.rollout[1]:.2f} x as fast, tau {drafted.tau:.2f}"
        )
    return "\n".join([*lines, "differs: largest difference of a log-probability, sampler against trainer"])


def runs(args: argparse.Namespace) -> int:
    """Run and print; 0 when every run has the same rollouts and the same final policy, else 1."""
    chosen = rl_runs.ways(args.drafter or "", args.kills or KILLS)
    overrides = [f"--trainer.max_steps={args.steps or STEPS}", f"--trainer.callbacks={json.dumps(SAVING)}"]
    overrides += [f"{rl_runs.ROLLOUT}.dtype={args.dtype}"] if args.dtype else []
    with (
        tempfile.TemporaryDirectory(prefix="dspark-rl-") as folder,
        tqdm(chosen, desc="rl-runs", unit="run", disable=args.quiet, file=sys.stderr, leave=False) as bar,
    ):
        recipe = args.recipe or RECIPE
        rows = [rl_runs.run(way, recipe, overrides, Path(folder) / str(i)) for i, way in enumerate(bar)]
    other = rl_runs.differing(rows)
    told = json.dumps({"rows": [asdict(row) for row in rows], "differing": other})
    print(told if args.json else "\n".join(rl_runs.as_lines(rows)))
    return 1 if other else 0


def follow(args: argparse.Namespace) -> int:
    """Print the runs side by side, and draw them; 0."""
    if not args.runs:
        raise DsparkError("bench following: expected runs, but got none. Give --runs frozen=runs/a following=runs/b.")
    runs: dict[str, Any] = {}
    for word in args.runs:
        name, _, path = word.rpartition("=")
        if (name or path) in runs:
            raise DsparkError(f"bench following: expected each name once, but got {name or path!r} twice.")
        runs[name or path] = following.read_history(path)
    if args.out:
        check_place(args.out)
    same = following.same_policy(runs)
    if args.json:
        print(json.dumps({"same_policy": same, "runs": runs}))
    else:
        said = "the same policy in all runs, by the hash of its weights before every rollout"
        said = said if same else "the runs trained different policies"
        print("\n".join([*following.table(runs), said]))
    if args.out:
        atomic_write(args.out, png(following.figure(runs)))
        print(f"picture: {args.out}", file=sys.stderr)
    return 0
