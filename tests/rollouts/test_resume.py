"""Interrupted and continued runs give the bytes of an uninterrupted one, and lose nothing."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from dspark.contracts import DsparkError
from dspark.rollouts.journal import JOURNAL_NAME, LOCK_NAME
from dspark.rollouts.manifest import read_manifest, write_manifest
from dspark.rollouts.replay import replay
from dspark.rollouts.store import TrajectoryWriter, read_trajectories
from dspark.training.sources import read_samples


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
        fakes.run(tmp_path / "run", fakes.FakeEngine(batch=1, stop_after=8))
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


def test_flipped_bits_in_the_journal_never_show(fakes, finished, tmp_path):
    """Refused by name, or, in the last line, that trajectory is generated again: never a wrong value."""
    refused, draw = 0, random.Random(2)
    data = crashed_journal(fakes, tmp_path / "source", after=2).read_bytes()
    for i in range(60):
        folder = tmp_path / str(i)
        flipped = bytearray(data)
        flipped[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        crashed_journal(fakes, folder, after=2).write_bytes(flipped)
        said = refusal(fakes, folder)
        refused += bool(said)
        assert said == "" or "journal.jsonl: expected a whole line 1" in said
        assert said or fakes.contents(folder) == fakes.contents(finished)
    assert 0 < refused < 60


def refusal(fakes, folder: Path) -> str:
    """What a run says that does not go on; "" for one that does."""
    try:
        fakes.run(folder)
    except DsparkError as error:
        return str(error)
    return ""


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
    with pytest.raises(DsparkError, match=r"got others: order.trajectories was 18, now 15; prompts was '"):
        fakes.run(tmp_path / "run", prompts=fakes.make_prompts()[1:])


def test_shuffled_prompts_continue_a_run_and_its_given_order_stays(fakes, finished, tmp_path):
    crashed_journal(fakes, tmp_path / "run", after=7)
    fakes.run(tmp_path / "run", prompts=fakes.make_prompts()[::-1])
    assert fakes.contents(tmp_path / "run") == fakes.contents(finished)


def test_another_version_of_the_reward_is_refused(fakes, tmp_path):
    config = fakes.with_config(reward=f"{tmp_path}/reward.py:f")
    (tmp_path / "reward.py").write_text("def f(sample): return 1")
    with pytest.raises(RuntimeError):
        fakes.run(tmp_path / "run", fakes.FakeEngine(stop_after=4), config)
    (tmp_path / "reward.py").write_text("def f(sample): return 2")
    with pytest.raises(DsparkError, match="reward_code was"):
        fakes.run(tmp_path / "run", config=config)


def test_batch_size_threads_and_paths_may_change(fakes, tmp_path):
    crashed_journal(fakes, tmp_path / "run")
    config = fakes.with_config(batch_size=1, prompts="elsewhere.jsonl", out="elsewhere")
    fakes.run(tmp_path / "run", config=config, base=fakes.facts(threads=2, kernels={"sources": "dd", "threads": 2}))


def earlier(fakes, source: Path, folder: Path, complete: bool = True) -> list:
    """A folder as the first release made it: trajectories in the order of the prompt file, which its manifest does not
    say. Returns them."""
    trajectories = sorted(read_trajectories(source), key=lambda t: t.prompt_id, reverse=True)
    run = read_manifest(source)["run"]
    with TrajectoryWriter(folder, run, [t.trajectory_id for t in trajectories], 5) as writer:
        for t in trajectories if complete else trajectories[:7]:
            writer.add(t)
        if complete:
            writer.finish()
    manifest = read_manifest(folder)
    del manifest["given"]
    write_manifest(folder, {**manifest, "version": 1})
    return trajectories


@pytest.mark.parametrize("complete", [True, False])
def test_a_folder_of_an_earlier_release_is_not_continued(fakes, finished, tmp_path, complete):
    folder = tmp_path / "old"
    earlier(fakes, finished, folder, complete)
    before, engine = fakes.contents(folder), fakes.FakeEngine()
    with pytest.raises(DsparkError, match=r"an earlier one began it.*choose another folder"):
        fakes.run(folder, engine)
    assert (fakes.contents(folder), engine.generated) == (before, 0)


def test_a_folder_of_an_earlier_release_is_read_and_replayed(fakes, finished, tmp_path):
    folder = tmp_path / "old"
    trajectories = earlier(fakes, finished, folder)
    assert read_trajectories(folder) == trajectories != read_trajectories(finished)
    result = replay(folder, fakes.FakeEngine(), None, 0, fakes.facts(), rescore=True)
    assert (result.ok, result.checked) == (True, 18)
    samples = read_samples([str(folder)]).samples
    assert [s.sample_id for s in samples] == [t.trajectory_id for t in trajectories]


def test_training_reads_prompts_in_the_order_they_were_given(fakes, tmp_path):
    """So that `train_prompts: 240` and `dspark rollout --skip 240` part one and the same file."""
    fakes.run(tmp_path / "run", prompts=fakes.make_prompts()[::-1])
    samples = read_samples([str(tmp_path / "run")]).samples
    assert [s.sample_id for s in samples] == [f"p{p:02d}-{s}" for p in reversed(range(6)) for s in range(3)]
