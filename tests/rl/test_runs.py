"""Whole RL runs: same seed, same files and weights; killed and resumed, the same; and whatever drafts, the same."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.commands.replay import replay_folder
from dspark.contracts import DsparkError
from dspark.export.bundle import load_bundle, write_calibration
from dspark.rl.run_record import keep_run_record, refuse_other_run
from dspark.rollouts.store import read_rounds, read_trajectories
from dspark.slot_maps import of_temperatures
from dspark.target.load import load_target

pytestmark = pytest.mark.usefixtures("one_thread")
LEARNS = {"steps": 2, "optimizer": {"lr": 0.02, "warmup_steps": 0}}
TWO = {"objective": {"updates_per_rollout": 2}, "rollout": {"top_p": 0.9, "temperature": 0.8}}


def same(tiny_rl: Any, a: Path, first: Any, b: Path, second: Any) -> None:
    assert tiny_rl.shard_hashes(a) == tiny_rl.shard_hashes(b) != {}
    assert tiny_rl.weights_hash(first) == tiny_rl.weights_hash(second)


def test_same_seed_same_everything_and_another_seed_another(tiny_rl: Any, tmp_path: Path) -> None:
    runs = {name: tiny_rl.run(tmp_path / name, 4, **TWO) for name in ("a", "b")}
    same(tiny_rl, tmp_path / "a", runs["a"], tmp_path / "b", runs["b"])
    assert tiny_rl.history(tmp_path / "a") == tiny_rl.history(tmp_path / "b")
    other = tiny_rl.run(tmp_path / "c", 4, **{**TWO, "rollout": {**TWO["rollout"], "run_seed": 1}})
    assert tiny_rl.weights_hash(other) != tiny_rl.weights_hash(runs["a"])


def test_the_batch_size_of_the_runner_does_not_show(tiny_rl: Any, tmp_path: Path) -> None:
    first = tiny_rl.run(tmp_path / "a", 3)
    second = tiny_rl.run(tmp_path / "b", 3, rollout={"batch_size": 1})
    same(tiny_rl, tmp_path / "a", first, tmp_path / "b", second)


@pytest.mark.parametrize("options", [{}, TWO, {"objective": {"kl": 0.1}}], ids=["plain", "two updates, top-p", "kl"])
def test_resumed_in_the_middle(tiny_rl: Any, tmp_path: Path, options: dict[str, Any]) -> None:
    whole = tiny_rl.run(tmp_path / "whole", 6, save_every=100, **options)
    tiny_rl.run(tmp_path / "cut", 4, **options)
    rest = tiny_rl.run(tmp_path / "cut", 6, ckpt=str(tmp_path / "cut" / "last.ckpt"), **options)
    same(tiny_rl, tmp_path / "whole", whole, tmp_path / "cut", rest)
    assert tiny_rl.history(tmp_path / "whole") == tiny_rl.history(tmp_path / "cut")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_killed_and_resumed_with_a_draft_model_that_follows(tiny_rl: Any, tmp_path: Path, dtype: str) -> None:
    drafter = tiny_rl.make_drafter(tmp_path / "drafter", dtype)
    given = {"rollout": {"drafter": drafter, "dtype": dtype}, "follow": {"steps": 2}}
    whole = tiny_rl.run(tmp_path / "whole", 5, **given)
    killed = {**given, "root": str(tmp_path / "cut"), "steps": 5, "kill": 3}
    script = Path(tiny_rl.__file__)
    done = subprocess.run([sys.executable, script, json.dumps(killed)], check=False, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert len(list((tmp_path / "cut" / "rollouts").glob("0*"))) == 3, "one more than the checkpoint knows of"
    rest = tiny_rl.run(tmp_path / "cut", 5, ckpt=str(tmp_path / "cut" / "last.ckpt"), **given)
    same(tiny_rl, tmp_path / "whole", whole, tmp_path / "cut", rest)
    for ours, theirs in zip(whole.follower.trained.parameters(), rest.follower.trained.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert tiny_rl.history(tmp_path / "whole") == tiny_rl.history(tmp_path / "cut")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_who_drafts_changes_no_bit(tiny_rl: Any, tmp_path: Path, dtype: str) -> None:
    """Nobody, a draft model frozen or following, a lookup, both: the same trajectories, the same policy; and the
    followers did draft and did learn."""
    drafter = tiny_rl.make_drafter(tmp_path / "drafter", dtype)
    rollout = {"drafter": drafter, "dtype": dtype}
    none = tiny_rl.run(tmp_path / "none", 4, rollout={"dtype": dtype})
    frozen = tiny_rl.run(tmp_path / "frozen", 4, rollout=rollout)
    following = tiny_rl.run(tmp_path / "following", 4, rollout=rollout, follow=LEARNS)
    same(tiny_rl, tmp_path / "none", none, tmp_path / "frozen", frozen)
    same(tiny_rl, tmp_path / "none", none, tmp_path / "following", following)
    looked = {"both": {**rollout, "lookup": 4}, "lookup": {"dtype": dtype, "lookup": 4}}
    for name, given in looked.items():
        same(tiny_rl, tmp_path / "none", none, tmp_path / name, tiny_rl.run(tmp_path / name, 4, rollout=given))
        rounds = [r for some in read_rounds(tmp_path / name / "rollouts" / "000003").values() for r in some]
        assert any(r.source == "lookup" and r.accepted for r in rounds)
        assert any(r.source == "lookup" and r.accepted < r.verified for r in rounds)
    drafts = []
    for name in ("frozen", "following"):
        last = read_rounds(tmp_path / name / "rollouts" / "000003")
        rounds = [r for some in last.values() for r in some]
        assert sum(r.accepted for r in rounds) > 0
        assert sum(r.accepted < r.verified for r in rounds) > 0
        drafts.append([r.drafted for r in rounds])
    assert drafts[0] != drafts[1], "the follower drafts as if it had not learned"
    moved = zip(frozen.follower.trained.named_parameters(), following.follower.trained.named_parameters(), strict=True)
    still = {name for (name, a), (_, b) in moved if torch.equal(a, b)}
    assert not {n for n in still if "confidence_head" in n or n.startswith("layers.")}, still


@pytest.mark.parametrize("follow", [None, LEARNS], ids=["frozen", "following"])
def test_killed_in_the_middle_of_a_rollout_with_a_reduced_vocabulary(tiny_rl: Any, tmp_path: Path, follow: Any) -> None:
    """The draft model's rows of the LM head are the policy's as it is: every figure is that of a run in one piece."""
    drafter = tiny_rl.make_drafter(tmp_path / "drafter", draft_ids=[2, *range(6, 14)])
    reward = f"{tiny_rl.__file__}:same_digits_or_death"
    given = {"rollout": {"drafter": drafter, "reward": reward}, "follow": follow}
    whole = tiny_rl.run(tmp_path / "whole", 5, **given)
    assert len({line["rollout/tau"] for line in tiny_rl.history(tmp_path / "whole")}) > 1
    killed = json.dumps({**given, "root": str(tmp_path / "cut"), "steps": 5})
    environment = {**os.environ, "DIE_AT": "42"}  # 12 samples a rollout: in the fourth
    done = subprocess.run([sys.executable, tiny_rl.__file__, killed], check=False, capture_output=True, text=True,
                          env=environment)  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert (tmp_path / "cut" / "rollouts" / "000003" / "journal.jsonl").exists()
    rest = tiny_rl.run(tmp_path / "cut", 5, ckpt=str(tmp_path / "cut" / "last.ckpt"), **given)
    same(tiny_rl, tmp_path / "whole", whole, tmp_path / "cut", rest)
    assert tiny_rl.history(tmp_path / "whole") == tiny_rl.history(tmp_path / "cut")


def test_a_resumed_run_looks_up_what_it_wrote(tiny_rl: Any, tmp_path: Path) -> None:
    given = {"rollout": {"lookup": 4}}
    whole = tiny_rl.run(tmp_path / "whole", 6, **given)
    tiny_rl.run(tmp_path / "cut", 4, **given)
    rest = tiny_rl.run(tmp_path / "cut", 6, ckpt=str(tmp_path / "cut" / "last.ckpt"), **given)
    same(tiny_rl, tmp_path / "whole", whole, tmp_path / "cut", rest)
    written = sum(len(read_trajectories(f)) for f in (tmp_path / "whole" / "rollouts").glob("0*"))
    assert rest.lookup.remembered == whole.lookup.remembered == written > 60


def test_a_calibration_goes_along(tiny_rl: Any, tmp_path: Path) -> None:
    drafter = tiny_rl.make_drafter(tmp_path / "drafter")
    write_calibration(drafter, of_temperatures((3.0, 2.0, 1.5)), "data")
    for name, follow in (("frozen", None), ("following", LEARNS)):
        module = tiny_rl.run(tmp_path / name, 2, rollout={"drafter": drafter}, follow=follow)
        left = load_bundle(tmp_path / name / "drafter")
        for (n, saved), (_, trained) in zip(left.drafter.named_parameters(), module.follower.trained.named_parameters(),
                                            strict=True):  # fmt: skip
            assert torch.equal(saved, trained), f"{n}: the last steps are missing"
        assert left.calibration is not None
        assert left.calibration["carried_from"] == load_bundle(drafter).hash
        assert left.drafter.confidence_head.maps == of_temperatures((3.0, 2.0, 1.5))
        policy = load_target(tmp_path / name / "policy", "float32")
        assert left.config.target_fingerprint == policy.fingerprint


def test_an_edited_reward_or_another_number_of_processes_is_another_run(tiny_rl: Any, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def score(sample):\n    return float(len(sample.response_ids))\n")
    given = {"rollout": {"reward": f"{file}:score"}}
    tiny_rl.run(tmp_path / "a", 2, **given)
    file.write_text("def score(sample):\n    return -float(len(sample.response_ids))\n")
    with pytest.raises(DsparkError, match=r"the settings of the run that is there, but got others: reward was"):
        tiny_rl.run(tmp_path / "a", 4, ckpt=str(tmp_path / "a" / "last.ckpt"), **given)
    with pytest.raises(DsparkError, match=r"processes was 1, now 2"):
        refuse_other_run("x", {"processes": 1, "threads": 1}, {"processes": 2, "threads": 5})


def test_other_threads_are_told_or_refused_where_rollouts_are_there(tmp_path: Path, capsys: Any) -> None:
    record = {"settings": {"a": 1}, "threads": 2}
    keep_run_record(tmp_path, record, 0)
    (tmp_path / "000002").mkdir()
    keep_run_record(tmp_path, {**record, "threads": 1}, 2)  # number 2 itself was sampled by weights of the checkpoint
    assert "begun with 2 threads and goes on with 1" in capsys.readouterr().err
    with pytest.raises(DsparkError, match=r"expected the 2 threads that made 000002.*Give OMP_NUM_THREADS=2"):
        keep_run_record(tmp_path, {**record, "threads": 1}, 1)


def test_a_run_does_not_go_on_among_anothers_rollouts(tiny_rl: Any, tmp_path: Path) -> None:
    tiny_rl.run(tmp_path / "a", 2)
    before = tiny_rl.shard_hashes(tmp_path / "a")
    with pytest.raises(
        DsparkError, match=r"the settings of the run that is there.*settings.optimizer.lr was 0.01, now"
    ):
        tiny_rl.run(tmp_path / "a", 2, optimizer={"lr": 0.02})
    with pytest.raises(DsparkError, match=r"rollout.temperature was 1.0, now 0.5"):
        tiny_rl.run(tmp_path / "a", 4, ckpt=str(tmp_path / "a" / "last.ckpt"), rollout={"temperature": 0.5})
    assert tiny_rl.shard_hashes(tmp_path / "a") == before
    again = tiny_rl.run(tmp_path / "a", 2)  # the same run: what is there is taken
    assert tiny_rl.shard_hashes(tmp_path / "a") == before
    assert again.history.lines[-1]["seconds/generate"] == 0.0


def test_every_rollout_replays_with_the_policy_that_made_it(tiny_rl: Any, tmp_path: Path) -> None:
    """Later ones too, also teacher-forced, and those of a draft model that has moved on; and with no other policy."""
    drafter = tiny_rl.make_drafter(tmp_path / "drafter")
    tiny_rl.run(tmp_path, 4, keep_policies=2, rollout={"drafter": drafter}, follow=LEARNS)
    assert sorted(f.name for f in (tmp_path / "policies").iterdir()) == ["000000", "000002"]
    for number in ("000000", "000002"):
        result = replay_folder(
            str(tmp_path / "rollouts" / number), rescore=True, target=str(tmp_path / "policies" / number), quiet=True
        )
        assert result.ok
        assert result.checked == 12
    with pytest.raises(DsparkError, match="differs in target"):
        replay_folder(str(tmp_path / "rollouts" / "000003"), target=str(tmp_path / "policies" / "000002"), quiet=True)
