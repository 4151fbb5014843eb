"""Replay: generate stored trajectories again and compare every bit.

First the files' hashes, then the facts (same target, dtype, noise scheme, verifier), then the trajectories. What is
compared: token ids, both fp32 log-probabilities by their bit patterns, the finish reason. With `rescore`, the trainer's
view too: one teacher-forced pass over the finished sequence must give the stored log-probabilities. What another engine
sampled cannot be drawn again; where its log-probabilities were recomputed by our target, `rescore` checks those.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from dspark.contracts import Completion, DsparkError, Request, SamplingParams
from dspark.rollouts.manifest import differs
from dspark.rollouts.store import read_trajectories, verify_hashes
from dspark.rollouts.trajectory import Trajectory

_MUST_MATCH = ("target", "dtype", "rng_scheme", "verifier")
_SCOPE = (
    "device",
    "versions",
    "kernels",
    "tokenizer",
)  # a difference is said: out of the contract's scope, or harmless


class Difference(NamedTuple):
    """The first place where a replay is not the record. position: index in the response (its length for the end)."""

    trajectory_id: str
    position: int
    field: str
    stored: Any
    got: Any

    def __str__(self) -> str:
        return (
            f"trajectory {self.trajectory_id}, response token {self.position}, {self.field}: "
            f"stored {self.stored!r}, got {self.got!r}"
        )


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """checked: trajectories; tokens: response tokens in them; differing_bits: over ids and log-probabilities (a missing
    or surplus token counts 32 each, a finish reason 1). notes: what was allowed to differ and did. regenerated: false
    where another engine sampled and only the log-probabilities were computed again."""

    checked: int
    tokens: int
    differing_bits: int
    first_difference: Difference | None
    notes: tuple[str, ...] = ()
    regenerated: bool = True

    @property
    def ok(self) -> bool:
        return self.first_difference is None


class Replayer(Protocol):
    """What replay needs of the runner; score only for `rescore`."""

    def generate(
        self, requests: list[Request], on_finish: Callable[[int, Completion], None] | None = None
    ) -> list[Completion]: ...

    def score(self, prompt_ids: tuple[int, ...], response_ids: tuple[int, ...], params: SamplingParams) -> Any: ...


def replay(
    folder: str,
    engine: Replayer,
    sample: int | None,
    seed: int,
    running: dict[str, Any],
    *,
    rescore: bool = False,
    on_progress: Callable[[int, int, int], None] | None = None,
) -> ReplayResult:
    """Regenerates `sample` trajectories (None = all), chosen by `seed` alone, and compares them with the record.

    running: manifest.run_facts of `engine`. on_progress(done, total, tokens). Raises DsparkError when the files are
    damaged, the run is incomplete, or the engine cannot be expected to reproduce it; a difference is a result.
    """
    if sample is not None and sample < 1:
        raise DsparkError(f"replay: expected a sample of at least 1 trajectory, but got {sample}.")
    recorded = verify_hashes(folder)["run"]
    ours = sampled_by_us(folder, recorded, rescore)
    notes = check_facts(recorded, running)
    chosen = choose(read_trajectories(folder), sample, seed)
    progress = _Progress(chosen, on_progress)
    views: list[tuple[int, Difference | None]] = []
    if ours:
        completions = engine.generate([t.request for t in chosen], progress.finished)
        views += map(_stored_against, chosen, completions)
    if rescore:
        views += [_stored_against_score(t, engine) for t in chosen]
    first = min((d for _, d in views if d), key=lambda d: _place(chosen, d), default=None)
    tokens = sum(len(t.response_ids) for t in chosen)
    return ReplayResult(len(chosen), tokens, sum(bits for bits, _ in views), first, notes, ours)


def sampled_by_us(folder: str, recorded: dict[str, Any], rescore: bool) -> bool:
    """Whether our runner sampled a run, so that it can again. Raises DsparkError where another engine did and nothing
    of it can be computed here: its log-probabilities are its own, or `rescore` was not asked for."""
    other = recorded.get("engine")
    if not other:
        return True
    if other.get("logprobs") != "dspark":
        raise DsparkError(
            f"{folder}: expected trajectories that can be computed again here, but {other.get('name')} "
            f"{other.get('version')} sampled these and gave their log-probabilities: its noise "
            f"({recorded['rng_scheme']}) is no function of keys that we could draw from. The hashes of all files are "
            "right. Roll out with --recompute for log-probabilities that can be checked."
        )
    if not rescore:
        raise DsparkError(
            f"{folder}: expected trajectories that can be drawn again here, but {other.get('name')} "
            f"{other.get('version')} sampled these, and its noise ({recorded['rng_scheme']}) is no function of keys "
            "that we could draw from. Their log-probabilities are our target's: give --rescore to compute those again."
        )
    return False


def _place(chosen: Sequence[Trajectory], difference: Difference) -> int:
    return next(i for i, t in enumerate(chosen) if t.trajectory_id == difference.trajectory_id)


def choose(trajectories: Sequence[Trajectory], sample: int | None, seed: int) -> list[Trajectory]:
    """`sample` of them (all when None or fewer), a function of seed and ids alone, in canonical order."""
    ranked = sorted(
        range(len(trajectories)),
        key=lambda i: hashlib.sha256(f"{seed}:{trajectories[i].trajectory_id}".encode()).digest(),
    )
    return [trajectories[i] for i in sorted(ranked[:sample])]


def check_facts(recorded: dict[str, Any], running: dict[str, Any]) -> tuple[str, ...]:
    """Refuses an engine that is not the one that made the run; returns what differs and may.

    Under the coupled and greedy verifiers the drafter and its calibration have no influence on the trajectories; under
    rejection they must be the same, and so must the number of drafts verified.
    """
    foreign = bool(recorded.get("engine"))  # of such a run only the scoring is ours
    strict = recorded.get("verifier") == "rejection" and not foreign
    must = _MUST_MATCH[:2] if foreign else (*_MUST_MATCH, "drafter", "calibration") if strict else _MUST_MATCH
    differing = [key for key in must if recorded.get(key) != running.get(key)]
    if differing:
        shown = "; ".join(f"{k}: recorded {recorded.get(k)!r}, running {running.get(k)!r}" for k in differing)
        raise DsparkError(
            f"replay: expected the engine that made these trajectories, but it differs in {shown}. "
            "Load what the manifest names."
        )
    may = _SCOPE if strict else (*_SCOPE, "drafter", "calibration")
    return tuple(_note(k, recorded.get(k), running.get(k)) for k in may if differs(recorded.get(k), running.get(k)))


def _note(key: str, recorded: Any, running: Any) -> str:
    if key in ("drafter", "calibration"):
        return f"another {key} than recorded (allowed: this verifier's trajectories do not depend on it)"
    if key == "tokenizer":
        return (
            "another tokenizer than recorded: token ids are the record, so nothing here depends on it, but text "
            "decoded from them, and a reward that read it, would be another"
        )
    return f"{key} differs from the record, so equality is not promised: recorded {recorded!r}, running {running!r}"


class _Progress:
    def __init__(self, chosen: Sequence[Trajectory], tell: Callable[[int, int, int], None] | None):
        self._total, self._tell = len(chosen), tell
        self._done = self._tokens = 0

    def finished(self, index: int, completion: Completion) -> None:
        self._done += 1
        self._tokens += len(completion.token_ids)
        if self._tell:
            self._tell(self._done, self._total, self._tokens)


def _stored_against(t: Trajectory, got: Completion) -> tuple[int, Difference | None]:
    columns = [
        ("token id", _ints(t.response_ids), _ints(got.token_ids), t.response_ids, got.token_ids),
        ("logprob", *_float_columns(t.logprobs, got.logprobs)),
        ("raw_logprob", *_float_columns(t.raw_logprobs, got.raw_logprobs)),
    ]
    bits, first = _compare(t.trajectory_id, columns)
    if got.finish_reason != t.finish_reason:
        end = Difference(t.trajectory_id, len(t.response_ids), "finish_reason", t.finish_reason, got.finish_reason)
        bits, first = bits + 1, first or end
    return bits, first


def _stored_against_score(t: Trajectory, engine: Replayer) -> tuple[int, Difference | None]:
    logprobs, raw_logprobs = engine.score(t.prompt_ids, t.response_ids, t.params)
    return _compare(
        t.trajectory_id,
        [
            ("rescored logprob", *_float_columns(t.logprobs, logprobs)),
            ("rescored raw_logprob", *_float_columns(t.raw_logprobs, raw_logprobs)),
        ],
    )


def _compare(trajectory_id: str, columns: list[tuple[str, Any, Any, Any, Any]]) -> tuple[int, Difference | None]:
    """Differing bits over columns of (name, stored int32, got int32, stored values, got values), and the earliest."""
    bits, first = 0, None
    for name, stored, got, stored_values, got_values in columns:
        shared = min(len(stored), len(got))
        xor = (stored[:shared] ^ got[:shared]).view(np.uint32)
        bits += int(np.unpackbits(xor.view(np.uint8)).sum()) + 32 * abs(len(stored) - len(got))
        where = int(np.flatnonzero(xor)[0]) if xor.any() else shared
        if where == len(stored) == len(got) or (first and first.position <= where):
            continue
        first = Difference(trajectory_id, where, name, _at(stored_values, where), _at(got_values, where))
    return bits, first


def _ints(ids: Sequence[int]) -> np.ndarray:
    return np.asarray(ids, dtype=np.int32).reshape(-1)


def _float_columns(stored: Any, got: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """fp32 bit patterns of both, and the values to show."""
    a, b = (np.asarray(values, dtype=np.float32).reshape(-1) for values in (stored, got))
    return a.view(np.int32), b.view(np.int32), a, b


def _at(values: Any, index: int) -> Any:
    if index >= len(values):
        return "nothing"
    value = values[index]
    return float(value) if isinstance(value, np.floating) else value
