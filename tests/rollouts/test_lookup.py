"""A lookup beside the store: trajectories do not know of it, rounds say who drafted them."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
import torch

from dspark.contracts import DsparkError, Round
from dspark.rollouts import shards
from dspark.rollouts.config import RolloutConfig
from dspark.rollouts.manifest import VERSION, check_same_run, identity
from dspark.rollouts.replay import replay
from dspark.rollouts.store import read_manifest, read_rounds
from dspark.rollouts.trajectory import from_json, to_json
from dspark.runner import Engine, EngineOptions
from dspark.runner.lookup import Lookup


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_trajectory_shards_are_the_same_bytes_whoever_drafts(fakes, models, tmp_path, dtype):
    target = models.make_target(dtype)
    drafter = models.make_drafter(target)
    facts = fakes.facts(target=target.fingerprint, dtype=str(dtype))
    config = fakes.with_config(max_tokens=20, samples_per_prompt=4, stop_ids=(7,))
    prompts = [p for p in fakes.make_prompts() if max(p.prompt_ids) < models.VOCAB]
    hashes, sources = {}, {}
    ways = {
        "plain": (None, None),
        "learned": (drafter, None),
        "lookup": (None, Lookup(4)),
        "both": (drafter, Lookup(4)),
    }
    for name, (model, lookup) in ways.items():
        engine = Engine(target, model, EngineOptions(max_batch=5), lookup)
        fakes.run(tmp_path / name, engine, config, prompts, base=facts)
        hashes[name] = [shard["trajectories"]["sha256"] for shard in read_manifest(tmp_path / name)["shards"]]
        rounds = [r for one in read_rounds(tmp_path / name).values() for r in one]
        sources[name] = {r.source for r in rounds}
        assert name == "plain" or 0 < sum(r.accepted for r in rounds) < sum(r.verified for r in rounds)
    assert len(hashes["plain"]) > 1
    assert all(one == hashes["plain"] for one in hashes.values())
    assert list(sources.values()) == [set(), {"drafter"}, {"lookup"}, {"drafter", "lookup"}]
    again = Engine(target, None, EngineOptions(max_batch=2))
    assert replay(tmp_path / "both", again, None, 0, {**facts, "drafter": None}, rescore=True).ok


ROUNDS = (Round(3, (1, 2), 2, 1, (0.5, 0.25), "lookup"), Round(5, (4,), 1, 1))


def test_rounds_keep_their_source() -> None:
    read = shards.decode_rounds(shards.encode_rounds([("t", ROUNDS)]), "here")
    assert read == {"t": list(ROUNDS)}


def test_sidecars_and_journals_of_earlier_releases_are_a_draft_models(fakes, tmp_path) -> None:
    schema = pa.schema([field for field in shards.ROUNDS_SCHEMA if field.name != "source"])
    columns = {"trajectory_id": ["t", "t"], "round": [0, 1], "anchor": [3, 5], "drafted": [[1, 2], [4]],
               "verified": [2, 1], "accepted": [1, 1], "confidences": [[0.5, 0.25], []]}  # fmt: skip
    (old,) = shards.decode_rounds(shards._encode(columns, schema), "here").values()
    assert [r.source for r in old] == ["drafter", "drafter"]
    assert old[1] == ROUNDS[1]
    fakes.run(tmp_path / "a")
    (trajectory, *_) = shards.decode_trajectories((tmp_path / "a" / "trajectories-00000.parquet").read_bytes(), "x")
    entry = to_json(trajectory, ROUNDS)
    assert from_json(entry) == (trajectory, ROUNDS)
    for row in entry["rounds"]:
        del row["source"]
    assert [r.source for r in from_json(entry)[1]] == ["drafter", "drafter"]


def test_an_unknown_source_and_other_missing_columns_are_refused() -> None:
    strange = Round(3, (1,), 1, 1, (), "oracle")  # type: ignore[arg-type]
    with pytest.raises(DsparkError, match="expected source drafter or lookup, but got 'oracle'"):
        shards.encode_rounds([("t", (strange,))])
    schema = pa.schema([field for field in shards.ROUNDS_SCHEMA if field.name != "confidences"])
    columns = {name: [] for name in schema.names}
    with pytest.raises(DsparkError, match="expected the columns"):
        shards.decode_rounds(shards._encode(columns, schema), "here")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lookup": -1}, "lookup >= 0"),
        ({"lookup": True}, "lookup to be int"),
        ({"lookup": 4, "verifier": "rejection"}, "lookup 0 with the rejection verifier: its drafts come from other"),
        ({"lookup": 4, "commit_to_cap": True, "drafter": "x"}, "lookup 0 with commit_to_cap"),
    ],
)
def test_contradictions_are_one_error(values, message):
    with pytest.raises(DsparkError, match=message):
        RolloutConfig.from_dict(values)


def test_a_run_goes_on_with_its_lookup() -> None:
    rest = {"version": VERSION, "order": {"sha256": "a"}, "shard_size": 4}
    none, some = ({"run": {"config": {"seed": 1, "lookup": n}}, **rest} for n in (0, 4))
    assert "run.config.lookup" in identity(none)
    check_same_run(some, some, Path("x"))
    with pytest.raises(DsparkError, match="lookup was 4, now 0"):
        check_same_run(some, none, Path("x"))
