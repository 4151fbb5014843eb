"""The parts of `dspark bench` that run prompts or read rollouts: verify, lookup, acceptance and replay."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

from tqdm import tqdm

from dspark.bench import depth, looking_up, replaying, verifying
from dspark.bench.timed import room
from dspark.commands.bench_rl import RlOptions
from dspark.commands.bench_rollouts import RolloutsOptions, add_rollouts_arguments
from dspark.commands.recipe_options import share, whole_number
from dspark.commands.running import Loaded, drafters_rounds, load, load_curve
from dspark.contracts import DsparkError, Request, SamplingParams
from dspark.corpus.prompts import load_prompts
from dspark.drafter.model import Drafter
from dspark.noise import derive_seed
from dspark.rollouts.store import read_trajectories
from dspark.runner import EngineOptions
from dspark.runner.acceptance import Drafted
from dspark.runner.curve import CapacityCurve
from dspark.runner.profile import ProfileOptions, measure
from dspark.runner.schedule import Scheduler
from dspark.settings import Settings
from dspark.target.decoder import Target
from dspark.target.load import load_target, load_tokenizer
from dspark.training.sources import refuse_chosen

# Which of the measurements an option is for.
BELONGS = {
    **dict.fromkeys(("prompts", "limit", "max_tokens"), ("verify", "lookup", "replay", "rollouts", "rl", "runner")),
    "samples": ("lookup", "rollouts", "rl"), "drafter": ("verify", "lookup", "rollouts", "rl", "rl-runs", "runner"),
    "batch": ("verify", "lookup", "rl"), "curve": ("verify", "lookup", "runner"), "threshold": ("verify",),
    "width": ("lookup",), "kills": ("rollouts", "rl-runs"),
    "keep": ("replay",), "rollouts": ("acceptance",),
}  # fmt: skip
PROMPTS = "data/prompts/test.jsonl"
T = TypeVar("T", bound="VerifyOptions | LookupOptions | ReplayOptions")


@dataclass(frozen=True)
class VerifyOptions:
    """What `dspark bench verify` is run on."""

    prompts: str = PROMPTS
    limit: int = 8
    max_tokens: int = 48
    batch: int = 8
    threshold: float = 0.3
    repeats: int = verifying.REPEATS


@dataclass(frozen=True)
class LookupOptions:
    """What `dspark bench lookup` is run on. samples: of each prompt and epoch; width: most drafts looked up."""

    prompts: str = PROMPTS
    limit: int = 8
    samples: int = 4
    max_tokens: int = 48
    batch: int = 8
    width: int = 5
    repeats: int = looking_up.REPEATS


@dataclass(frozen=True)
class ReplayOptions:
    """What `dspark bench replay` is run on."""

    prompts: str = PROMPTS
    limit: int = 8
    max_tokens: int = 16
    repeats: int = replaying.REPEATS


def add_runner_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of verify, lookup, acceptance, replay and rollouts; None where not given, so that one that would be
    ignored is refused."""
    of, up, cut, rolled, many = VerifyOptions(), LookupOptions(), ReplayOptions(), RolloutsOptions(), whole_number(1)
    rl = RlOptions()
    parser.add_argument(
        "--drafter", help="for verify, and if you like for lookup, rollouts, rl and rl-runs: an exported draft model"
    )
    parser.add_argument(
        "--prompts", help=f"for verify, lookup, replay, rollouts, rl: a prompt file (default: {PROMPTS})"
    )
    parser.add_argument(
        "--limit", type=many, help=f"so many prompts, for verify, lookup, replay (default: {of.limit}), rollouts "
        f"({rolled.limit}) and rl ({rl.limit})"
    )  # fmt: skip
    parser.add_argument(
        "--samples", type=many, help=f"of a prompt, for lookup (in an epoch; default: {up.samples}), rollouts "
        f"({rolled.samples}) and rl ({rl.samples})"
    )  # fmt: skip
    parser.add_argument(
        "--max_tokens", type=many, help=f"of an answer, for verify, lookup, rl (default: {of.max_tokens}), replay "
        f"({cut.max_tokens}) and rollouts ({rolled.max_tokens})"
    )  # fmt: skip
    parser.add_argument(
        "--batch", type=many, help=f"requests at once, for verify, lookup (default: {of.batch}) and rl ({rl.batch})"
    )
    parser.add_argument("--width", type=many, help=f"for lookup: most drafts looked up (default: {up.width})")
    parser.add_argument(
        "--curve", help="what `dspark profile` wrote, for verify (default: measured first) and lookup (default: none, "
        "and every draft is verified)"
    )  # fmt: skip
    parser.add_argument("--threshold", type=share, help=f"for verify: of that policy (default: {of.threshold})")
    parser.add_argument(
        "--keep", type=many, nargs="+", help="for replay: suffixes to try (default: from the least on, by doubling, "
        "and the one from which a cut is exact)"
    )  # fmt: skip
    parser.add_argument("--rollouts", nargs="+", help="for acceptance: rollouts with rounds")
    add_rollouts_arguments(parser)


