"""Rollouts by the deterministic runner: prompts in, trajectories and a manifest out.

A trajectory is a function of the target, the prompt, the sampling settings and its own seed; under the coupled and
greedy verifiers neither the draft model, the batch, the workers, the prompts' order nor an interruption shows in it. A
run that was interrupted goes on where it stopped when the same command is given again.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from dspark.commands.recipe_options import add_recipe_options, read_options
from dspark.commands.running import (
    Loaded,
    load,
    load_curve,
    progress,
)
from dspark.contracts import DsparkError
from dspark.corpus.prompts import PromptSet, load_prompts
from dspark.files import sha256_json
from dspark.rollouts.collect import Generator, collect
from dspark.rollouts.config import RolloutConfig
from dspark.rollouts.manifest import MANIFEST_NAME
from dspark.rollouts.recompute import Recomputed
from dspark.rollouts.settle import longest_prompt, quarantine_path, settled
from dspark.rollouts.vllm_engine import VllmEngine
from dspark.rollouts.workers import Workers
from dspark.runner import Engine
from dspark.runner.curve import CapacityCurve
from dspark.runner.lookup import Lookup
from dspark.target.load import checkpoint_dir

EXAMPLES = """
examples:
  dspark rollout recipes/rollout.yaml
  dspark rollout recipes/rollout.yaml --samples_per_prompt 8 --out runs/group8
  dspark rollout recipes/rollout.yaml --commit-to-cap --gamma 3 --out runs/events
  dspark rollout recipes/rollout.yaml --policy global --curve runs/demo/curve.json
  dspark rollout recipes/rollout.yaml --drafter "" --lookup 5 --out runs/lookup
  dspark rollout recipes/rollout.yaml --workers 4 --reward mine.py:score
  dspark rollout recipes/rollout.yaml --engine vllm --recompute --drafter ""

recipes/rollout.yaml says what each field means and may be; docs/rollouts.md, what
lies in the folder, workers and vLLM; docs/scheduling.md, how lengths are chosen
(policy, threshold, curve), what drafts without a draft model (lookup) and how
prompts are cut (truncation).
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `dspark rollout`."""
    add_recipe_options(parser, RolloutConfig, skip=("commit_to_cap", "recompute"))
    parser.add_argument(
        "--commit-to-cap", action="store_true", default=None, help="verify whole blocks, commit at most gamma"
    )
    parser.add_argument(
        "--recompute", action="store_true", default=None, help="with --engine vllm: log-probabilities by our target"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Collect, and print what was collected; 0. Raises DsparkError on a mistake in recipe, prompts or models."""
    config = read_options(args, RolloutConfig)
    summary = roll(config, quiet=args.quiet)
    print(json.dumps(summary) if args.json else as_text(summary))
    return 0


def roll(
    config: RolloutConfig, loaded: Loaded | None = None, quiet: bool = False, title: str = "rollout"
) -> dict[str, Any]:
    """Run one rollout config to its end. ``loaded``: models already in memory (they must be the config's)."""
    if Path(config.out).exists() and not Path(config.out).is_dir():
        raise DsparkError(f"{config.out}: expected a folder to write, but there is a file. Give --out another name.")
    loaded = loaded or load(config.target, config.dtype, config.drafter)
    config = settled(config, loaded.bundle)
    curve = load_curve(config.curve, loaded)
    engine = _engine(config, loaded, curve)
    generator, facts = _generator(config, loaded, engine)
    if note := engine.scheduler().told:
        print(f"note: {note}", file=sys.stderr)
    # What an earlier run set aside stays until this one is known to continue it.
    earlier = (Path(config.out) / MANIFEST_NAME).exists()
    prompts = _prompts(config, loaded, engine, None if earlier else quarantine_path(config.out))
    with progress(title, quiet=quiet) as bar:
        summary = collect(
            prompts.prompts,
            generator,
            config,
            config.out,
            {**facts, "curve": sha256_json(curve.to_dict()) if curve else None},
            bar,
            eos_ids=loaded.target.eos_ids,
            decode=partial(loaded.tokenizer.decode, skip_special_tokens=True),
        )
    if earlier:
        _prompts(config, loaded, engine, quarantine_path(config.out))
    told: dict[str, Any] = {"skipped_prompts": config.skip, "dropped_rows": len(prompts.dropped)}
    told["policy"], told["verifier"] = config.policy, config.verifier
    told |= _counted(generator)
    return {**summary, **told, "quarantine": str(quarantine_path(config.out)) if prompts.dropped else None}


def _engine(config: RolloutConfig, loaded: Loaded, curve: CapacityCurve | None) -> Engine:
    lookup = Lookup(config.lookup) if config.lookup else None
    return loaded.engine(config.verifier, config.gamma, config.batch_size, lookup, curve=curve, **_schedule(config))


