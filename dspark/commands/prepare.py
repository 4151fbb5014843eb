"""Prompts in, answers by the target out: what the draft model learns from.

One rollout without a draft model for each split of a prompt folder: data/prompts/train.jsonl becomes OUT/train, and so
on. The answers are trajectories like any other: `dspark replay` regenerates them bit for bit.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from dspark.commands.recipe_options import add_recipe_options, read_options
from dspark.commands.rollout import as_text, roll
from dspark.commands.running import Loaded, load
from dspark.contracts import DsparkError
from dspark.rollouts.config import RolloutConfig

EXAMPLES = """
examples:
  dspark prepare recipes/prepare.yaml
  dspark prepare recipes/prepare.yaml --target my/model --prompts my/prompts --out runs/mine
"""


@dataclass(frozen=True, slots=True)
class PrepareConfig:
    """prompts: a folder with one prompt file a split. splits: which. The rest is as in RolloutConfig."""

    target: str = "smollm2-135m-instruct"
    dtype: str = "bfloat16"
    prompts: str = "data/prompts"
    splits: tuple[str, ...] = ("train", "calibration", "test")
    limit: int = 0
    run_seed: int = 0
    temperature: float = 0.2
    top_p: float = 0.9
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 96
    batch_size: int = 32
    out: str = "runs/responses"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "prepare config") -> PrepareConfig:
        """Raises DsparkError naming an unknown key."""
        unknown = set(values) - {f.name for f in fields(cls)}
        if unknown:
            known = ", ".join(f.name for f in fields(cls))
            raise DsparkError(f"{where}: expected known keys, but got {sorted(unknown)[0]!r}. Known: {known}.")
        config = cls(**values)
        for name in ("target", "dtype", "prompts", "out"):
            if not isinstance(getattr(config, name), str) or not getattr(config, name).strip():
                raise DsparkError(f"{where}: expected {name} to be a name, but got {getattr(config, name)!r}.")
        if not isinstance(config.splits, list | tuple) or not config.splits:
            raise DsparkError(f"{where}: expected splits to be a list of names, but got {config.splits!r}.")
        return config

    def rollout(self, split: str) -> RolloutConfig:
        """The rollout that answers one split. Raises DsparkError when the split has no file."""
        found = [p for p in (Path(self.prompts) / f"{split}{end}" for end in (".jsonl", ".parquet")) if p.is_file()]
        if not found:
            raise DsparkError(
                f"prepare: expected {self.prompts}/{split}.jsonl (or .parquet), but there is none. "
                "Give --prompts a folder with one file a split, or name the splits it has with --splits."
            )
        shared = {k: v for k, v in asdict(self).items() if k not in ("prompts", "splits", "out")}
        return RolloutConfig.from_dict({**shared, "prompts": str(found[0]), "out": f"{self.out}/{split}"}, "prepare")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `dspark prepare`."""
    add_recipe_options(parser, PrepareConfig)
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Answer every split; 0. Raises DsparkError on a mistake in recipe, prompts or target."""
    config = read_options(args, PrepareConfig)
    summaries = prepare(config, quiet=args.quiet)
    print(json.dumps(summaries) if args.json else "\n".join(as_text(s) for s in summaries.values()))
    return 0


def prepare(config: PrepareConfig, loaded: Loaded | None = None, quiet: bool = False) -> dict[str, dict[str, Any]]:
    """One summary a split. All splits are checked before the first token is generated."""
    rollouts = {split: config.rollout(split) for split in config.splits}
    loaded = loaded or load(config.target, config.dtype)
    return {split: roll(one, loaded, quiet, title=f"answers: {split}") for split, one in rollouts.items()}