def _options(kind: type[T], args: argparse.Namespace) -> T:
    """What was given, the defaults for the rest."""
    return kind(**{f.name: getattr(args, f.name) for f in fields(kind) if getattr(args, f.name) is not None})


def verify(args: argparse.Namespace) -> int:
    """Measure and print; 0, or 1 when an output that must be plain decoding's is not, or nothing was tested."""
    options = _options(VerifyOptions, args)
    if not args.drafter:
        raise DsparkError("bench verify: expected an exported draft model, but got none. Give --drafter.")
    if args.curve:
        CapacityCurve.load(args.curve)  # a mistake is said before anything is loaded
    loaded = load(args.target, args.dtype or "bfloat16", args.drafter)
    assert loaded.bundle is not None, "load() was given a draft model"
    if loaded.bundle.drafter.confidence_head is None:
        raise DsparkError(f"{args.drafter}: expected a draft model with a confidence head, but this one has none.")
    rows = _verify(loaded, loaded.bundle.drafter, options, args)
    print(json.dumps([asdict(row) for row in rows]) if args.json else "\n".join(verifying.as_lines(rows)))
    run = [row for row in rows if not row.refused]
    return 1 if any(row.wrong for row in run) or not any(row.verdict == "yes" for row in run) else 0


def _verify(
    loaded: Loaded, drafter: Drafter, options: VerifyOptions, args: argparse.Namespace
) -> list[verifying.Verified]:
    requests = _requests("verify", loaded, options)
    with tqdm(desc="verify", unit="run", disable=args.quiet, file=sys.stderr, leave=False) as bar:
        curve = load_curve(args.curve or "", loaded) or _curve(loaded.target, drafter, options.batch)
        if told := Scheduler("global", 0, 0.0, curve).told:
            print(f"note: {told}", file=sys.stderr)
        setting = verifying.Setting(curve, options.threshold, options.batch, options.repeats)
        return verifying.bench_verify(loaded.target, drafter, requests, setting, lambda: bar.update())


def _requests(
    what: str, loaded: Loaded, options: VerifyOptions | LookupOptions, samples: int = 1, epoch: int = 0
) -> list[Request]:
    prompts = load_prompts(options.prompts, loaded.tokenizer).prompts[: options.limit]
    _check_context(what, [p.prompt_ids for p in prompts], options.max_tokens, loaded.target)
    params = SamplingParams(max_tokens=options.max_tokens, stop_ids=loaded.target.eos_ids)
    return [Request(p.prompt_ids, params.with_seed(derive_seed(epoch, p.prompt_id, sample)))
            for p in prompts for sample in range(samples)]  # fmt: skip


