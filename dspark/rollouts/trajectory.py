"""One trajectory: what was sampled, its log-probabilities, and what the reproducibility contract fixes about it.

Token ids are the record; text is derived and not kept. Log-probabilities are fp32 values, one per response token,
finite and <= 0; anything else is an error and never becomes 0.0.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, get_args

import numpy as np

from dspark.contracts import Completion, DraftedBy, DsparkError, Request, Round, SamplingParams
from dspark.files import canonical_json

FINISH_REASONS = ("stop", "length")
DRAFTED_BY = get_args(DraftedBy)
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A row of a trajectory shard (DESIGN §11).

    logprobs: of the law the token was sampled from; raw_logprobs: of the target's softmax at temperature 1; both
    [len(response_ids)] fp32. reward: None when no reward function was given, or when it failed on this sample.
    sampling: canonical JSON of the effective SamplingParams but for seq_seed, which has its own column.
    """

    trajectory_id: str
    group_id: str
    prompt_id: str
    domain: str
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    raw_logprobs: tuple[float, ...]
    finish_reason: str
    reward: float | None
    seq_seed: int
    rng_scheme: str
    sampling: str

    @property
    def params(self) -> SamplingParams:
        """How to sample it again. Raises DsparkError when the stored parameters are not ours."""
        try:
            return SamplingParams(**json.loads(self.sampling), seq_seed=self.seq_seed)
        except (ValueError, TypeError) as error:
            raise DsparkError(
                f"trajectory {self.trajectory_id}: expected sampling parameters as JSON, but got {self.sampling!r}."
            ) from error

    @property
    def request(self) -> Request:
        return Request(self.prompt_ids, self.params)


def sampling_json(params: SamplingParams) -> str:
    """The `sampling` column: `params` without its seed, as canonical JSON."""
    return canonical_json({name: value for name, value in params.as_dict().items() if name != "seq_seed"})


def check_trajectory(trajectory: Trajectory, where: str = "") -> None:
    """Raises DsparkError naming the trajectory and the field when the record breaks its own rules."""
    where = f"{where}trajectory {trajectory.trajectory_id}"
    for name in ("prompt_ids", "response_ids"):
        _check_ids(getattr(trajectory, name), f"{where}: {name}")
    for name in ("logprobs", "raw_logprobs"):
        _check_logprobs(getattr(trajectory, name), len(trajectory.response_ids), f"{where}: {name}")
    if trajectory.finish_reason not in FINISH_REASONS:
        raise DsparkError(f"{where}: expected finish_reason stop or length, but got {trajectory.finish_reason!r}.")
    if trajectory.reward is not None and not np.isfinite(trajectory.reward):
        raise DsparkError(f"{where}: expected a finite reward or none, but got {trajectory.reward}.")


def check_rounds(rounds: Sequence[Round], where: str) -> None:
    """Raises DsparkError when a round's counts contradict each other, a confidence is no probability or its source
    is unknown."""
    for i, r in enumerate(rounds):
        if not 0 <= r.accepted <= r.verified <= len(r.drafted):
            raise DsparkError(
                f"{where}: round {i}: expected 0 <= accepted <= verified <= drafted, but got {r.accepted}, "
                f"{r.verified}, {len(r.drafted)}."
            )
        if len(r.confidences) not in (0, len(r.drafted)) or not all(0.0 <= c <= 1.0 for c in r.confidences):
            raise DsparkError(
                f"{where}: round {i}: expected no confidences or {len(r.drafted)} in [0, 1], but got {r.confidences}."
            )
        if r.source not in DRAFTED_BY:
            raise DsparkError(
                f"{where}: round {i}: expected source {' or '.join(DRAFTED_BY)}, but got {r.source!r}. Read it with "
                "the release that wrote it."
            )


def to_json(trajectory: Trajectory, rounds: Sequence[Round]) -> dict[str, Any]:
    """Plain data for the journal; floats survive it bit for bit (Python writes the shortest exact form)."""
    return {"trajectory": asdict(trajectory), "rounds": [asdict(r) for r in rounds]}


def from_json(entry: dict[str, Any]) -> tuple[Trajectory, tuple[Round, ...]]:
    """The inverse of to_json. Raises KeyError or TypeError for other data."""
    rounds = tuple(Round(**_tuples(r)) for r in entry["rounds"])
    return Trajectory(**_tuples(entry["trajectory"])), rounds


def trajectory_columns() -> tuple[str, ...]:
    return tuple(f.name for f in fields(Trajectory))


def completion_fields(completion: Completion) -> dict[str, Any]:
    """The columns that come from the runner, as they come: check_trajectory judges them."""
    return {
        "response_ids": completion.token_ids,
        "logprobs": completion.logprobs,
        "raw_logprobs": completion.raw_logprobs,
        "finish_reason": completion.finish_reason,
    }


def _tuples(row: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}


def _check_ids(ids: Sequence[int], where: str) -> None:
    if not len(ids):
        raise DsparkError(f"{where}: expected at least one token id, but got none.")
    for i, token in enumerate(ids):
        if not isinstance(token, int) or not 0 <= token <= _INT32_MAX:
            raise DsparkError(f"{where}[{i}]: expected a token id in [0, 2**31), but got {token!r}.")


def _check_logprobs(values: Sequence[float] | None, count: int, where: str) -> None:
    if values is None or len(values) != count:
        got = "none at all" if values is None else str(len(values))
        raise DsparkError(f"{where}: expected one log-probability per response token ({count}), but got {got}.")
    given = np.array(values, dtype=np.float64)  # None becomes NaN and is refused below
    with np.errstate(over="ignore"):
        good = np.isfinite(given) & (given <= 0.0) & (given.astype(np.float32) == given)
    if not good.all():
        i = int(np.argmin(good))
        raise DsparkError(f"{where}[{i}]: expected a finite fp32 value <= 0, but got {values[i]!r}.")
