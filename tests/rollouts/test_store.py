"""The directory: canonical bytes, hashes, locks, and everything that can be wrong with what is read."""

from __future__ import annotations

import json
import os
import random
from dataclasses import replace

import pyarrow.parquet as pq
import pytest

from dspark.contracts import DsparkError, Round
from dspark.files import sha256_json
from dspark.rollouts import shards, store
from dspark.rollouts.journal import LOCK_NAME
from dspark.rollouts.manifest import read_manifest, write_manifest


@pytest.mark.parametrize(("batch", "seed"), [(1, 0), (4, 1), (16, 2), (100, 3)])
def test_same_bytes_whatever_the_order_of_finishing(fakes, finished, tmp_path, batch, seed):
    fakes.run(tmp_path / "again", fakes.FakeEngine(batch, seed))
    assert fakes.contents(tmp_path / "again") == fakes.contents(finished)


@pytest.mark.parametrize("turn", [1, 4])
def test_same_shards_whatever_the_order_of_the_prompts(fakes, finished, tmp_path, turn):
    prompts = fakes.make_prompts()
    fakes.run(tmp_path / "again", prompts=[*prompts[turn:], *prompts[:turn]])
    want, got = fakes.contents(finished), fakes.contents(tmp_path / "again")
    manifests = [json.loads(files.pop("manifest.json")) for files in (want, got)]
    assert got == want
    differing = {key for key in manifests[0] if manifests[0][key] != manifests[1][key]}
    assert differing == {"given", "sha256"}


def test_a_shard_holds_whole_groups(fakes, tmp_path):
    for size, rows in ((2, [3] * 6), (7, [6] * 3), (99, [18])):
        fakes.run(tmp_path / str(size), config=fakes.with_config(shard_size=size))
        shards_now = read_manifest(tmp_path / str(size))["shards"]
        assert [s["trajectories"]["rows"] for s in shards_now] == rows
    fakes.run(tmp_path / "small", config=fakes.SMALL)
    assert [s["trajectories"]["rows"] for s in read_manifest(tmp_path / "small")["shards"]] == [4, 2]


def test_canonical_order_and_round_trip(fakes, finished):
    trajectories, rounds = store.read_trajectories(finished), store.read_rounds(finished)
    assert [t.trajectory_id for t in trajectories] == [f"p{p:02d}-{s}" for p in range(6) for s in range(3)]
    for t in trajectories:
        want = fakes.complete(t.request)
        assert (t.response_ids, t.logprobs, t.raw_logprobs) == (want.token_ids, want.logprobs, want.raw_logprobs)
        assert (t.finish_reason, rounds[t.trajectory_id]) == (want.finish_reason, list(want.rounds))
    assert {t.finish_reason for t in trajectories} == {"stop", "length"}
    every = [r for one in rounds.values() for r in one]
    assert sum(r.accepted for r in every) > 0
    assert sum(r.verified - r.accepted for r in every) > 0
    assert len({t.seq_seed for t in trajectories}) == 18


def test_trajectory_bytes_do_not_depend_on_speculation(fakes, finished, tmp_path):
    engine = fakes.FakeEngine(alter=lambda _, completion: replace(completion, rounds=()))
    fakes.run(tmp_path / "plain", engine, base=fakes.facts(drafter=None))
    for i in range(6):
        name = f"trajectories-{i:05d}.parquet"
        assert (tmp_path / "plain" / name).read_bytes() == (finished / name).read_bytes()
    assert store.read_rounds(tmp_path / "plain") == {}


def test_manifest_counts_and_no_leftovers(fakes, finished):
    manifest, trajectories = store.verify_hashes(finished), store.read_trajectories(finished)
    counts = manifest["counts"]
    assert counts["trajectories"] == 18
    assert counts["tokens"] == sum(len(t.response_ids) for t in trajectories)
    assert sum(counts["finish_reasons"].values()) == 18
    assert [s["trajectories"]["rows"] for s in manifest["shards"]] == [3] * 6
    assert sorted(fakes.contents(finished)) == [
        "manifest.json",
        *(f"rounds-{i:05d}.parquet" for i in range(6)),
        *(f"trajectories-{i:05d}.parquet" for i in range(6)),
    ]


def test_parquet_is_plain_for_other_readers(finished):
    table = pq.read_table(finished / "trajectories-00000.parquet")
    assert str(table.schema.field("logprobs").type) == "list<element: float not null>"
    assert table.schema.metadata is None


@pytest.mark.parametrize("name", ["trajectories-00002.parquet", "rounds-00000.parquet"])
def test_flipped_bits_are_found_and_the_shard_is_named(fakes, finished, name):
    path, rng = finished / name, random.Random(0)
    data = path.read_bytes()
    for _ in range(100):
        flipped = bytearray(data)
        flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(flipped)
        with pytest.raises(DsparkError, match=rf"{name}: expected shard {int(name[-9])} with sha256"):
            store.verify_hashes(finished)
    with pytest.raises(DsparkError, match="Delete that file and run the same rollout again"):
        fakes.run(finished)


