"""manifest.json: what a rollout directory holds, what made it, and a hash for every file and for itself.

    format, version     of this file
    state               "running" until every trajectory is in a shard, then "complete"
    run                 what made it: `run_facts`, "prompts" (sha256 over the prompts' ids and tokens) and "config", the
                        fields of RolloutConfig
    order               {"trajectories": count, "sha256": over their ids in canonical order}
    shard_size, shards  [{"index", "counts", "trajectories": {file, sha256, rows}, "rounds": {file, sha256, rows}}]
    counts              of the finished shards: trajectories, tokens, finish reasons, rewards missing
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
FORMAT, VERSION = "dspark-rollouts", 1
FACTS = ("target", "drafter", "calibration", "tokenizer", "verifier", "dtype", "device", "kernels", "threads")
# May change when a run is resumed: paths (the hashes count, not the places) and what the reproducibility contract says
# has no influence on the results.
_FREE = frozenset(
    {
        "threads",
        "batch_size",
        "draft_layers",
        "config.prompts",
        "config.target",
        "config.drafter",
        "config.out",
        "config.curve",
    }
)  # draft_layers: a part of `drafter`

# What a manifest of an earlier release, which lacks them, stands for.
_ABSENT = {
    "run.config.policy": ("", "fixed"), "run.config.threshold": (0.0,), "run.config.truncation": ("", "off"),
    "run.config.keep_tokens": (0,), "run.curve": (None,), "run.config.lookup": (0,),
}  # fmt: skip


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


def new_manifest(run: dict[str, Any], order: list[str], shard_size: int) -> dict[str, Any]:
    """A manifest with no shard yet. Raises DsparkError when `run` leaves out one of FACTS."""
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
    was, now = identity(old), identity(new)
    was |= {key: now[key] for key, meant in _ABSENT.items() if key in now and key not in was and now[key] in meant}
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
    manifest = read_json(path, "rollout manifest")
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise DsparkError(f'{path}: expected a manifest with format "{FORMAT}", but this is none.')
    if manifest.get("version") != VERSION:
        raise DsparkError(
            f"{path}: expected version {VERSION}, but got {manifest.get('version')!r}. "
            "Read it with the release that wrote it, or collect again."
        )
    body = {key: value for key, value in manifest.items() if key != "sha256"}
    if manifest.get("sha256") != _hash_or_none(body):
        raise DsparkError(f"{path}: expected the content its own sha256 names, but it was changed or is damaged.")
    _check_shape(manifest, path)
    for entry in manifest["shards"]:
        for kind in ("trajectories", "rounds"):
            child_path(folder, entry[kind]["file"], f"{path}: shard {entry['index']}")
    return manifest


def total_counts(shards: list[dict[str, Any]]) -> dict[str, Any]:
    """The sum over the shards' own counts."""
    total: dict[str, Any] = {"trajectories": 0, "tokens": 0, "rewards_missing": 0, "finish_reasons": {}}
    for entry in shards:
        counts = entry["counts"]
        for key in ("trajectories", "tokens", "rewards_missing"):
            total[key] += counts[key]
        for reason, count in counts["finish_reasons"].items():
            total["finish_reasons"][reason] = total["finish_reasons"].get(reason, 0) + count
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
            for kind in ("trajectories", "rounds"):
                ok = ok and {"file", "sha256", "rows"} <= entry[kind].keys()
        count, size = manifest["order"]["trajectories"], manifest["shard_size"]
        every = list(range(-(-count // size)))
        ok = ok and set(indices) <= set(every) and (manifest["state"] != "complete" or indices == every)
    except (KeyError, TypeError, AttributeError, ZeroDivisionError):
        ok = False
    if not ok:
        raise DsparkError(f"{path}: expected a manifest of version {VERSION}, but parts of it are missing or disagree.")


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
