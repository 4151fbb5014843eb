"""Training samples from disk: trajectory directories (Parquet) or a conversations file (JSONL).

Read straight from the Parquet columns (DESIGN section 11), because the room that writes them lies below this one. Every
shard's hash is checked against the directory's manifest first: a damaged or foreign shard is an error, never data.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow.parquet as pq
import torch
from torch import Tensor

from dspark.contracts import DsparkError, Round
from dspark.corpus.conversations import load_dialogues
from dspark.files import child_path, read_json, sha256_file

_TRAJECTORY_COLUMNS = ["trajectory_id", "prompt_id", "domain", "prompt_ids", "response_ids", "sampling"]
_ROUND_COLUMNS = ["trajectory_id", "round", "anchor", "drafted", "verified", "accepted"]
_DRAFTED_BY = "source"  # a column that rollouts of earlier releases lack: there a draft model was the only one
LOOKED_UP = "rounds that a lookup drafted, not the draft model"


@dataclass(frozen=True, slots=True)
class Sample:
    """One sequence: ids [S] int64, loss_mask [S] bool (true on tokens to learn from); stop_ids end a response."""

    sample_id: str
    prompt_id: str
    domain: str
    ids: Tensor
    loss_mask: Tensor
    stop_ids: tuple[int, ...] = ()
    rounds: tuple[Round, ...] = ()


@dataclass(frozen=True, slots=True)
class Samples:
    """Usable samples, and why others, or some of their rounds, were left out (reason -> count)."""

    samples: list[Sample]
    dropped: dict[str, int]


def read_samples(
    paths: Iterable[str], tokenizer: Any = None, rounds: bool = False, quarantine: Path | None = None
) -> Samples:
    """All samples of the given trajectory directories and conversation files, in order of path, then of the prompts as
    they were given to the rollout (its manifest says), then row: "the first so many prompts" are those of its file.

    tokenizer: needed for a conversations file only. rounds: also read the rounds beside trajectories, the draft model's
    alone. quarantine: the
    folder for the broken rows of conversation files. Raises DsparkError when a path is missing, damaged, or nothing
    usable is left.
    """
    kept: list[Sample] = []
    dropped: Counter[str] = Counter()
    for index, path in enumerate(map(Path, paths)):
        if not path.exists():
            raise DsparkError(f"training data: expected {path} to exist. Make it first (dspark prepare or rollout).")
        if rounds and not path.is_dir():
            raise DsparkError(f"{path}: expected a folder of rollouts made with a draft model, but it is a file.")
        if path.is_dir():
            found, looked_up = _directory(path, rounds)
            dropped[LOOKED_UP] += looked_up
        else:
            aside = quarantine / f"{index}-{path.name}.quarantine.jsonl" if quarantine else None
            found, reasons = _conversations(path, tokenizer, aside)
            dropped.update(reasons)
        supervised = [sample for sample in found if bool(sample.loss_mask.any())]
        kept += supervised
        dropped["no supervised token"] += len(found) - len(supervised)
    if not kept:
        raise DsparkError(f"training data: expected supervised tokens in {list(paths)}, but got none ({dropped}).")
    return Samples(kept, dict(+dropped))


def refuse_foreign(name: str, ids: Tensor, vocab_size: int, longest: int) -> None:
    """Raises DsparkError, naming the sample, when the target cannot read its ids [S]: one that is no row of its
    vocabulary, or more of them than it has positions."""
    if len(ids) > longest:
        raise DsparkError(
            f"training data: expected sequences of at most {longest} tokens (the target's max_position_embeddings), "
            f"but {name} has {len(ids)}. Leave it out, or make it shorter."
        )
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    if len(wrong):
        raise DsparkError(
            f"training data: expected token ids from 0 to {vocab_size - 1} (the target's vocabulary), but {name} has "
            f"{int(wrong[0])}. The data were made with another tokenizer."
        )


def drafted_by(path: str) -> str | None:
    """Hash of the layers that drafted a folder's rounds; None where its manifest does not say."""
    return _run(path).get("draft_layers")


