"""manifest.json: what a rollout directory holds, what made it, and a hash for every file and for itself.

    format, version     of this file. Version 1, which is still read, kept trajectories in the order of the prompt file
    state               "running" until every trajectory is in a shard, then "complete"
    run                 what made it: `run_facts`, "prompts" (sha256 over the prompts' ids and tokens, by id) and
                        "config", the fields of RolloutConfig
    order               {"trajectories": count, "sha256": over their ids in canonical order}
    given               the prompts' ids in the order they were given, for readers that take "the first so many"; not a
                        part of what identifies the run
    shard_size, shards  [{"index", "counts", "trajectories": {file, sha256, rows}, "rounds": {file, sha256, rows}}], and
                        "aside" likewise where trajectories had to be set aside (aside.py)
    counts              of the finished shards: trajectories, tokens, finish reasons, rewards missing, set aside
    sha256              over all of the above

No times of day are in it, so equal runs have equal manifests.
"""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import pyarrow
import torch

from dspark.contracts import DsparkError
from dspark.files import atomic_write, canonical_json, child_path, read_json, sha256_json
from dspark.noise import rng_scheme

MANIFEST_NAME = "manifest.json"
FORMAT, VERSION, READABLE = "dspark-rollouts", 2, (1, 2)
FILES = ("trajectories", "rounds", "aside")  # kinds of a shard's files; the last where there is one
FACTS = ("target", "drafter", "calibration", "tokenizer", "verifier", "dtype", "device", "kernels", "threads")
# May change when a run is resumed: paths (the hashes count, not the places) and what the reproducibility contract says
# has no influence on the results.
_FREE = frozenset(
    {
        "threads",
        "batch_size",
        "workers",
        "draft_layers",
        "config.prompts",
        "config.target",
        "config.drafter",
        "config.out",
        "config.curve",
    }
)  # draft_layers: a part of `drafter`


def run_facts(
    *,
    target: str,
    drafter: str | None,
    calibration: str | None,
    tokenizer: str,
    verifier: str,
    dtype: str,
    device: str,
    kernels: dict[str, Any] | str,
    threads: int,
    draft_layers: str | None = None,
) -> dict[str, Any]:
    """What made a run, for collect's manifest_base and replay's `running`.

    target, drafter, calibration, tokenizer: sha256 of each (None = not used); draft_layers: of the draft model without
    its confidence head. dtype and device: "bfloat16",
    "cpu". kernels: the ops' fingerprint. Versions and the noise scheme are added here.
    """
    given = dict(locals())
    versions = {"torch": torch.__version__, "pyarrow": pyarrow.__version__, "python": platform.python_version()}
    return {**given, "versions": versions, "rng_scheme": rng_scheme(verifier)}


def differs(one: Any, other: Any) -> bool:
    """Whether two values of a fact are different; threads, which have no influence by contract, aside."""
    if isinstance(one, dict) and isinstance(other, dict):
        return any(one.get(key) != other.get(key) for key in (one.keys() | other.keys()) - {"threads"})
    return bool(one != other)


