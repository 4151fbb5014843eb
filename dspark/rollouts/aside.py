"""Trajectories that another engine made and that cannot be stored: some token has no finite log-probability.

They are kept beside the shard they would have been in, a JSON line each, and counted: neither lost nor given a number
that nobody computed. What our own runner gives is never set aside: there it would be a bug, and it is an error.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dspark.contracts import Completion, Request
from dspark.files import canonical_json


@dataclass(frozen=True, slots=True)
class Aside:
    """What was sampled, and why it is not a trajectory. logprobs, raw_logprobs: None where there is no finite value."""

    trajectory_id: str
    reason: str
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    raw_logprobs: tuple[float | None, ...]
    finish_reason: str
    seq_seed: int


def faulty(trajectory_id: str, request: Request, completion: Completion) -> Aside | None:
    """The record of a completion without a finite log-probability <= 0 for every token; None for a good one."""
    for name in ("logprobs", "raw_logprobs"):
        for position, value in enumerate(getattr(completion, name)):
            if not (math.isfinite(value) and value <= 0.0):
                reason = f"response token {position} ({completion.token_ids[position]}): its {name[:-1]} is {value}"
                return _record(trajectory_id, reason, request, completion)
    return None


def _record(trajectory_id: str, reason: str, request: Request, completion: Completion) -> Aside:
    return Aside(
        trajectory_id, reason, request.prompt_ids, completion.token_ids, _finite(completion.logprobs),
        _finite(completion.raw_logprobs), completion.finish_reason, completion.seq_seed,
    )  # fmt: skip


def _finite(values: Sequence[float]) -> tuple[float | None, ...]:
    return tuple(value if math.isfinite(value) else None for value in values)


def to_json(one: Aside) -> dict[str, Any]:
    """Plain data for the journal."""
    return {"aside": asdict(one)}


def is_one(entry: dict[str, Any]) -> bool:
    return "aside" in entry


def from_json(entry: dict[str, Any]) -> Aside:
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in entry["aside"].items()}
    return Aside(**values)


def encode(many: Sequence[Aside]) -> bytes:
    """Canonical JSON, a line each."""
    return "".join(canonical_json(asdict(one)) + "\n" for one in many).encode()


def decode(data: bytes) -> list[Aside]:
    """The inverse of encode, of bytes whose hash was checked."""
    return [from_json({"aside": json.loads(line)}) for line in data.split(b"\n") if line]
