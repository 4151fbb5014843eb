"""Rollouts by the deterministic runner: prompts in, trajectories and a manifest out.

A trajectory is a function of the target, the prompt, the sampling settings and its own seed; under the coupled and
greedy verifiers neither the draft model, the batch nor an interruption shows in it. A run that was interrupted goes on
where it stopped when the same command is given again.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from dspark.commands.recipe_options import add_recipe_options, read_options
from dspark.commands.running import Loaded, load, progress, resolve_gamma
from dspark.contracts import DsparkError
from dspark.corpus.prompts import PromptSet, load_prompts
from dspark.rollouts.collect import collect
from dspark.rollouts.config import RolloutConfig
from dspark.rollouts.manifest import MANIFEST_NAME
from dspark.runner import Engine

EXAMPLES = """
examples:
  dspark rollout recipes/rollout.yaml
  dspark rollout recipes/rollout.yaml --samples_per_prompt 8 --out runs/group8
  dspark rollout recipes/rollout.yaml --commit-to-cap --gamma 3 --out runs/events
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `dspark rollout`."""
    add_recipe_options(parser, RolloutConfig, skip=("commit_to_cap",))
    parser.add_argument(
        "--commit-to-cap", action="store_true", default=None, help="verify whole blocks, commit at most gamma"
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
    config = replace(config, gamma=_settled_gamma(config, loaded))  # so that the manifest holds it
    engine = loaded.engine(config.verifier, config.gamma, config.batch_size, config.commit_to_cap)
    # What an earlier run set aside stays until this one is known to continue it.
    earlier = (Path(config.out) / MANIFEST_NAME).exists()
    prompts = _prompts(config, loaded, engine, None if earlier else quarantine_path(config.out))
    with progress(title, quiet=quiet) as bar:
        summary = collect(
            prompts.prompts,
            engine,
            config,
            config.out,
            loaded.facts(config.verifier),
            bar,
            eos_ids=loaded.target.eos_ids,
            decode=loaded.tokenizer.decode,
        )
    if earlier:
        _prompts(config, loaded, engine, quarantine_path(config.out))
    told = {"skipped_prompts": config.skip, "dropped_rows": len(prompts.dropped)}
    return {**summary, **told, "quarantine": str(quarantine_path(config.out))}


def _settled_gamma(config: RolloutConfig, loaded: Loaded) -> int | None:
    """Drafts verified per round, as a number where there is a draft model: what replay needs to know."""
    if loaded.bundle is None and config.gamma is not None:
        raise DsparkError(
            f"gamma: expected a draft model with it, but got gamma {config.gamma} and none. Give --drafter."
        )
    if loaded.bundle is None:
        return None
    return resolve_gamma(config.gamma, loaded.bundle) or loaded.bundle.config.num_predictions


def _prompts(config: RolloutConfig, loaded: Loaded, engine: Engine, quarantine: Path | None) -> PromptSet:
    """The prompts that fit the context with their answers; the others, and broken rows, are set aside."""
    longest = min(loaded.target.config.max_position_embeddings, engine.options.kv_tokens) - config.max_tokens
    outside = [i for i in config.stop_ids or () if not 0 <= i < loaded.target.vocab_size]
    if longest < 1 or outside:
        raise DsparkError(
            f"rollout: expected max_tokens below the context of {longest + config.max_tokens} and stop_ids in the "
            f"vocabulary of {loaded.target.vocab_size}, but got {config.max_tokens} and {outside}."
        )
    return load_prompts(config.prompts, loaded.tokenizer, config.split or None, quarantine, max_tokens=longest)


def quarantine_path(out: str) -> Path:
    """Where the broken rows of a run's prompt file go: beside its folder, which holds only what the manifest names."""
    return Path(out.rstrip("/") + ".quarantine.jsonl")


def as_text(summary: dict[str, Any]) -> str:
    reasons = ", ".join(f"{count} {name}" for name, count in summary["finish_reasons"].items())
    lines = [
        f"{summary['trajectories']} trajectories, {summary['tokens']} tokens ({reasons}) in {summary['out']}",
        f"{summary['new_tokens']} tokens in this run, {summary['tokens_per_second']:.0f} tokens/s; "
        f"{summary['resumed']} trajectories were there already",
    ]
    if summary["skipped_prompts"]:
        lines.append(f"{summary['skipped_prompts']} prompts were passed over (skip)")
    if summary["dropped_rows"]:
        lines.append(f"{summary['dropped_rows']} broken prompt rows were set aside: {summary['quarantine']} says why")
    if summary["reward_failures"]:
        lines.append(f"{summary['reward_failures']} samples have no reward: the function failed on them")
    for error in summary["reward_errors"]:
        lines.append(f"reward: {error}")
    return "\n".join(lines)