def _generator(config: RolloutConfig, loaded: Loaded, engine: Engine) -> tuple[Generator, dict[str, Any]]:
    """Who generates, and the facts of it for the manifest."""
    facts = loaded.facts(config.verifier)
    if config.engine == "vllm":
        theirs = VllmEngine(checkpoint_dir(config.target), config.dtype, config.batch_size)
        facts |= theirs.facts(config.recompute)
        return Recomputed(theirs, engine.score) if config.recompute else theirs, facts
    if config.workers > 1:
        return Workers(partial(worker_parts, _placed(config)), config.workers, config.batch_size, facts), facts
    return engine, facts


def worker_parts(config: RolloutConfig) -> tuple[Engine, dict[str, Any]]:
    """What a worker makes for itself: the runner of a settled config, and the facts of its models and build."""
    loaded = load(config.target, config.dtype, config.drafter)
    return _engine(config, loaded, load_curve(config.curve, loaded)), loaded.facts(config.verifier)


def _placed(config: RolloutConfig) -> RolloutConfig:
    """With absolute paths: a worker's current folder may be another."""

    def place(text: str) -> str:
        return str(Path(text).absolute()) if text and Path(text).exists() else text

    return replace(
        config, target=place(config.target), drafter=place(config.drafter), curve=place(config.curve)
    )  # fmt: skip


def _counted(generator: Generator) -> dict[str, Any]:
    """What this process' runner, or the comparison with another engine's log-probabilities, has counted."""
    if isinstance(generator, Recomputed):
        return {"recomputed": asdict(generator.compared)}
    if isinstance(generator, Engine):
        prefixes = generator.prefixes
        return {
            "prompt_tokens": prefixes.prompt_tokens,
            "prompt_tokens_reused": prefixes.reused,
            "prefix_hits": prefixes.hits,
        }
    return {}


def _schedule(config: RolloutConfig) -> dict[str, Any]:
    """Of EngineOptions."""
    names = ("commit_to_cap", "threshold", "truncation", "keep_tokens")
    return {"policy": config.policy or "fixed", **{name: getattr(config, name) for name in names}}


def _prompts(config: RolloutConfig, loaded: Loaded, engine: Engine, quarantine: Path | None) -> PromptSet:
    """The prompts that fit the context with their answers; the others, and broken rows, are set aside."""
    longest = longest_prompt(config, loaded.target, engine.options.kv_tokens)
    return load_prompts(config.prompts, loaded.tokenizer, config.split or None, quarantine, max_tokens=longest)


def as_text(summary: dict[str, Any]) -> str:
    reasons = ", ".join(f"{count} {name}" for name, count in summary["finish_reasons"].items())
    lines = [
        f"{summary['trajectories']} trajectories, {summary['tokens']} tokens ({reasons}) in {summary['out']}",
        f"{summary['new_tokens']} tokens in this run, {summary['tokens_per_second']:.0f} tokens/s; "
        f"{summary['resumed']} trajectories were there already",
    ]
    if rounds := summary["rounds"]:
        verified, accepted = summary["drafts_verified"] / rounds, summary["drafts_accepted"] / rounds
        lines.append(f"{verified:.2f} drafts verified and {accepted:.2f} accepted per round ({summary['policy']})")
    if summary.get("prompt_tokens_reused"):
        lines.append(
            f"{summary['prompt_tokens_reused']} of {summary['prompt_tokens']} prompt tokens were read before "
            f"({summary['prefix_hits']} prompts began like another one)"
        )
    if summary["set_aside"]:
        lines.append(
            f"{summary['set_aside']} trajectories were set aside (aside-*.jsonl): some token has no finite "
            "log-probability"
        )
    if compared := summary.get("recomputed"):
        lines.append(
            f"log-probabilities by our target; the engine's own differ in {compared['differing']} of "
            f"{compared['tokens']} tokens, by at most {compared['largest']:.2g} nats"
        )
    if summary["skipped_prompts"]:
        lines.append(f"{summary['skipped_prompts']} prompts were passed over (skip)")
    if summary["dropped_rows"]:
        lines.append(f"{summary['dropped_rows']} broken prompt rows were set aside: {summary['quarantine']} says why")
    if summary["reward_failures"]:
        kinds = ", ".join(f"{count} {kind}" for kind, count in summary["reward_failures_by_kind"].items())
        told = f" (in this run: {kinds})" if kinds else ""
        lines.append(f"{summary['reward_failures']} samples have no reward: the function failed on them{told}")
    for error in summary["reward_errors"]:
        lines.append(f"reward: {error}")
    return "\n".join(lines)
