"""The same rollout under every setting that must not show: one digest over its trajectory shards, again and again.

Each run is `dspark rollout` in a process of its own, which is what threads, workers and SIGKILL need. Left out on
purpose: speed (dspark bench verify), and rounds sidecars, which say what speculation did and so differ with it.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dspark.contracts import DsparkError
from dspark.rollouts.journal import JOURNAL_NAME
from dspark.rollouts.store import verify_hashes

_ROOTS = tuple(str(Path(__file__).parents[2] / part) for part in (".", "kernels"))  # so that a checkout finds itself
POLL = 0.005  # seconds between looks at a journal


@dataclass(frozen=True)
class Way:
    """One way to run it. options: of `dspark rollout`, after the shared ones. threads: 0 for as many as here. kills:
    how often it is killed with SIGKILL and started again."""

    title: str
    options: tuple[str, ...] = ()
    threads: int = 0
    kills: int = 0


@dataclass(frozen=True)
class Rolled:
    """What came of it. digest: sha256 over all trajectory shards, one after the other. kills: how often it was killed.
    verified, accepted: drafts of the last start."""

    title: str
    digest: str
    shards: int
    trajectories: int
    tokens: int
    kills: int = 0
    verified: int = 0
    accepted: int = 0


@dataclass(frozen=True)
class Table:
    """All runs, and the titles of those that were not run with the reason."""

    rows: list[Rolled]
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def differing(self) -> list[str]:
        """The titles of the runs whose files are not the first one's."""
        return [row.title for row in self.rows if row.digest != self.rows[0].digest]


def ways(prompts: Path, shuffled: Path, drafter: str, threads: int, kills: int) -> list[Way]:
    """The settings, the plainest first. threads: of this process; the runs with another number have 1, or 2."""
    first, other = ("--prompts", str(prompts)), 2 if threads == 1 else 1
    found = [
        Way("batch 16, 1 worker", (*first, "--batch_size", "16")),
        Way("batch 4", (*first, "--batch_size", "4")),
        Way("batch 1", (*first, "--batch_size", "1")),
        Way("shuffled prompts", ("--prompts", str(shuffled), "--batch_size", "16")),
        Way("3 workers", (*first, "--batch_size", "4", "--workers", "3")),
        Way(f"{other} thread{'s' * (other > 1)} instead of {threads}", (*first, "--batch_size", "16"), other),
        Way(f"killed {kills} times and resumed", (*first, "--batch_size", "4"), kills=kills),
    ]
    if drafter:
        found += [
            Way("with the draft model", (*first, "--batch_size", "16", "--drafter", drafter)),
            Way("with the draft model, batch 1", (*first, "--batch_size", "1", "--drafter", drafter)),
        ]
    return found


def roll(way: Way, shared: Sequence[str], out: Path) -> Rolled:
    """Runs one way into `out`. Raises DsparkError with its own words when it fails, and when it ends before it could be
    killed as often as it should."""
    command = [sys.executable, "-m", "dspark", "rollout", *shared, *way.options, "--out", str(out), "--quiet", "--json"]
    environ = environment(way.threads)
    for kill in range(way.kills):
        _run_and_kill(command, environ, out, kill + 1, way)
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise DsparkError(f"bench rollouts: expected the run {way.title!r} to end well, but got: {done.stderr.strip()}")
    return rolled(way, out, json.loads(done.stdout.splitlines()[-1]))


def rolled(way: Way, out: Path, summary: dict[str, Any]) -> Rolled:
    """The row of a finished folder, all of its hashes checked."""
    resumed = summary["resumed"]
    assert (resumed > 0) == (way.kills > 0), f"{way.title}: {resumed} trajectories were there before its last start"
    manifest, digest = verify_hashes(out), hashlib.sha256()
    for entry in manifest["shards"]:
        digest.update((out / entry["trajectories"]["file"]).read_bytes())
    counts = manifest["counts"]
    return Rolled(
        way.title, digest.hexdigest(), len(manifest["shards"]), counts["trajectories"], counts["tokens"], way.kills,
        summary["drafts_verified"], summary["drafts_accepted"],
    )  # fmt: skip


def _run_and_kill(command: list[str], environment: dict[str, str], out: Path, number: int, way: Way) -> None:
    """Kills it once it has finished something that it had not when it was started."""
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    before = finished(out)
    while process.poll() is None and finished(out) <= before:
        time.sleep(POLL)
    process.send_signal(signal.SIGKILL)
    if process.wait() != -signal.SIGKILL:
        raise DsparkError(
            f"bench rollouts: expected to kill {way.title!r} in the middle, but its start {number} ended by itself "
            f"(exit code {process.returncode}). Give more --limit or --max_tokens."
        )


def finished(out: Path) -> int:
    """Trajectories that a run in this folder has stored, until it is done."""
    path = out / JOURNAL_NAME
    return path.read_bytes().count(b"\n") if path.exists() else 0


def environment(threads: int) -> dict[str, str]:
    """Of a process of ours that runs from this very checkout. threads: 0 for as many as here."""
    paths = os.pathsep.join([*_ROOTS, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    more = {"OMP_NUM_THREADS": str(threads)} if threads else {}
    return {**os.environ, "PYTHONPATH": paths, **more}


def table(chosen: Sequence[Way], run: Callable[[Way], Rolled], skip: Callable[[Way], str]) -> Table:
    """Every way in turn. skip: why one cannot be run here ("" = it can)."""
    skipped = {way.title: reason for way in chosen if (reason := skip(way))}
    return Table([run(way) for way in chosen if way.title not in skipped], skipped)


def as_lines(found: Table) -> list[str]:
    """A row a run; then whether all are equal."""
    width = max(len(title) for title in (*(row.title for row in found.rows), *found.skipped)) + 2
    lines = [f"{'run':<{width}}{'trajectories':>12}{'tokens':>8}{'shards':>8}  sha256 of the shards"]
    for row in found.rows:
        drafts = f"  {row.verified} drafts verified, {row.accepted} accepted" if row.verified else ""
        lines.append(
            f"{row.title:<{width}}{row.trajectories:>12}{row.tokens:>8}{row.shards:>8}  {row.digest[:12]}{drafts}"
        )
    lines += [f"{title:<{width}}not run: {reason}" for title, reason in found.skipped.items()]
    return [*lines, f"differing: {', '.join(found.differing)}" if found.differing else "all equal"]
