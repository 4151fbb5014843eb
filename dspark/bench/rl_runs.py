"""The same RL run under every setting that must not show: one digest over its rollouts, one over its final policy.

Each run is `dspark fit RECIPE` in a process of its own, a few updates long. Who drafts, how many requests are in flight
and whether the run was killed (SIGKILL, in the middle of a rollout) and resumed changes neither. Left out on purpose:
the number of threads and of processes, which gradients depend on (docs/rl.md).
"""

from __future__ import annotations

import hashlib
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dspark.bench.rolling import POLL, environment, finished
from dspark.contracts import DsparkError
from dspark.files import sha256_file
from dspark.rollouts.store import read_rounds, verify_hashes

ROLLOUT = "--model.init_args.rollout"


@dataclass(frozen=True)
class Way:
    """One way to run it. overrides: of the recipe. kills: how often it is killed and resumed. drafts: whether it would
    prove nothing without accepted and rejected drafts."""

    title: str
    overrides: tuple[str, ...] = ()
    kills: int = 0
    drafts: bool = False


@dataclass(frozen=True)
class Ran:
    """What came of it. shards: sha256 over the trajectory shards of all rollouts in their order; policy: of the final
    weights' file; verified, accepted: drafts of all rounds."""

    title: str
    rollouts: int
    trajectories: int
    shards: str
    policy: str
    verified: int
    accepted: int

    @property
    def hashes(self) -> tuple[str, str]:
        return self.shards, self.policy


def ways(drafter: str, kills: int) -> list[Way]:
    """The settings, the recipe as it is first."""
    learned = f"{ROLLOUT}.drafter={drafter}"
    found = [
        Way("as the recipe says"),
        Way("3 requests in flight", (f"{ROLLOUT}.batch_size=3",)),
        Way(f"killed {kills} times and resumed", kills=kills),
        Way("lookup", (f"{ROLLOUT}.lookup=5",), drafts=True),
    ]
    if drafter:
        following = (learned, "--model.init_args.follow.steps=2")
        found += [
            Way("draft model, frozen", (learned,), drafts=True),
            Way("draft model, following", following, drafts=True),
            Way("draft model, following, 3 in flight", (*following, f"{ROLLOUT}.batch_size=3"), drafts=True),
            Way("draft model, following, killed", following, kills=kills, drafts=True),
            Way("lookup and draft model", (learned, f"{ROLLOUT}.lookup=5"), drafts=True),
        ]
    return found


def run(way: Way, recipe: str, overrides: Sequence[str], root: Path) -> Ran:
    """Runs one way in `root`. Raises DsparkError with its own words when it fails, when it ends before it could be
    killed as often as it should, and when it drafted nothing that could have gone wrong."""
    command = [sys.executable, "-m", "dspark", "fit", recipe, *overrides, *way.overrides,
               f"--trainer.default_root_dir={root}", f"{ROLLOUT}.out={root / 'rollouts'}", "--trainer.logger=false",
               "--trainer.enable_progress_bar=false"]  # fmt: skip
    for kill in range(way.kills):
        _run_and_kill([*command, *_resume(root)], root, way, kill + 1)
    done = subprocess.run(
        [*command, *_resume(root)], env=environment(0), capture_output=True, text=True, check=False
    )  # fmt: skip
    if done.returncode:
        raise DsparkError(f"bench rl-runs: expected the run {way.title!r} to end well, but got: {done.stderr.strip()}")
    ran = _ran(way, root)
    if way.drafts and not 0 < ran.accepted < ran.verified:
        raise DsparkError(
            f"bench rl-runs: expected drafts to be accepted and to be rejected with {way.title!r}, but got "
            f"{ran.accepted} accepted of {ran.verified}: equality would say nothing. Give more --steps."
        )
    return ran


def _resume(root: Path) -> list[str]:
    last = root / "last.ckpt"
    return [f"--ckpt_path={last}"] if last.exists() else []


def _run_and_kill(command: list[str], root: Path, way: Way, number: int) -> None:
    """Kills it in the middle of a rollout, the second one after those that were there at its start."""
    before = len(_folders(root))
    process = subprocess.Popen(command, env=environment(0), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and not (len(found := _folders(root)) > before + 1 and finished(found[-1])):
        time.sleep(POLL)
    process.send_signal(signal.SIGKILL)
    if process.wait() != -signal.SIGKILL:
        raise DsparkError(
            f"bench rl-runs: expected to kill {way.title!r} in the middle, but its start {number} ended by itself "
            f"(exit code {process.returncode}). Give more --steps."
        )


def _folders(root: Path) -> list[Path]:
    """Of the rollouts that have begun, in their order."""
    return sorted((root / "rollouts").glob("[0-9]*"))


def _ran(way: Way, root: Path) -> Ran:
    digest, trajectories, folders = hashlib.sha256(), 0, _folders(root)
    rounds = []
    for folder in folders:
        manifest = verify_hashes(folder)
        trajectories += manifest["counts"]["trajectories"]
        rounds += [r for some in read_rounds(folder).values() for r in some]
        for entry in manifest["shards"]:
            digest.update((folder / entry["trajectories"]["file"]).read_bytes())
    policy = sha256_file(root / "policy" / "model.safetensors")
    verified, accepted = sum(r.verified for r in rounds), sum(r.accepted for r in rounds)
    return Ran(way.title, len(folders), trajectories, digest.hexdigest(), policy, verified, accepted)


def differing(rows: Sequence[Ran]) -> list[str]:
    """The titles of the runs that are not the first one."""
    return [row.title for row in rows if row.hashes != rows[0].hashes]


def as_lines(rows: Sequence[Ran]) -> list[str]:
    """A row a run, at most 80 columns; then whether all are equal."""
    width = max(len(row.title) for row in rows) + 1
    lines = [f"{'run':<{width}}{'samples':>8}{'drafts':>7}{'accepted':>9}  {'rollouts':<10}policy"]
    lines += [
        f"{row.title:<{width}}{row.trajectories:>8}{row.verified:>7}{row.accepted:>9}  {row.shards[:8]:<10}"
        f"{row.policy[:8]}"
        for row in rows
    ]
    other = differing(rows)
    return [*lines, f"differing: {', '.join(other)}" if other else "all equal"]