def test_flipped_bits_in_the_manifest_are_found(finished):
    path, rng = finished / "manifest.json", random.Random(1)
    data = path.read_bytes()
    for _ in range(500):
        flipped = bytearray(data)
        flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(flipped)
        with pytest.raises(DsparkError):
            read_manifest(finished)


@pytest.mark.parametrize("size", [0, 1, 4, 400])
def test_truncated_shard(finished, size):
    path = finished / "trajectories-00001.parquet"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(DsparkError, match="expected shard 1 with sha256"):
        store.read_trajectories(finished)
    with pytest.raises(DsparkError, match="expected a Parquet shard"):
        shards.decode_trajectories(path.read_bytes(), "shard")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\x00", '{"format": "other"}', "[" * 100_000])
def test_manifest_that_is_none(finished, text):
    (finished / "manifest.json").write_text(text)
    with pytest.raises(DsparkError, match="manifest"):
        store.read_trajectories(finished)


def test_missing_manifest_missing_shard(fakes, finished, tmp_path):
    with pytest.raises(DsparkError, match="No such file"):
        store.read_trajectories(tmp_path / "nowhere")
    (finished / "rounds-00001.parquet").unlink()
    with pytest.raises(DsparkError, match="expected shard 1, but got: No such file"):
        store.verify_hashes(finished)
    (finished / "manifest.json").unlink()
    with pytest.raises(DsparkError, match=r"found rounds-00000\.parquet without it"):
        fakes.run(finished)


def rewrite(folder, change):
    """A manifest changed by someone who also mends its hash."""
    manifest = read_manifest(folder)
    change(manifest)
    write_manifest(folder, manifest)


@pytest.mark.parametrize("version", [0, 3, "1", None, True])
def test_other_version(finished, version):
    rewrite(finished, lambda m: m.update(version=version))
    with pytest.raises(DsparkError, match="expected version 1 or 2"):
        store.verify_hashes(finished)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/b", "..", "", "a\\b", 3, None, "c:x", "x\0y"])
def test_names_that_leave_the_folder(finished, name):
    rewrite(finished, lambda m: m["shards"][1]["rounds"].update(file=name))
    with pytest.raises(DsparkError, match="shard 1: expected a plain file name"):
        store.verify_hashes(finished)


def test_symbolic_link_as_a_shard(finished, tmp_path):
    path = finished / "trajectories-00001.parquet"
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DsparkError, match="got a symbolic link"):
        store.verify_hashes(finished)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.pop("counts"),
        lambda m: m.update(state="done"),
        lambda m: m.pop("given"),
        lambda m: m.update(given=[1]),
        lambda m: m["shards"].pop(),
        lambda m: m["shards"][0].pop("rounds"),
        lambda m: m["shards"][0].update(index=3),
        lambda m: m.update(shards=3),
        lambda m: m.update(shard_size=0),
        lambda m: m["counts"].update(tokens=0),
    ],
)
def test_manifest_with_parts_missing(finished, change):
    rewrite(finished, change)
    with pytest.raises(DsparkError, match="parts of it are missing or disagree"):
        store.verify_hashes(finished)


def test_incomplete_run_is_not_read_by_accident(fakes, tmp_path):
    with pytest.raises(RuntimeError):
        fakes.run(tmp_path / "part", fakes.FakeEngine(stop_after=7, batch=1))
    with pytest.raises(DsparkError, match="6 of 18 trajectories"):
        store.read_trajectories(tmp_path / "part")
    assert len(store.read_trajectories(tmp_path / "part", partial=True)) == 6
    assert len(store.read_rounds(tmp_path / "part", partial=True)) == 6


def test_second_writer_is_refused(fakes, tmp_path):
    folder = tmp_path / "run"

    def intrude(request, completion):
        with pytest.raises(DsparkError, match=f"process {os.getpid()} is writing into it"):
            fakes.run(folder)
        return completion

    fakes.run(folder, fakes.FakeEngine(alter=intrude))
    assert not (folder / LOCK_NAME).exists()


@pytest.mark.parametrize("text", ["999999999\n", "", "garbage", "1\n"])
def test_stale_lock_is_taken_over(fakes, finished, tmp_path, text):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / LOCK_NAME).write_text(text)
    fakes.run(folder)
    assert fakes.contents(folder) == fakes.contents(finished)