def refuse_chosen(path: str | Path) -> None:
    """Raises DsparkError for a folder of rounds in which a policy chose by their confidences what was verified: the
    blocks verified whole are the likelier ones, and say of those alone how drafts do."""
    config = _config(path)
    policy = config.get("policy") or "fixed"
    if policy != "fixed" and not config.get("commit_to_cap"):
        raise DsparkError(
            f"{path}: expected rounds of whole blocks, but got those that policy {policy} chose, which are the "
            "likelier ones. Roll out with policy fixed, or with --commit-to-cap."
        )


def sampled_as(paths: Iterable[str]) -> str | None:
    """How the rollouts of these folders were sampled, for people; None where no manifest says."""
    names = ("temperature", "top_p", "top_k", "min_p", "verifier")
    configs = [config for config in map(_config, paths) if "temperature" in config]
    found = [", ".join(f"{name} {config.get(name)}" for name in names) for config in configs]
    return "; ".join(dict.fromkeys(found)) or None


def _run(path: str | Path) -> dict[str, Any]:
    """What a folder's manifest says of the run that made it; empty where it does not."""
    manifest = read_json(Path(path) / "manifest.json", "trajectory manifest")
    run = manifest.get("run") if isinstance(manifest, dict) else None
    return run if isinstance(run, dict) else {}


def _given(path: Path) -> list[str]:
    """The prompts' ids in the order they were given; empty where rows lie in that order (an earlier release's)."""
    manifest = read_json(path / "manifest.json", "trajectory manifest")
    return manifest.get("given") or [] if isinstance(manifest, dict) else []


def _config(path: str | Path) -> dict[str, Any]:
    config = _run(path).get("config")
    return config if isinstance(config, dict) else {}


def drafted_ids(sample: Sample) -> Tensor:
    """The ids that a draft model proposed in the sample's rounds, [N] int64."""
    return torch.tensor([i for r in sample.rounds for i in r.drafted], dtype=torch.int64)


def _shards(path: Path, kind: str) -> list[Path]:
    """The manifest's files of one kind ("trajectories", "rounds") in order, each checked against its recorded hash."""
    manifest = read_json(path / "manifest.json", "trajectory manifest")
    try:
        state, entries = manifest["state"], [entry[kind] for entry in manifest["shards"]]
        wanted = {entry["file"]: entry["sha256"] for entry in entries}
    except (KeyError, TypeError) as error:
        raise DsparkError(f"{path}: expected a manifest of trajectory shards, but part of it is missing.") from error
    if state != "complete" or not wanted:
        raise DsparkError(f"{path}: expected a finished run, but its manifest says {state!r}. Finish the run first.")
    files = [child_path(path, name, "trajectory manifest") for name in wanted]
    for file in files:
        if sha256_file(file) != wanted[file.name]:
            raise DsparkError(f"{file}: expected the bytes its manifest records, but the hash differs. Make it again.")
    return files


def _rows(
    shards: list[Path], columns: list[str], absent: Mapping[str, Any] = MappingProxyType({})
) -> Iterable[dict[str, Any]]:
    """The rows of some columns, all of which must be there, and of those in `absent`, which stand for what is not."""
    for shard in shards:
        try:
            there = pq.read_schema(shard).names
            table = pq.read_table(shard, columns=[*columns, *(name for name in absent if name in there)])
        except (OSError, ValueError, KeyError) as error:
            raise DsparkError(f"{shard}: expected Parquet with columns {columns}, but got: {error}.") from error
        missing = sorted(set(columns) - set(table.column_names))
        if missing:
            raise DsparkError(f"{shard}: expected columns {columns}, but {missing} are missing.")
        yield from ({**absent, **row} for row in table.to_pylist())


