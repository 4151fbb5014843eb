"""Replay: equality bit for bit, the first difference named, and what is refused."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from dspark.contracts import DsparkError
from dspark.rollouts.replay import choose, replay
from dspark.rollouts.store import read_trajectories, verify_hashes


@pytest.mark.parametrize("rescore", [False, True])
def test_replay_of_everything(fakes, finished, rescore):
    result = replay(finished, fakes.FakeEngine(batch=5, seed=4), None, 0, fakes.facts(), rescore=rescore)
    tokens = verify_hashes(finished)["counts"]["tokens"]
    assert (result.ok, result.checked, result.tokens, result.differing_bits) == (True, 18, tokens, 0)
    assert result.first_difference is None
    assert result.notes == ()


def test_sample_is_a_function_of_the_seed(fakes, finished):
    trajectories = read_trajectories(finished)
    ids = [t.trajectory_id for t in choose(trajectories, 5, 1)]
    assert ids == [t.trajectory_id for t in choose(trajectories, 5, 1)]
    assert ids == sorted(ids)
    assert len(set(ids)) == 5
    assert ids != [t.trajectory_id for t in choose(trajectories, 5, 2)]
    assert choose(trajectories, 99, 1) == trajectories
    seen = []
    result = replay(finished, fakes.FakeEngine(), 5, 1, fakes.facts(), on_progress=lambda *c: seen.append(c))
    assert (result.checked, len(seen), seen[-1]) == (5, 5, (5, 5, result.tokens))
    with pytest.raises(DsparkError, match="at least 1"):
        replay(finished, fakes.FakeEngine(), 0, 1, fakes.facts())


def altered(finished, victim, change):
    """An engine's alter hook that changes one trajectory's completion."""
    t = next(t for t in read_trajectories(finished) if t.trajectory_id == victim)
    return lambda request, c: change(c) if request.params.seq_seed == t.seq_seed else c


def longest(finished):
    return max(read_trajectories(finished), key=lambda t: len(t.response_ids))


def one_bit_up(values, index):
    changed = np.array(values, np.float32)
    changed.view(np.int32)[index] ^= 1
    return tuple(changed.tolist())


@pytest.mark.parametrize("field", ["logprobs", "raw_logprobs"])
def test_one_differing_bit(fakes, finished, field):
    t = longest(finished)
    alter = altered(finished, t.trajectory_id, lambda c: replace(c, **{field: one_bit_up(getattr(c, field), 2)}))
    result = replay(finished, fakes.FakeEngine(alter=alter), None, 0, fakes.facts())
    first = result.first_difference
    assert not result.ok
    assert result.differing_bits == 1
    assert first[:3] == (t.trajectory_id, 2, field[:-1])
    assert first.stored == getattr(t, field)[2] != first.got
    assert f"trajectory {t.trajectory_id}, response token 2, {field[:-1]}: stored" in str(first)


def test_sign_of_zero_differs(fakes, tmp_path):
    def alter(zero):
        return lambda _, c: replace(c, logprobs=(zero,) * len(c.logprobs))

    fakes.run(tmp_path / "run", fakes.FakeEngine(alter=alter(0.0)))
    result = replay(tmp_path / "run", fakes.FakeEngine(alter=alter(-0.0)), None, 0, fakes.facts())
    assert result.differing_bits == result.tokens


def test_the_earliest_position_is_named(fakes, finished):
    t = longest(finished)

    def change(c):
        ids = (*c.token_ids[:3], c.token_ids[3] ^ 5, *c.token_ids[4:])
        return replace(c, token_ids=ids, raw_logprobs=one_bit_up(c.raw_logprobs, 1))

    engine = fakes.FakeEngine(alter=altered(finished, t.trajectory_id, change))
    result = replay(finished, engine, None, 0, fakes.facts())
    assert result.differing_bits == 3
    assert result.first_difference[:3] == (t.trajectory_id, 1, "raw_logprob")


def test_shorter_longer_and_another_end(fakes, finished):
    t = longest(finished)
    count = len(t.response_ids)

    def cut(c):
        return replace(c, token_ids=c.token_ids[:-1], logprobs=c.logprobs[:-1], raw_logprobs=c.raw_logprobs[:-1])

    def more(c):
        return replace(
            c, token_ids=(*c.token_ids, 8), logprobs=(*c.logprobs, -1.0), raw_logprobs=(*c.raw_logprobs, -1.0)
        )

    def end(c):
        return replace(c, finish_reason="stop" if c.finish_reason == "length" else "length")

    cases = [(cut, 96, count - 1, "token id"), (more, 96, count, "token id"), (end, 1, count, "finish_reason")]
    for change, bits, position, field in cases:
        engine = fakes.FakeEngine(alter=altered(finished, t.trajectory_id, change))
        result = replay(finished, engine, None, 0, fakes.facts())
        assert result.differing_bits == bits
        assert result.first_difference[:3] == (t.trajectory_id, position, field)


def test_rescoring_differs(fakes, finished):
    t = longest(finished)

    class Trainer(fakes.FakeEngine):
        def score(self, *args):
            logprobs, raw = super().score(*args)
            return logprobs, raw * np.float32(1.0001) if args[2].seq_seed == t.seq_seed else raw

    assert replay(finished, Trainer(), None, 0, fakes.facts()).ok
    result = replay(finished, Trainer(), None, 0, fakes.facts(), rescore=True)
    assert result.first_difference[:3] == (t.trajectory_id, 0, "rescored raw_logprob")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": "ee" * 32}, "target: recorded"),
        ({"dtype": "bfloat16"}, "dtype: recorded 'float32', running 'bfloat16'"),
        ({"verifier": "rejection"}, "verifier"),
    ],
)
def test_another_engine_is_refused(fakes, finished, change, message):
    engine = fakes.FakeEngine()
    with pytest.raises(DsparkError, match=message):
        replay(finished, engine, None, 0, fakes.facts(**change))
    assert engine.generated == 0


def test_another_noise_scheme_is_refused(fakes, finished):
    with pytest.raises(DsparkError, match="rng_scheme"):
        replay(finished, fakes.FakeEngine(), None, 0, {**fakes.facts(), "rng_scheme": "other/2"})


def test_another_drafter_is_said_or_refused(fakes, finished, tmp_path):
    result = replay(finished, fakes.FakeEngine(), None, 0, fakes.facts(drafter=None))
    assert result.ok
    assert len(result.notes) == 1
    assert result.notes[0].startswith("another drafter than recorded (allowed")
    fakes.run(tmp_path / "rejection", config=fakes.with_config(verifier="rejection"))
    with pytest.raises(DsparkError, match="drafter: recorded 'bb"):
        replay(tmp_path / "rejection", fakes.FakeEngine(), None, 0, fakes.facts(verifier="rejection", drafter=None))


def test_other_machine_is_said_and_threads_are_not(fakes, finished):
    other = fakes.facts(device="cuda", threads=4, kernels={"sources": "dd", "threads": 4})
    notes = replay(finished, fakes.FakeEngine(), 2, 0, other).notes
    assert len(notes) == 1
    assert notes[0].startswith("device differs from the record, so equality is not promised")


def test_hashes_come_before_the_engine(fakes, finished):
    path = finished / "rounds-00003.parquet"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    engine = fakes.FakeEngine()
    with pytest.raises(DsparkError, match=r"rounds-00003\.parquet: expected shard 3 with sha256"):
        replay(finished, engine, 1, 0, fakes.facts())
    assert engine.generated == 0


@pytest.mark.parametrize("name", ["trajectories-00002.parquet", "rounds-00004.parquet", "manifest.json"])
def test_a_flipped_bit_is_found_by_its_hash_before_anything_is_generated(fakes, finished, name):
    path, draw, engine = finished / name, random.Random(3), fakes.FakeEngine()
    data = path.read_bytes()
    for _ in range(40):
        flipped = bytearray(data)
        flipped[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(flipped)
        with pytest.raises(DsparkError, match=rf"{name.partition('-')[0].partition('.')[0]}"):
            replay(finished, engine, 1, 0, fakes.facts())
    assert engine.generated == 0


@pytest.mark.parametrize("size", [0, 1, 500])
def test_a_truncated_shard_is_named(fakes, finished, size):
    path, engine = finished / "trajectories-00001.parquet", fakes.FakeEngine()
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(DsparkError, match=rf"trajectories-00001\.parquet: expected shard 1 .* but its {size} bytes"):
        replay(finished, engine, None, 0, fakes.facts())
    assert engine.generated == 0


def test_an_unfinished_run_is_not_replayed(fakes, tmp_path):
    with pytest.raises(RuntimeError):
        fakes.run(tmp_path / "part", fakes.FakeEngine(stop_after=7))
    with pytest.raises(DsparkError, match="expected a complete run"):
        replay(tmp_path / "part", fakes.FakeEngine(), None, 0, fakes.facts())


def test_another_tokenizer_changes_no_bit_and_is_said(fakes, finished):
    result = replay(finished, fakes.FakeEngine(), None, 0, fakes.facts(tokenizer="ee" * 32))
    assert result.ok
    (note,) = result.notes
    assert "token ids are the record" in note
    assert "a reward that read it, would be another" in note