def _curve(target: Target, drafter: Drafter, batch: int) -> CapacityCurve:
    sizes = sorted({1, max(1, batch // 2), batch})
    return measure(target, drafter, ProfileOptions(tuple(sizes), repeats=5))


def lookup(args: argparse.Namespace) -> int:
    """Measure and print; 0, or 1 when an output is not plain decoding's, or nothing was tested."""
    options = _options(LookupOptions, args)
    if args.curve:
        CapacityCurve.load(args.curve)  # a mistake is said before anything is loaded
    loaded = load(args.target, args.dtype or "bfloat16", args.drafter or "")
    rows = _lookup(loaded, options, args)
    print(json.dumps([asdict(row) for row in rows]) if args.json else "\n".join(looking_up.as_lines(rows)))
    return 1 if any(row.wrong for row in rows) or not any(row.verdict == "yes" for row in rows) else 0


def _lookup(loaded: Loaded, options: LookupOptions, args: argparse.Namespace) -> list[looking_up.LookedUp]:
    epochs = [_requests("lookup", loaded, options, options.samples, epoch) for epoch in range(looking_up.EPOCHS)]
    curve = load_curve(args.curve or "", loaded)
    engine = EngineOptions(
        max_batch=options.batch, kv_tokens=room(epochs[0]), policy="global" if curve else "fixed", curve=curve
    )
    setting = looking_up.Setting(engine, options.width, options.repeats)
    with tqdm(desc="lookup", unit="run", disable=args.quiet, file=sys.stderr, leave=False) as bar:
        drafter = loaded.bundle.drafter if loaded.bundle else None
        return looking_up.bench_lookup(loaded.target, drafter, epochs, setting, lambda: bar.update())


def replay(args: argparse.Namespace) -> int:
    """Measure and print; 0."""
    options, backtracking = _options(ReplayOptions, args), Settings.from_env().max_backtracking_tokens
    target = load_target(args.target, args.dtype or "bfloat16")
    keeps = _keeps(target, args.keep, backtracking)
    setting = replaying.Setting(keeps, backtracking, options.max_tokens, options.repeats)
    prompts = _long_prompts(args.target, target, options, max(keeps))
    with tqdm(
        total=len(prompts), desc="replay", unit="prompt", disable=args.quiet, file=sys.stderr, leave=False
    ) as bar:
        found = replaying.bench_replay(target, prompts, setting, lambda: bar.update())
    print(json.dumps([asdict(one) for one in found]) if args.json else "\n".join(replaying.as_lines(found)))
    return 0


def _keeps(target: Target, given: Sequence[int] | None, backtracking: int) -> list[int]:
    """The suffixes to try. Raises DsparkError for a target that has none, and for one that is too short."""
    config = target.config
    if not config.consumers:
        raise DsparkError(
            "bench replay: expected --target to be a decoder-decoder target (YocoForCausalLM), but got "
            f"{config.architecture}. Train one: lightning fit recipes/yoco.yaml."
        )
    keeps = sorted(set(given or replaying.default_keeps(config, backtracking)))
    least = replaying.least_keep(config, backtracking)
    if keeps[0] < least:
        raise DsparkError(
            f"bench replay: expected --keep of at least {least} (the consumers' window, "
            f"{replaying.consumer_window(config)}, and the backtracking, {backtracking}), but got {keeps[0]}."
        )
    return keeps


def _long_prompts(source: str, target: Target, options: ReplayOptions, keep: int) -> list[list[int]]:
    """Prompts that every suffix is shorter than. Raises DsparkError when there are too few tokens for one, or one and
    its answer are longer than the target's context."""
    tokenizer: Any = load_tokenizer(source)
    loaded = load_prompts(options.prompts, tokenizer).prompts
    prompts = replaying.joined([p.prompt_ids for p in loaded], keep, options.limit)
    if not prompts:
        have = sum(len(p.prompt_ids) for p in loaded)
        raise DsparkError(
            f"bench replay: expected more than {keep} tokens in {options.prompts}, but got {have}. Lower --keep, or "
            "give more --prompts."
        )
    _check_context("replay", prompts, options.max_tokens, target)
    return prompts


def _check_context(what: str, prompts: Sequence[Sequence[int]], max_tokens: int, target: Target) -> None:
    longest, most = target.config.max_position_embeddings, max(map(len, prompts))
    if most + max_tokens > longest:
        raise DsparkError(
            f"bench {what}: expected prompts and answers of at most {longest} tokens (the target's context), but got a "
            f"prompt of {most} and {max_tokens}. Lower --max_tokens{' or --keep' * (what == 'replay')}."
        )


def acceptance(args: argparse.Namespace) -> int:
    """Count and print; 0."""
    if not args.rollouts:
        raise DsparkError("bench acceptance: expected --rollouts with folders that `dspark rollout` wrote, got none.")
    sequences = []
    for folder in args.rollouts:
        refuse_chosen(folder)
        rounds = drafters_rounds(folder)
        for t in read_trajectories(folder):
            last = len(t.prompt_ids) + len(t.response_ids) - 1
            sequences.append(Drafted(t.domain, rounds.get(t.trajectory_id, []), last))
    found = depth.by_depth(sequences)
    if not found:
        raise DsparkError(f"{', '.join(args.rollouts)}: expected rounds with drafts, but got none. Roll out with one.")
    print(json.dumps([asdict(one) for one in found]) if args.json else "\n".join(depth.as_lines(found)))
    return 0
