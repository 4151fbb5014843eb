"""`dspark bench rollouts`: one rollout under all the settings that must not show in its files."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from dspark.bench import rolling
from dspark.commands.recipe_options import whole_number
from dspark.commands.rollout import roll
from dspark.commands.running import Loaded, load
from dspark.contracts import DsparkError
from dspark.corpus.sources import open_source
from dspark.files import atomic_write
from dspark.rollouts.config import RolloutConfig
from dspark.runner import Engine
from dspark.runner.lookup import Lookup

CHUNK = 7  # prompt tokens a pass: prompts come in several chunks, and their ends fall anywhere
_ENGINE = "prompts in chunks of 7"


@dataclass(frozen=True)
class RolloutsOptions:
    """What is rolled out: the first `limit` prompts, `samples` each, at temperature 1."""

    prompts: str = "data/prompts/test.jsonl"
    limit: int = 12
    samples: int = 2
    max_tokens: int = 24
    kills: int = 3


def add_rollouts_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that only this one has; None where not given."""
    of = RolloutsOptions()
    parser.add_argument(
        "--kills",
        type=whole_number(1),
        help=f"for rollouts (default: {of.kills}) and rl-runs (2): how often one is killed",
    )


def rollouts(args: argparse.Namespace) -> int:
    """Run and print; 0 when every run has the same trajectory shards, else 1."""
    names = ("prompts", "limit", "samples", "max_tokens", "kills")
    options = RolloutsOptions(**{name: getattr(args, name) for name in names if getattr(args, name) is not None})
    dtype = args.dtype or "bfloat16"
    with tempfile.TemporaryDirectory(prefix="dspark-rollouts-") as folder:
        found = _measure(Path(folder), options, args.target, dtype, args.drafter or "", args.quiet)
    print(json.dumps(_as_json(found)) if args.json else "\n".join(rolling.as_lines(found)))
    return 1 if found.differing else 0


def _measure(
    folder: Path, options: RolloutsOptions, target: str, dtype: str, drafter: str, quiet: bool
) -> rolling.Table:
    prompts, shuffled = _write_prompts(folder, options)
    config = RolloutConfig(
        target=target, dtype=dtype, prompts=str(prompts), samples_per_prompt=options.samples, batch_size=16,
        max_tokens=options.max_tokens, shard_size=_shard_size(options), out=str(folder / "chunks"),
    )  # fmt: skip
    chosen = rolling.ways(prompts, shuffled, drafter, torch.get_num_threads(), options.kills)
    chosen.append(rolling.Way(_ENGINE))
    with tqdm(desc="rollouts", total=len(chosen), unit="run", disable=quiet, file=sys.stderr, leave=False) as bar:

        def run(way: rolling.Way) -> rolling.Rolled:
            done = _run(way, config, folder / f"run-{chosen.index(way)}")
            _check(way, done)
            bar.update()
            return done

        return rolling.table(chosen, run, _why_not)


def _run(way: rolling.Way, config: RolloutConfig, out: Path) -> rolling.Rolled:
    """One way: in this process where the command line has no option for it."""
    if way.title != _ENGINE:
        return rolling.roll(way, _shared(config), out)
    loaded = load(config.target, config.dtype)
    chunked = _Chunked(loaded.source, loaded.dtype, loaded.target, None)
    return rolling.rolled(way, out, roll(replace(config, out=str(out)), chunked, quiet=True))


class _Chunked(Loaded):
    """Models whose runner reads prompts in small chunks."""

    def engine(
        self, verifier: str, gamma: int | None, max_batch: int = 32, lookup: Lookup | None = None, **more: Any
    ) -> Engine:
        return super().engine(verifier, gamma, max_batch, lookup, **more, prefill_chunk=CHUNK)


def _shared(config: RolloutConfig) -> list[str]:
    names = ("target", "dtype", "samples_per_prompt", "max_tokens", "shard_size")
    return [word for name in names for word in (f"--{name}", str(getattr(config, name)))]


def _shard_size(options: RolloutsOptions) -> int:
    """Three shards or so, of whole groups."""
    return max(1, options.limit // 3) * options.samples


def _check(way: rolling.Way, done: rolling.Rolled) -> None:
    """Raises DsparkError for a run that would prove nothing."""
    if "--drafter" in way.options and not 0 < done.accepted < done.verified:
        raise DsparkError(
            f"bench rollouts: expected drafts to be accepted and to be rejected, but got {done.accepted} accepted of "
            f"{done.verified}: equality would say nothing. Give more --limit or --max_tokens."
        )


def _why_not(way: rolling.Way) -> str:
    return "Ray is not installed" if "--workers" in way.options and find_spec("ray") is None else ""


def _write_prompts(folder: Path, options: RolloutsOptions) -> tuple[Path, Path]:
    """The first rows of the source as a file, and the same rows in the order of their hashes."""
    rows = [row.value for row in open_source(options.prompts, None).rows if row.value is not None][: options.limit]
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    turned = sorted(lines, key=lambda line: hashlib.sha256(line.encode()).digest())
    if len(lines) < 2 or turned == lines:
        raise DsparkError(
            f"bench rollouts: expected at least two prompts in {options.prompts}, in an order to shuffle, but got "
            f"{len(lines)}. Give another file, or more --limit."
        )
    files = folder / "prompts.jsonl", folder / "shuffled.jsonl"
    for file, content in zip(files, (lines, turned), strict=True):
        atomic_write(file, "".join(content))
    return files


def _as_json(found: rolling.Table) -> dict[str, Any]:
    return {**asdict(found), "differing": found.differing}