def test_place_that_cannot_be_written(fakes, tmp_path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(DsparkError, match="expected a folder that can be written"):
            fakes.run(out)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("field", ["logprobs", "raw_logprobs"])
@pytest.mark.parametrize(
    ("values", "message"),
    [
        (None, "none at all"),
        ((), "but got 0"),
        ((-1.0,), "but got 1"),
        ((-1.0, None), r"\[1\]: expected a finite fp32 value <= 0, but got None"),
        ((NAN, -1.0), r"\[0\].*nan"),
        ((-INF, -1.0), r"\[0\].*-inf"),
        ((-1.0, 0.5), r"\[1\].*0\.5"),
        ((-0.1, -1.0), r"\[0\].*-0\.1"),
        ((-1e300, -1.0), r"\[0\]"),
    ],
)
def test_bad_logprobs_are_refused_and_never_filled_in(fakes, tmp_path, field, values, message):
    def alter(_, completion):
        good = replace(completion, token_ids=(9, 9), logprobs=(-1.0, 0.0), raw_logprobs=(-2.0, -0.0))
        return replace(good, **{field: values})

    with pytest.raises(DsparkError, match=f"trajectory p0.-.: {field}.*{message}"):
        fakes.run(tmp_path / "run", fakes.FakeEngine(alter=alter))
    assert fakes.contents(tmp_path / "run") == {}


def test_zero_logprobs_keep_their_sign(fakes, tmp_path):
    def alter(_, completion):
        return replace(completion, token_ids=(9, 9), logprobs=(-1.0, 0.0), raw_logprobs=(-2.0, -0.0))

    fakes.run(tmp_path / "run", fakes.FakeEngine(alter=alter))
    assert str(store.read_trajectories(tmp_path / "run")[0].raw_logprobs) == "(-2.0, -0.0)"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": (), "logprobs": (), "raw_logprobs": ()}, "response_ids: expected at least one"),
        ({"token_ids": (-1,), "logprobs": (-1.0,), "raw_logprobs": (-1.0,)}, r"response_ids\[0\]"),
        ({"finish_reason": "abort"}, "finish_reason"),
        ({"rounds": (Round(0, (1, 2), 1, 2),)}, "accepted <= verified"),
        ({"rounds": (Round(0, (1, 2), 2, 1, (0.5,)),)}, "no confidences or 2"),
        ({"rounds": (Round(0, (1, 2), 2, 1, (0.5, NAN)),)}, "no confidences or 2"),
    ],
)
def test_other_broken_records(fakes, tmp_path, change, message):
    with pytest.raises(DsparkError, match=message):
        fakes.run(tmp_path / "run", fakes.FakeEngine(alter=lambda _, c: replace(c, **change)))


def test_broken_record_inside_a_shard_with_right_hashes(finished):
    trajectories = store.read_trajectories(finished)
    bad = replace(trajectories[0], logprobs=(0.5,) * len(trajectories[0].response_ids))
    columns = {name: [getattr(bad, name)] for name in shards.TRAJECTORY_SCHEMA.names}
    with pytest.raises(DsparkError, match=r"logprobs\[0\]"):
        shards.decode_trajectories(shards._encode(columns, shards.TRAJECTORY_SCHEMA), "shard")


def test_columns_of_other_types_or_with_gaps(finished):
    data = (finished / "rounds-00000.parquet").read_bytes()
    with pytest.raises(DsparkError, match="expected the columns"):
        shards.decode_trajectories(data, "shard")
    loose = shards.TRAJECTORY_SCHEMA.set(0, shards.TRAJECTORY_SCHEMA.field(0).with_nullable(True))
    columns = {f.name: [None] for f in loose} | {
        name: [value]
        for name, value in vars_of(store.read_trajectories(finished)[0]).items()
        if name != "trajectory_id"
    }
    with pytest.raises(DsparkError, match="trajectory_id to be string without gaps"):
        shards.decode_trajectories(shards._encode(columns, loose), "shard")


def vars_of(trajectory):
    return {name: getattr(trajectory, name) for name in shards.TRAJECTORY_SCHEMA.names}


def test_writer_refuses_strangers_and_repeats(fakes, finished, tmp_path):
    trajectory = store.read_trajectories(finished)[0]
    with store.TrajectoryWriter(tmp_path / "w", fakes.facts(), ["p00-0", "p00-1"], 2) as writer:
        writer.add(trajectory)
        with pytest.raises(DsparkError, match="p00-0 is here already"):
            writer.add(trajectory)
        with pytest.raises(DsparkError, match="x-0 is unknown here"):
            writer.add(replace(trajectory, trajectory_id="x-0"))
        with pytest.raises(DsparkError, match="1 are missing"):
            writer.finish()
    with pytest.raises(DsparkError, match="distinct ids"):
        store.TrajectoryWriter(tmp_path / "v", fakes.facts(), ["a", "a"], 2)
    with pytest.raises(DsparkError, match="target, drafter"):
        store.TrajectoryWriter(tmp_path / "v", {}, ["a"], 2)
    assert not (tmp_path / "v").exists()


def test_manifest_hash_is_of_its_content(finished):
    manifest = json.loads((finished / "manifest.json").read_text())
    assert manifest.pop("sha256") == sha256_json(manifest)