def differing_facts(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """The names of the facts in which two processes that shall give the same bytes are not alike."""
    return sorted(key for key in (one.keys() | other.keys()) - {"threads"} if differs(one.get(key), other.get(key)))


def new_manifest(run: dict[str, Any], order: list[str], shard_size: int, given: list[str]) -> dict[str, Any]:
    """A manifest with no shard yet. given: the prompts' ids as they came. Raises DsparkError when `run` leaves out one
    of FACTS."""
    run = json.loads(canonical_json(run))  # tuples become lists, as they will be when read back
    missing = [key for key in (*FACTS, "rng_scheme", "versions") if key not in run]
    if missing:
        raise DsparkError(f"manifest: expected the facts of a run (run_facts), but {', '.join(missing)} are missing.")
    return {
        "format": FORMAT,
        "version": VERSION,
        "state": "running",
        "run": run,
        "order": {"trajectories": len(order), "sha256": sha256_json(order)},
        "given": given,
        "shard_size": shard_size,
        "shards": [],
        "counts": total_counts([]),
    }


def identity(manifest: dict[str, Any]) -> dict[str, Any]:
    """What must be the same for a run to be continued, flat: {"run.target": ..., "order.sha256": ...}."""
    flat = _flatten({name: manifest[name] for name in ("run", "order", "shard_size")})
    return {key: value for key, value in flat.items() if not _is_free(key)}


def check_same_run(old: dict[str, Any], new: dict[str, Any], folder: Path) -> None:
    """Raises DsparkError naming what differs between the run in the folder and the one about to continue it."""
    if old["version"] != VERSION:
        raise DsparkError(
            f"{folder}: expected a run of this release, but an earlier one began it, which kept trajectories in the "
            "order of the prompt file; now they lie in the order of their ids. It can be read and replayed. To go on "
            "with it use the release that began it, or choose another folder."
        )
    was, now = identity(old), identity(new)
    differing = [key for key in sorted(was.keys() | now.keys()) if was.get(key, ...) != now.get(key, ...)]
    if differing:
        said = [k for k in differing if not k.endswith("sha256") and k != "run.sampling"] or differing  # plain values
        shown = "; ".join(f"{k.removeprefix('run.')} was {_told(was, k)}, now {_told(now, k)}" for k in said[:6])
        more = f"; and {len(said) - 6} more" if len(said) > 6 else ""
        raise DsparkError(
            f"{folder}: expected the settings that started this run, but got others: {shown}{more}. "
            "Choose another folder, or give the old settings."
        )


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    body = {key: value for key, value in manifest.items() if key != "sha256"}
    hashed = {**body, "sha256": sha256_json(body)}
    atomic_write(folder / MANIFEST_NAME, _pretty(hashed))


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """Raises DsparkError when there is none, it is damaged, of another version, or names files outside the folder."""
    folder = Path(folder)
    path = folder / MANIFEST_NAME
    if (folder / "run.json").exists() and not path.exists():
        raise DsparkError(f"{folder}: expected one rollout, but this holds those of an RL run. Give {folder}/000000.")
    manifest = read_json(path, "rollout manifest")
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise DsparkError(f'{path}: expected a manifest with format "{FORMAT}", but this is none.')
    if manifest.get("version") not in READABLE or isinstance(manifest["version"], bool):
        raise DsparkError(
            f"{path}: expected version {' or '.join(map(str, READABLE))}, but got {manifest.get('version')!r}. "
            "Read it with the release that wrote it, or collect again."
        )
    body = {key: value for key, value in manifest.items() if key != "sha256"}
    if manifest.get("sha256") != _hash_or_none(body):
        raise DsparkError(f"{path}: expected the content its own sha256 names, but it was changed or is damaged.")
    _check_shape(manifest, path)
    for entry in manifest["shards"]:
        for kind in kinds(entry):
            child_path(folder, entry[kind]["file"], f"{path}: shard {entry['index']}")
    return manifest


def kinds(entry: dict[str, Any]) -> list[str]:
    """Of which kinds a shard has files."""
    return [kind for kind in FILES if kind in entry]


def total_counts(shards: list[dict[str, Any]]) -> dict[str, Any]:
    """The sum over the shards' own counts; "set_aside" only where something was."""
    total: dict[str, Any] = {"trajectories": 0, "tokens": 0, "rewards_missing": 0, "finish_reasons": {}}
    for entry in shards:
        counts = entry["counts"]
        for key in ("trajectories", "tokens", "rewards_missing"):
            total[key] += counts[key]
        for reason, count in counts["finish_reasons"].items():
            total["finish_reasons"][reason] = total["finish_reasons"].get(reason, 0) + count
    if aside := sum(entry["counts"].get("set_aside", 0) for entry in shards):
        total["set_aside"] = aside
    return total


def _check_shape(manifest: dict[str, Any], path: Path) -> None:
    """A manifest with a right hash that another program may have made: is everything we read there?"""
    try:
        identity(manifest)
        ok_config = {"target", "dtype", "drafter", "verifier", "gamma"} <= manifest["run"]["config"].keys()
        indices = [entry["index"] for entry in manifest["shards"]]
        ok = ok_config and manifest["state"] in ("running", "complete") and indices == sorted(set(indices))
        ok = ok and manifest["counts"] == total_counts(manifest["shards"])
        for entry in manifest["shards"]:
            for kind in {*FILES[:2], *kinds(entry)}:
                ok = ok and {"file", "sha256", "rows"} <= entry[kind].keys()
        count, size = manifest["order"]["trajectories"], manifest["shard_size"]
        every = list(range(-(-count // size)))
        given = manifest["given"] if manifest["version"] > 1 else []
        ok = ok and isinstance(given, list) and all(isinstance(name, str) for name in given)
        ok = ok and set(indices) <= set(every) and (manifest["state"] != "complete" or indices == every)
    except (KeyError, TypeError, AttributeError, ZeroDivisionError):
        ok = False
    if not ok:
        raise DsparkError(
            f"{path}: expected a manifest of version {manifest['version']}, but parts of it are missing or disagree."
        )


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        flat |= _flatten(inner, f"{prefix}.{key}" if prefix else key)
    return flat


def _told(facts: dict[str, Any], key: str) -> str:
    found = facts.get(key, ...)
    return "not recorded" if found is ... else repr(found)


def _is_free(key: str) -> bool:
    return key.rsplit(".", 1)[-1] in _FREE or key.removeprefix("run.") in _FREE


def _hash_or_none(body: Any) -> str | None:
    try:
        return sha256_json(body)
    except ValueError:  # NaN, lone surrogates: nothing we wrote
        return None


def _pretty(obj: Any) -> str:
    """Readable, and still one text per content."""
    return json.dumps(obj, indent=1, ensure_ascii=False, sort_keys=True, allow_nan=False) + "\n"
