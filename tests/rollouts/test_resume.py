"""Interrupted and continued runs give the bytes of an uninterrupted one, and lose nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dspark.contracts import DsparkError
from dspark.rollouts.journal import JOURNAL_NAME, LOCK_NAME
from dspark.rollouts.manifest import check_same_run, identity, read_manifest


def drive(*arguments: str) -> int:
    driver = Path(__file__).with_name("kill_driver.py")
    root = Path(__file__).parents[2]
    paths = [str(root), str(root / "kernels"), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(driver), *arguments], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    return int(done.stdout)


def test_killed_at_random_times(fakes, finished, tmp_path):
    folder = tmp_path / "killed"
    assert drive("times", str(folder), "3") >= 10
    assert fakes.contents(folder) == fakes.contents(finished)


def test_killed_at_every_durable_step(fakes, tmp_path):
    root = tmp_path / "steps"
    steps = drive("points", str(root))
    assert steps > 25
    fakes.run(tmp_path / "finished", config=fakes.SMALL)
    want = fakes.contents(tmp_path / "finished")
    folders = sorted(root.iterdir())
    assert len(folders) == steps + 1  # the last one was not killed
    for folder in folders:
        assert fakes.contents(folder) == want, folder


@pytest.mark.parametrize("after", [1, 4, 5, 6, 13, 17])
def test_crash_resumes_what_is_missing_only(fakes, finished, tmp_path, after):
    folder = tmp_path / "crashed"
    with pytest.raises(RuntimeError, match="crash"):
        fakes.run(folder, fakes.FakeEngine(stop_after=after))
    assert read_manifest(folder)["state"] == "running"
    engine = fakes.FakeEngine(batch=7, seed=9)
    summary = fakes.run(folder, engine)
    assert (engine.generated, summary["resumed"]) == (18 - after, after)
    assert fakes.contents(folder) == fakes.contents(finished)


def test_a_full_shard_is_written_before_the_run_ends(fakes, tmp_path):
    with pytest.raises(RuntimeError):
        fakes.run(tmp_path / "run", fakes.FakeEngine(batch=1, stop_after=11))
    assert (tmp_path / "run" / "trajectories-00001.parquet").exists()
    assert not (tmp_path / "run" / "trajectories-00002.parquet").exists()


def test_crash_before_anything_leaves_nothing(fakes, finished, tmp_path):
    folder = tmp_path / "crashed"
    with pytest.raises(RuntimeError):
        fakes.run(folder, fakes.FakeEngine(stop_after=0))
    assert fakes.contents(folder) == {}
    fakes.run(folder, config=fakes.with_config(temperature=0.5))  # so other settings are welcome there


def test_complete_run_started_again_does_nothing(fakes, finished):
    before, engine = fakes.contents(finished), fakes.FakeEngine()
    summary = fakes.run(finished, engine)
    assert (engine.generated, summary["resumed"], summary["new_tokens"]) == (0, 18, 0)
    assert fakes.contents(finished) == before


@pytest.mark.parametrize("name", ["trajectories-00001.parquet", "rounds-00003.parquet"])
def test_removed_shard_is_made_again(fakes, finished, name):
    before, engine = fakes.contents(finished), fakes.FakeEngine()
    (finished / name).unlink()
    fakes.run(finished, engine)
    assert 0 < engine.generated <= 5
    assert fakes.contents(finished) == before


def crashed_journal(fakes, folder: Path, after: int = 3) -> Path:
    with pytest.raises(RuntimeError):
        fakes.run(folder, fakes.FakeEngine(stop_after=after))
    return folder / JOURNAL_NAME


def test_torn_last_line_is_generated_again(fakes, finished, tmp_path):
    journal = crashed_journal(fakes, tmp_path / "torn")
    data = journal.read_bytes()
    last = data.rindex(b"\n", 0, len(data) - 1) + 1
    for cut in (1, 2, 40, len(data) - last - 1):
        folder = tmp_path / f"torn-{cut}"
        crashed_journal(fakes, folder).write_bytes(data[:-cut])
        engine = fakes.FakeEngine(batch=2)
        fakes.run(folder, engine)
        assert engine.generated == 16
        assert fakes.contents(folder) == fakes.contents(finished)


def test_torn_tail_is_cut_before_the_next_line(fakes, finished, tmp_path):
    folder = tmp_path / "torn"
    journal = crashed_journal(fakes, folder)
    journal.write_bytes(journal.read_bytes()[:-9])
    with pytest.raises(RuntimeError):
        fakes.run(folder, fakes.FakeEngine(stop_after=2))
    engine = fakes.FakeEngine()
    fakes.run(folder, engine)
    assert engine.generated == 14  # two whole lines, two more after the cut
    assert fakes.contents(folder) == fakes.contents(finished)


def test_zeroed_tail_after_power_loss(fakes, finished, tmp_path):
    folder = tmp_path / "zeroed"
    journal = crashed_journal(fakes, folder)
    journal.write_bytes(journal.read_bytes() + b"\0" * 512)
    fakes.run(folder)
    assert fakes.contents(folder) == fakes.contents(finished)


@pytest.mark.parametrize("byte", [0, 30, 200, -1])
def test_damage_before_the_last_line_is_refused(fakes, tmp_path, byte):
    folder = tmp_path / "damaged"
    journal = crashed_journal(fakes, folder)
    data = bytearray(journal.read_bytes())
    data[byte if byte >= 0 else data.index(b"\n")] ^= 1
    journal.write_bytes(data)
    with pytest.raises(DsparkError, match=r"journal\.jsonl: expected a whole line 1"):
        fakes.run(folder)
    assert journal.read_bytes() == data
    assert not (folder / LOCK_NAME).exists()


def test_journal_of_another_run_is_refused(fakes, tmp_path):
    other = crashed_journal(fakes, tmp_path / "other").read_bytes()
    with pytest.raises(RuntimeError):
        fakes.run(tmp_path / "ours", fakes.FakeEngine(stop_after=2), fakes.with_config(run_seed=12))
    (tmp_path / "ours" / JOURNAL_NAME).write_bytes(other)
    with pytest.raises(DsparkError, match="one with other settings"):
        fakes.run(tmp_path / "ours", config=fakes.with_config(run_seed=12))


CHANGES = [
    ({"temperature": 0.5}, {}, "config.temperature was 1.0, now 0.5"),
    ({"limit": 2}, {}, "config.limit was 0, now 2"),
    ({"shard_size": 6}, {}, "shard_size was 5, now 6"),
    ({"run_seed": 12}, {}, "config.run_seed was 11, now 12"),
    ({}, {"target": "ee" * 32}, f"target was '{'aa' * 32}', now '{'ee' * 32}'"),
    ({}, {"drafter": None}, "drafter was 'bb"),
    ({}, {"dtype": "bfloat16"}, "dtype was 'float32', now 'bfloat16'"),
    ({}, {"kernels": {"sources": "ff", "threads": 1}}, "kernels.sources was 'dd', now 'ff'"),
]


@pytest.mark.parametrize(("config", "base", "message"), CHANGES)
def test_other_settings_are_named(fakes, tmp_path, config, base, message):
    folder = tmp_path / "run"
    crashed_journal(fakes, folder)
    before = fakes.contents(folder)
    with pytest.raises(DsparkError) as caught:
        fakes.run(folder, config=fakes.with_config(**config), base=fakes.facts(**base))
    assert message in str(caught.value)
    assert fakes.contents(folder) == before


def test_other_prompts_are_named(fakes, tmp_path):
    crashed_journal(fakes, tmp_path / "run")
    with pytest.raises(DsparkError, match=r"got others: prompts was '"):
        fakes.run(tmp_path / "run", prompts=fakes.make_prompts()[::-1])


def test_batch_size_threads_and_paths_may_change(fakes, tmp_path):
    crashed_journal(fakes, tmp_path / "run")
    config = fakes.with_config(batch_size=1, prompts="elsewhere.jsonl", out="elsewhere")
    fakes.run(tmp_path / "run", config=config, base=fakes.facts(threads=2, kernels={"sources": "dd", "threads": 2}))


def test_a_manifest_of_an_earlier_release_means_what_it_did() -> None:
    """It lacks what came later: a run with the old meaning goes on, any other is refused in plain words."""
    now = {"run.config.policy": "fixed", "run.curve": None, "run.config.truncation": "off", "run.config.keep_tokens": 0}
    nested = {"run": {"config": {"seed": 1, "policy": "fixed", "truncation": "off", "keep_tokens": 0}, "curve": None}}
    rest = {"order": {"sha256": "a"}, "shard_size": 4}
    old = {"run": {"config": {"seed": 1}}, **rest}
    assert now.keys() <= identity({**nested, **rest}).keys()
    check_same_run(old, {**nested, **rest}, Path("x"))
    nested["run"]["config"]["policy"] = "global"
    with pytest.raises(DsparkError, match="policy was not recorded, now 'global'"):
        check_same_run(old, {**nested, **rest}, Path("x"))
