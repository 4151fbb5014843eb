"""run.json beside an RL run's rollouts: whose they are. So that no run goes on among the rollouts of another."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from dspark.contracts import DsparkError
from dspark.files import atomic_write, read_json

RUN = "run.json"
THREADS = "threads"  # decide on the last bits of gradients: no other run, but no equal one either


def keep_run_record(out: str | Path, record: dict[str, Any], first: int) -> None:
    """Writes `record`, or holds it against the one that is there. first: number of the next rollout's folder. Raises
    DsparkError, naming what differs, when `out` holds the rollouts of another run, or ones to come that were made with
    another number of threads."""
    path = Path(out) / RUN
    if not path.exists():
        if any(Path(out).glob("[0-9]*")):
            raise DsparkError(f"{out}: expected no rollouts of another program, but found some. Choose another out.")
        atomic_write(path, json.dumps(record, indent=1, sort_keys=True) + "\n")
        return
    was = read_json(path, "record of an RL run")
    if not isinstance(was, dict):
        raise DsparkError(f"{path}: expected the record of an RL run, but got {type(was).__name__}. Restore the file.")
    refuse_other_run(str(out), was, record)
    if was.get(THREADS) != record[THREADS]:
        _other_threads(Path(out), was.get(THREADS), record[THREADS], first)


def _other_threads(out: Path, was: Any, now: Any, first: int) -> None:
    later = sorted(p.name for p in out.glob("[0-9]*") if p.name > f"{first:06d}")
    if later:
        raise DsparkError(
            f"{out}: expected the {was} threads that made {later[0]} and what follows, but got {now}, whose gradients "
            f"have other last bits. Give OMP_NUM_THREADS={was}, or delete these folders."
        )
    print(
        f"note: this run was begun with {was} threads and goes on with {now}: the last bits of its gradients will be "
        "others than in one piece.",
        file=sys.stderr,
    )


def refuse_other_run(where: str, saved: dict[str, Any], given: dict[str, Any]) -> None:
    """Raises DsparkError naming what the record of a run that is there has otherwise; its threads may be others."""
    was, now = flat({**saved, THREADS: None}), flat({**given, THREADS: None})
    differing = [key for key in sorted(was.keys() | now.keys()) if was.get(key) != now.get(key)]
    if differing:
        shown = "; ".join(f"{key} was {was.get(key)!r}, now {now.get(key)!r}" for key in differing[:5])
        more = f"; and {len(differing) - 5} more" if len(differing) > 5 else ""
        raise DsparkError(
            f"{where}: expected the settings of the run that is there, but got others: {shown}{more}. Give the old "
            "ones, or begin a new run in another folder (rollout.out and trainer.default_root_dir)."
        )


def flat(values: Any, prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as one: {"settings.rollout.temperature": ...}."""
    if not isinstance(values, dict) or not values:
        return {prefix: list(values) if isinstance(values, tuple) else values}
    found: dict[str, Any] = {}
    for key, inner in values.items():
        found |= flat(inner, f"{prefix}.{key}" if prefix else str(key))
    return found