def _directory(path: Path, with_rounds: bool) -> tuple[list[Sample], int]:
    """The samples, and how many rounds were passed over, for the draft model had no part in them."""
    rounds: dict[str, tuple[Round, ...]] = {}
    looked_up = 0
    if with_rounds:
        refuse_chosen(path)
        rounds, looked_up = _read_rounds(path)
    return list(_samples(path, rounds)), looked_up


def _samples(path: Path, rounds: dict[str, tuple[Round, ...]]) -> Iterable[Sample]:
    given = {name: place for place, name in enumerate(_given(path))}
    rows = _rows(_shards(path, "trajectories"), _TRAJECTORY_COLUMNS)
    for row in sorted(rows, key=lambda row: given.get(row["prompt_id"], 0)):
        prompt, response = row["prompt_ids"], row["response_ids"]
        mask = torch.zeros(len(prompt) + len(response), dtype=torch.bool)
        mask[len(prompt) :] = True
        stops = tuple(json.loads(row["sampling"] or "{}").get("stop_ids", ()))
        ids = torch.tensor([*prompt, *response], dtype=torch.int64)
        key = row["trajectory_id"]
        for r in rounds.get(key, ()):
            _check_round(path, key, r, ids)
        yield Sample(key, row["prompt_id"], row["domain"] or "", ids, mask, stops, rounds.get(key, ()))


def _check_round(path: Path, name: str, r: Round, ids: Tensor) -> None:
    """Raises DsparkError for a round that this sequence cannot have had."""
    first, last = r.anchor + 1, r.anchor + r.accepted
    inside = 0 <= r.anchor < len(ids) - 1 and 0 <= r.accepted <= r.verified <= len(r.drafted) and last < len(ids)
    if not inside or ids[first : last + 1].tolist() != list(r.drafted[: r.accepted]):
        raise DsparkError(
            f"{path}: expected rounds whose accepted drafts are the sequence's own tokens, but got anchor {r.anchor}, "
            f"{r.accepted} of {len(r.drafted)} accepted in {name}. Rounds and trajectories are not of one run."
        )


def _read_rounds(path: Path) -> tuple[dict[str, tuple[Round, ...]], int]:
    """The draft model's rounds by trajectory, and how many a lookup drafted."""
    found: dict[str, list[tuple[int, Round]]] = {}
    looked_up = 0
    for row in _rows(_shards(path, "rounds"), _ROUND_COLUMNS, {_DRAFTED_BY: "drafter"}):
        if row[_DRAFTED_BY] != "drafter":
            looked_up += 1
            continue
        made = Round(row["anchor"], tuple(row["drafted"]), row["verified"], row["accepted"])
        found.setdefault(row["trajectory_id"], []).append((row["round"], made))
    made_by = {key: tuple(r for _, r in sorted(items, key=lambda item: item[0])) for key, items in found.items()}
    return made_by, looked_up


def _conversations(path: Path, tokenizer: Any, quarantine: Path | None) -> tuple[list[Sample], dict[str, int]]:
    """The samples of a JSONL or Parquet file of conversations, and how many rows were left out, with the load's own
    words; the rows themselves go to the quarantine file."""
    if tokenizer is None:
        raise DsparkError(f"{path}: expected a tokenizer for a conversations file. Set data.init_args.tokenizer.")
    read = load_dialogues(path, tokenizer, quarantine=quarantine)
    samples = []
    for example in read.examples:
        ids = torch.tensor(example.dialogue.ids, dtype=torch.int64)
        mask = torch.tensor(example.dialogue.loss_mask, dtype=torch.bool)
        name = example.dialogue_id
        samples.append(Sample(f"{name}.{example.turn}", name, example.domain, ids, mask))
    if not read.dropped:
        return samples, {}
    return samples, {f"{read.summary}" + (f" ({quarantine} says why)" if quarantine else ""): len(read.dropped)}
