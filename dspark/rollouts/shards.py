"""Parquet shards: a list of records to bytes and back.

Same records, same bytes (with one version of pyarrow): an explicit schema, fixed compression and encodings, one row
group, no statistics, no free-form metadata, hence no time stamps. Read back, every record is checked again.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dspark.contracts import DsparkError, Round
from dspark.rollouts.trajectory import Trajectory, check_rounds, check_trajectory

RoundsOf = tuple[str, tuple[Round, ...]]  # a trajectory's id and its rounds


def _must(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, kind, nullable=False)


_IDS = pa.list_(_must("element", pa.int32()))
_FLOATS = pa.list_(_must("element", pa.float32()))
TRAJECTORY_SCHEMA = pa.schema(
    [
        _must("trajectory_id", pa.string()),
        _must("group_id", pa.string()),
        _must("prompt_id", pa.string()),
        _must("domain", pa.string()),
        _must("prompt_ids", _IDS),
        _must("response_ids", _IDS),
        _must("logprobs", _FLOATS),
        _must("raw_logprobs", _FLOATS),
        _must("finish_reason", pa.string()),
        pa.field("reward", pa.float64()),
        _must("seq_seed", pa.int64()),
        _must("rng_scheme", pa.string()),
        _must("sampling", pa.string()),
    ]
)
ROUNDS_SCHEMA = pa.schema(
    [
        _must("trajectory_id", pa.string()),
        _must("round", pa.int32()),
        _must("anchor", pa.int32()),
        _must("drafted", _IDS),
        _must("verified", pa.int32()),
        _must("accepted", pa.int32()),
        _must("confidences", _FLOATS),
        _must("source", pa.string()),
    ]
)
_LATE = {"source": "drafter"}  # columns that earlier releases did not write, and what they would have said
_ROUND_COLUMNS = tuple(f.name for f in fields(Round))


def encode_trajectories(trajectories: Sequence[Trajectory]) -> bytes:
    """The trajectory shard's bytes, rows in the order given. Raises DsparkError for a record that breaks its rules."""
    for trajectory in trajectories:
        check_trajectory(trajectory)
    columns = {name: [getattr(t, name) for t in trajectories] for name in TRAJECTORY_SCHEMA.names}
    return _encode(columns, TRAJECTORY_SCHEMA)


def encode_rounds(entries: Sequence[RoundsOf]) -> bytes:
    """The rounds sidecar's bytes: one row per round, trajectories in the order given."""
    for trajectory_id, rounds in entries:
        check_rounds(rounds, f"trajectory {trajectory_id}")
    rows = [(trajectory_id, i, r) for trajectory_id, rounds in entries for i, r in enumerate(rounds)]
    columns: dict[str, list[Any]] = {"trajectory_id": [row[0] for row in rows], "round": [row[1] for row in rows]}
    columns |= {name: [getattr(row[2], name) for row in rows] for name in _ROUND_COLUMNS}
    return _encode(columns, ROUNDS_SCHEMA)


def decode_trajectories(data: bytes, where: str) -> list[Trajectory]:
    """Raises DsparkError when the bytes are no trajectory shard or a record in it breaks its rules."""
    rows = _decode(data, TRAJECTORY_SCHEMA, where)
    trajectories = [Trajectory(**row) for row in rows]
    for trajectory in trajectories:
        check_trajectory(trajectory, f"{where}: ")
    return trajectories


def decode_rounds(data: bytes, where: str) -> dict[str, list[Round]]:
    """Rounds by trajectory id, in order. A trajectory that needed no round is absent."""
    found: dict[str, list[Round]] = {}
    for row in _decode(data, ROUNDS_SCHEMA, where, _LATE):
        rounds = found.setdefault(row.pop("trajectory_id"), [])
        if row.pop("round") != len(rounds):
            raise DsparkError(f"{where}: expected the rounds of a trajectory in order, but one is missing or twice.")
        rounds.append(Round(**row))
    for trajectory_id, rounds in found.items():
        check_rounds(rounds, f"{where}: trajectory {trajectory_id}")
    return found


def _encode(columns: dict[str, list[Any]], schema: pa.Schema) -> bytes:
    table = pa.table({name: columns[name] for name in schema.names}, schema=schema)
    sink = io.BytesIO()
    pq.write_table(
        table,
        sink,
        row_group_size=max(1, table.num_rows),
        version="2.6",
        data_page_version="1.0",
        compression="zstd",
        compression_level=3,
        use_dictionary=False,
        write_statistics=False,
        store_schema=False,
    )
    return sink.getvalue()


def _decode(data: bytes, schema: pa.Schema, where: str, late: dict[str, str] | None = None) -> list[dict[str, Any]]:
    """The rows; a column of `late` (the last ones of the schema) may be absent as a whole, and has its value then."""
    try:
        table = pq.read_table(pa.BufferReader(data), use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise DsparkError(f"{where}: expected a Parquet shard, but it cannot be read ({error}).") from error
    for name, value in (late or {}).items():
        if name not in table.schema.names:
            table = table.append_column(schema.field(name), pa.array([value] * table.num_rows, pa.string()))
    if table.schema.names != schema.names:
        raise DsparkError(f"{where}: expected the columns {schema.names}, but got {table.schema.names}.")
    for expected, got in zip(schema, table.schema, strict=True):
        if expected.type != got.type or (table[got.name].null_count and not expected.nullable):
            raise DsparkError(
                f"{where}: expected column {expected.name} to be {expected.type} without gaps, but got {got.type} "
                f"with {table[got.name].null_count} missing."
            )
    return [{k: tuple(v) if isinstance(v, list) else v for k, v in row.items()} for row in table.to_pylist()]
