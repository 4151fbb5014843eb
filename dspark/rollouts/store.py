"""A rollout directory: manifest.json, trajectories-00000.parquet ..., rounds-00000.parquet ...

Trajectories lie in canonical order (prompt id, then sample), whatever order they finish in, in shards of a fixed size.
A shard is written as soon as its trajectories are all there, or set aside (aside.py): those have no row, but a line in
aside-00000.jsonl. A trajectory that has finished is in the journal before anything else happens, so a run that is
killed and started again generates only what had not finished, and its files are the bytes of a run that was never
killed. Reading always checks the hashes first.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from dspark.contracts import DsparkError, Round
from dspark.files import atomic_write, child_path, sha256_json
from dspark.rollouts import aside, shards
from dspark.rollouts.journal import Journal, Lock, has_entries
from dspark.rollouts.manifest import (
    MANIFEST_NAME,
    check_same_run,
    identity,
    kinds,
    new_manifest,
    read_manifest,
    total_counts,
    write_manifest,
)
from dspark.rollouts.trajectory import Trajectory, check_rounds, check_trajectory, from_json, to_json

Entry = tuple[Trajectory, tuple[Round, ...]] | aside.Aside


class TrajectoryWriter:
    """Writes one run into `folder`, continuing what an earlier, killed writer of the same run left there.

    run: the manifest's "run" (manifest.run_facts and the configuration), JSON-able. order: the ids of all
    trajectories in canonical order. given: the prompts' ids as they came. Use it as a context manager: leaving it
    releases the folder; only finish() marks the run complete. Raises DsparkError when another writer is at work in the
    folder, when the folder holds another run (naming what differs), or when what it holds is damaged.
    """

    def __init__(
        self, folder: str | Path, run: dict[str, Any], order: Sequence[str], shard_size: int, given: Sequence[str] = ()
    ):
        self._folder = Path(folder)
        self._order = list(order)
        self._place = {trajectory_id: i for i, trajectory_id in enumerate(self._order)}
        if len(self._place) != len(self._order) or not self._order or shard_size < 1:
            raise DsparkError(
                f"rollouts: expected at least one trajectory, distinct ids and shard_size >= 1, but got "
                f"{len(self._order)} ids, {len(self._place)} of them distinct, and shard_size {shard_size}."
            )
        self._size = shard_size
        new = new_manifest(run, self._order, shard_size, list(given))
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock = Lock(self._folder)
        except OSError as error:
            raise _unwritable(self._folder, error) from error
        try:
            self._open(new)
        except OSError as error:
            self._lock.release()
            raise _unwritable(self._folder, error) from error
        except BaseException:
            self._lock.release()
            raise

    def _open(self, new: dict[str, Any]) -> None:
        for leftover in self._folder.glob(".*.tmp"):  # of a write that was killed
            leftover.unlink()
        self._manifest = _continue(self._folder, new)
        self._pending: dict[int, Entry] = {}
        self._done = {i for s in self._manifest["shards"] for i in self._members(s["index"])}
        self._tokens = self._manifest["counts"]["tokens"]
        self._journal = Journal(self._folder, sha256_json(identity(self._manifest)))
        for entry in self._journal.entries:
            held = aside.from_json(entry) if aside.is_one(entry) else from_json(entry)
            place = self._place[_id_of(held)]
            if place not in self._done:
                self._hold(place, held)
        self._journal.entries.clear()
        for index in range(self.shard_count):
            self._write_if_full(index)

    @property
    def shard_count(self) -> int:
        return -(-len(self._order) // self._size)

    @property
    def done(self) -> int:
        """Trajectories that are safe on disk, those set aside included."""
        return len(self._done)

    @property
    def tokens(self) -> int:
        """Response tokens in them."""
        return int(self._tokens)

    def missing(self) -> list[int]:
        """Places in the canonical order still to be generated, ascending."""
        return [i for i in range(len(self._order)) if i not in self._done]

    def has(self, trajectory_id: str) -> bool:
        return self._place[trajectory_id] in self._done

    def add(self, trajectory: Trajectory, rounds: Sequence[Round] = ()) -> None:
        """Takes one finished trajectory, in any order; returns when it is on disk.

        Raises DsparkError when it is not part of this run, is there already, or breaks the record's rules.
        """
        place = self._free_place(trajectory.trajectory_id)
        check_trajectory(trajectory)
        check_rounds(rounds, f"trajectory {trajectory.trajectory_id}")
        self._keep(place, (trajectory, tuple(rounds)), to_json(trajectory, rounds))

    def set_aside(self, one: aside.Aside) -> None:
        """Takes one that cannot be stored, in its trajectory's stead; errors as add."""
        self._keep(self._free_place(one.trajectory_id), one, aside.to_json(one))

    def _free_place(self, trajectory_id: str) -> int:
        place = self._place.get(trajectory_id)
        if place is None or place in self._done:
            got = "unknown here" if place is None else "here already"
            raise DsparkError(f"rollouts: expected a trajectory to be stored once, but {trajectory_id} is {got}.")
        return place

    def _keep(self, place: int, entry: Entry, line: dict[str, Any]) -> None:
        self._journal.append(line)
        self._hold(place, entry)
        self._write_if_full(place // self._size)

    def finish(self) -> dict[str, Any]:
        """Marks the run complete, deletes the journal, returns the manifest. Raises when trajectories are missing."""
        if self.missing():
            raise DsparkError(
                f"{self._folder}: expected all {len(self._order)} trajectories before the end, but "
                f"{len(self.missing())} are missing. Run it again to continue."
            )
        if self._manifest["state"] != "complete":
            self._manifest["state"] = "complete"
            write_manifest(self._folder, self._manifest)
        self._journal.delete()
        return read_manifest(self._folder)

    def close(self) -> None:
        """Gives the folder back. A run that never finished a trajectory leaves nothing in it."""
        if self._done:
            self._journal.close()
        else:
            self._journal.delete()
            (self._folder / MANIFEST_NAME).unlink()
        self._lock.release()

    def __enter__(self) -> TrajectoryWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _members(self, index: int) -> range:
        return range(index * self._size, min((index + 1) * self._size, len(self._order)))

    def _hold(self, place: int, entry: Entry) -> None:
        self._pending[place] = entry
        self._done.add(place)
        self._tokens += 0 if isinstance(entry, aside.Aside) else len(entry[0].response_ids)

    def _write_if_full(self, index: int) -> None:
        members = self._members(index)
        if not all(place in self._pending for place in members):
            return
        entries = [self._pending[place] for place in members]
        record = write_shard(self._folder, index, entries)
        shards_now = sorted([*self._manifest["shards"], record], key=lambda s: s["index"])
        self._manifest |= {"shards": shards_now, "counts": total_counts(shards_now)}
        write_manifest(self._folder, self._manifest)
        for place in members:
            del self._pending[place]


def write_shard(folder: Path, index: int, entries: Sequence[Entry]) -> dict[str, Any]:
    """Writes a shard, its rounds sidecar and, where some were set aside, those; returns their record for the
    manifest."""
    asides = [entry for entry in entries if isinstance(entry, aside.Aside)]
    stored = [entry for entry in entries if not isinstance(entry, aside.Aside)]
    trajectories = [trajectory for trajectory, _ in stored]
    rounds = [(trajectory.trajectory_id, r) for trajectory, r in stored]
    files = {
        f"trajectories-{index:05d}.parquet": (shards.encode_trajectories(trajectories), len(stored)),
        f"rounds-{index:05d}.parquet": (shards.encode_rounds(rounds), sum(len(r) for _, r in rounds)),
    }
    if asides:
        files[f"aside-{index:05d}.jsonl"] = (aside.encode(asides), len(asides))
    record: dict[str, Any] = {"index": index, "counts": _counts(trajectories, len(asides))}
    for name, (data, rows) in files.items():
        atomic_write(folder / name, data)
        record[name.partition("-")[0]] = {"file": name, "sha256": hashlib.sha256(data).hexdigest(), "rows": rows}
    return record


def _unwritable(folder: Path, error: OSError) -> DsparkError:
    return DsparkError(
        f"{folder}: expected a folder that can be written, but got: {error.strerror or error}. Make room or make it "
        "writable and run again, or choose another; what is finished is kept."
    )


def _id_of(entry: Entry) -> str:
    return entry.trajectory_id if isinstance(entry, aside.Aside) else entry[0].trajectory_id


def read_trajectories(folder: str | Path, partial: bool = False) -> list[Trajectory]:
    """All trajectories in canonical order, hashes checked.

    Raises DsparkError for damage, and for a run that is not complete unless `partial` (then: the finished shards).
    """
    folder = Path(folder)
    found: list[Trajectory] = []
    for entry in _readable(folder, partial)["shards"]:
        data = _checked_bytes(folder, entry, "trajectories")
        found += shards.decode_trajectories(data, str(folder / entry["trajectories"]["file"]))
    return found


def read_rounds(folder: str | Path, partial: bool = False) -> dict[str, list[Round]]:
    """Rounds by trajectory id, in canonical order, hashes checked; [] is not listed. Errors as read_trajectories."""
    folder = Path(folder)
    found: dict[str, list[Round]] = {}
    for entry in _readable(folder, partial)["shards"]:
        data = _checked_bytes(folder, entry, "rounds")
        found |= shards.decode_rounds(data, str(folder / entry["rounds"]["file"]))
    return found


def read_aside(folder: str | Path, partial: bool = False) -> list[aside.Aside]:
    """What was set aside, in canonical order, hashes checked. Errors as read_trajectories."""
    folder = Path(folder)
    found: list[aside.Aside] = []
    for entry in _readable(folder, partial)["shards"]:
        if "aside" in entry:
            found += aside.decode(_checked_bytes(folder, entry, "aside"))
    return found


def verify_hashes(folder: str | Path) -> dict[str, Any]:
    """Checks the manifest and every file it names; returns the manifest. DsparkError names the damaged shard."""
    folder = Path(folder)
    manifest = read_manifest(folder)
    for entry in manifest["shards"]:
        for kind in kinds(entry):
            _checked_bytes(folder, entry, kind)
    return manifest


def _continue(folder: Path, new: dict[str, Any]) -> dict[str, Any]:
    """The manifest to go on with: the folder's own when it holds this run, else the new one, written."""
    if not (folder / MANIFEST_NAME).exists():
        strays = sorted(p.name for p in folder.glob("*-*.parquet"))
        if strays:
            raise DsparkError(
                f"{folder}: expected an empty folder or one with {MANIFEST_NAME}, but found {strays[0]} without it. "
                "Choose another folder, or remove these files."
            )
        write_manifest(folder, new)
        return new
    old = read_manifest(folder)
    if not old["shards"] and not has_entries(folder):  # killed before anything was finished: nothing to continue
        write_manifest(folder, new)
        return new
    check_same_run(old, new, folder)
    kept = [entry for entry in old["shards"] if _is_whole(folder, entry)]
    if kept != old["shards"]:  # a shard's file was removed: it is generated again
        old |= {"shards": kept, "counts": total_counts(kept), "state": "running"}
        write_manifest(folder, old)
    return old


def _is_whole(folder: Path, entry: dict[str, Any]) -> bool:
    if not all((folder / entry[kind]["file"]).exists() for kind in kinds(entry)):
        return False
    for kind in kinds(entry):
        _checked_bytes(folder, entry, kind)
    return True


def _readable(folder: Path, partial: bool) -> dict[str, Any]:
    manifest = read_manifest(folder)
    if manifest["state"] != "complete" and not partial:
        raise DsparkError(
            f"{folder}: expected a complete run, but {manifest['counts']['trajectories']} of "
            f"{manifest['order']['trajectories']} trajectories are in shards. Run the same rollout again to go on."
        )
    return manifest


def _checked_bytes(folder: Path, entry: dict[str, Any], kind: str) -> bytes:
    record = entry[kind]
    path = child_path(folder, record["file"], f"{folder / MANIFEST_NAME}: shard {entry['index']}")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DsparkError(
            f"{path}: expected shard {entry['index']}, but got: {error.strerror or error}. "
            "Run the same rollout again to make it anew."
        ) from error
    if hashlib.sha256(data).hexdigest() != record["sha256"]:
        raise DsparkError(
            f"{path}: expected shard {entry['index']} with sha256 {record['sha256'][:12]}..., but its {len(data)} "
            "bytes have another: it was changed or is damaged. Delete that file and run the same rollout again."
        )
    return data


def _counts(trajectories: Sequence[Trajectory], set_aside: int) -> dict[str, Any]:
    counts = {
        "trajectories": len(trajectories),
        "tokens": sum(len(t.response_ids) for t in trajectories),
        "rewards_missing": sum(t.reward is None for t in trajectories),
        "finish_reasons": dict(sorted(Counter(t.finish_reason for t in trajectories).items())),
    }
    return {**counts, "set_aside": set_aside} if set_aside else counts
