"""Mistakes in an RL recipe, each one clear error before anything is generated; rewards that fail."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer

from dspark.contracts import DsparkError
from dspark.rl.policy_module import PolicyModule
from dspark.rollouts.config import RolloutConfig
from dspark.rollouts.rewards import RewardInput

pytestmark = pytest.mark.usefixtures("one_thread")


def never(sample: RewardInput) -> float:
    raise ValueError("no verdict")


def away(sample: Any) -> float:
    if os.environ["AWAY"] == "yes":
        raise ConnectionError("away")
    return float(len(sample.response_ids) % 2)


def wanders(sample: Any) -> float:
    os.chdir(os.environ["ELSEWHERE"])
    return float(len(sample.response_ids) % 2)


def sometimes(sample: RewardInput) -> float:
    """Fails on every sample that begins with an odd id."""
    return float("nan") if sample.response_ids[0] % 2 else float(len(sample.response_ids))


@pytest.mark.parametrize(
    ("rollout", "options", "said"),
    [
        ({"reward": ""}, {}, r"rollout.reward: expected module:function"),
        ({"samples_per_prompt": 1}, {}, r"rollout.samples_per_prompt: expected > 1, a group, but got 1"),
        ({"verifier": "rejection"}, {}, r"rollout.verifier: expected coupled"),
        ({"engine": "vllm", "recompute": True}, {}, r"rollout.engine: expected dspark"),
        ({"workers": 2}, {}, r"rollout.workers: expected 1"),
        ({"gamma": 2}, {}, r"gamma: expected a draft model with it"),
        ({"stop_ids": (99,)}, {}, r"stop_ids in the vocabulary of 16"),
        ({"max_tokens": 64}, {}, r"max_tokens below the context of 64"),
        ({"temperature": 0.0}, {}, r"rollout.temperature: expected > 0"),
        ({}, {"follow": {"steps": 1}}, r"follow.steps: expected 0 without a drafter, but got 1"),
        (
            {},
            {"objective": {"kind": "ppo"}},
            r"objective: expected kind one of grpo, dr_grpo, reinforce, but got 'ppo'",
        ),
        ({}, {"objective": {"clip": 1}}, r"ObjectiveOptions: expected keys of"),
        ({}, {"objective": {"updates_per_rollout": 13}}, r"updates_per_rollout: expected at most 12"),
        ({}, {"prompts_per_rollout": 0}, r"prompts_per_rollout a whole number >= 1"),
        ({}, {"optimizer": {"lr": -1.0}}, r"optimizer: expected lr > 0"),
        ({"drafter": "nowhere"}, {}, r"nowhere: expected a draft model's folder"),
        ({"prompts": "nowhere.jsonl"}, {}, r"nowhere.jsonl"),
        (
            {"skip": 2000, "limit": 0},
            {},
            r"expected at least one prompt, but got none: 1000 distinct ones, of which skip passes over 2000",
        ),
        ({"reward": "dspark.rl.tasks:nothing"}, {}, r"expected a function nothing"),
    ],
)
def test_settings(tiny_rl: Any, tmp_path: Path, rollout: dict, options: dict, said: str) -> None:
    with pytest.raises(DsparkError, match=said):
        tiny_rl.run(tmp_path, 2, rollout=rollout, **options)
    assert not list(tmp_path.glob("rollouts/0*/trajectories*"))


@pytest.mark.parametrize("rollout", [{"policy": "threshold", "threshold": 0.5}, {"lookup": 3}])
def test_a_draft_model_learns_from_whole_rounds_of_its_own(tiny_rl: Any, tmp_path: Path, rollout: dict) -> None:
    given = {"drafter": tiny_rl.make_drafter(tmp_path / "drafter"), **rollout}
    with pytest.raises(DsparkError, match=r"follow.steps: expected 0 unless every round is the draft model's"):
        tiny_rl.run(tmp_path, 2, rollout=given, follow={"steps": 1})


def test_a_switch_alone_does_not_choose_rounds_to_learn_from(tiny_rl: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("DEEPINFER_ENABLE_MTP_VARLEN", "1")
    drafter = tiny_rl.make_drafter(tmp_path / "drafter")
    with pytest.raises(DsparkError, match=r"but got 1 with policy global"):
        tiny_rl.run(tmp_path, 2, rollout={"drafter": drafter}, follow={"steps": 1})


def test_checkpoints_lie_between_rollouts(tiny_rl: Any, tmp_path: Path) -> None:
    with pytest.raises(DsparkError, match=r"trainer.callbacks: expected checkpoints every so many steps that 2"):
        tiny_rl.run(tmp_path, 4, save_every=3, objective={"updates_per_rollout": 2})


@pytest.mark.parametrize(
    ("trainer", "said"),
    [
        ({"max_steps": 3}, r"trainer.max_steps: expected a multiple of objective.updates_per_rollout \(2\), but got 3"),
        ({"max_steps": -1}, r"trainer.max_steps"),
        ({"max_steps": 2, "precision": "bf16-mixed"}, r"trainer.precision: expected 32-true"),
    ],
)
def test_trainers(tiny_rl: Any, tmp_path: Path, trainer: dict[str, Any], said: str) -> None:
    rollout = RolloutConfig(target=str(tiny_rl.TASK / "digits"), reward="dspark.rl.tasks:same_digits",
                            samples_per_prompt=2)  # fmt: skip
    module = PolicyModule(rollout, objective={"updates_per_rollout": 2})
    made = Trainer(default_root_dir=tmp_path, logger=False, accelerator="cpu", enable_progress_bar=False,
                   enable_model_summary=False, enable_checkpointing=False, **trainer)  # fmt: skip
    with pytest.raises(DsparkError, match=said):
        made.fit(module)


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_other_verbs(tiny_rl: Any, tmp_path: Path, verb: str) -> None:
    rollout = RolloutConfig(target=str(tiny_rl.TASK / "digits"), reward="a:b", samples_per_prompt=2)
    with pytest.raises(DsparkError, match=rf"{verb}: expected `fit`"):
        PolicyModule(rollout).setup("validate" if verb == "validate" else verb)


def test_a_reward_that_fails_always_stops_the_run_and_keeps_the_samples(tiny_rl: Any, tmp_path: Path) -> None:
    with pytest.raises(DsparkError, match=r"the function failed on 12 of 12 samples \(.*ValueError: no verdict"):
        tiny_rl.run(tmp_path, 2, rollout={"reward": f"{__file__}:never"})
    assert tiny_rl.shard_hashes(tmp_path) == {}
    assert len(list((tmp_path / "rollouts" / "failed-000000").glob("trajectories-*.parquet"))) == 1


def test_a_reward_that_was_away_for_a_while_costs_nothing(
    tiny_rl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it needs comes back, and the same command goes on: the run is the one it would have been."""
    given = {"rollout": {"reward": f"{__file__}:away"}}
    monkeypatch.setenv("AWAY", "no")
    whole = tiny_rl.run(tmp_path / "whole", 4, **given)
    tiny_rl.run(tmp_path / "cut", 2, **given)
    for _ in range(2):
        monkeypatch.setenv("AWAY", "yes")
        with pytest.raises(DsparkError, match=r"ConnectionError: away.*give the same command again"):
            tiny_rl.run(tmp_path / "cut", 4, ckpt=str(tmp_path / "cut" / "last.ckpt"), **given)
    assert sorted(p.name for p in (tmp_path / "cut" / "rollouts").glob("failed*")) == [
        "failed-000002",
        "failed-000002-1",
    ]
    monkeypatch.setenv("AWAY", "no")
    rest = tiny_rl.run(tmp_path / "cut", 4, ckpt=str(tmp_path / "cut" / "last.ckpt"), **given)
    assert tiny_rl.shard_hashes(tmp_path / "cut") == tiny_rl.shard_hashes(tmp_path / "whole")
    assert tiny_rl.weights_hash(rest) == tiny_rl.weights_hash(whole)


def test_the_share_of_failures_may_be_raised_on_resume(tiny_rl: Any, tmp_path: Path) -> None:
    given = {"rollout": {"reward": f"{__file__}:sometimes"}}
    with pytest.raises(DsparkError, match="Or raise max_failed_share"):
        tiny_rl.run(tmp_path, 2, max_failed_share=0.0, **given)
    tiny_rl.run(tmp_path, 2, max_failed_share=0.9, **given)


def test_a_reward_that_goes_elsewhere_takes_nothing_with_it(
    tiny_rl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ELSEWHERE", str(tmp_path / "elsewhere"))
    (tmp_path / "elsewhere").mkdir()
    tiny_rl.run("run", 2, rollout={"reward": f"{__file__}:wanders"})
    assert len(tiny_rl.shard_hashes(tmp_path / "run")) == 2
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("part", ["data/0", "data/8"])
def test_a_flipped_bit_in_a_checkpoint(tiny_rl: Any, tmp_path: Path, part: str) -> None:
    tiny_rl.run(tmp_path, 2)
    path = tmp_path / "last.ckpt"
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        (info,) = [one for one in archive.infolist() if one.filename.endswith(f"/{part}")]
    lengths = (int.from_bytes(data[info.header_offset + at : info.header_offset + at + 2], "little") for at in (26, 28))
    data[info.header_offset + 30 + sum(lengths) + info.file_size // 2] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(DsparkError, match="the checkpoint is damaged"):
        tiny_rl.run(tmp_path, 4, ckpt=str(path))


def test_a_shorter_run_does_not_replace_a_longer_one(tiny_rl: Any, tmp_path: Path) -> None:
    first = tiny_rl.run(tmp_path, 4)
    kept = (tmp_path / "policy" / "model.safetensors").read_bytes()
    with pytest.raises(DsparkError, match="the history of 4 rollouts, and max_steps is enough for 2"):
        tiny_rl.run(tmp_path, 2)
    assert (tmp_path / "policy" / "model.safetensors").read_bytes() == kept
    again = tiny_rl.run(tmp_path, 4)  # from the start, over the rollouts that are there
    assert tiny_rl.weights_hash(again) == tiny_rl.weights_hash(first)


@pytest.mark.parametrize("flag", [{"fast_dev_run": True}, {"limit_train_batches": 1}, {"overfit_batches": 1}])
def test_flags_that_cut_a_run_are_refused(tiny_rl: Any, tmp_path: Path, flag: dict[str, Any]) -> None:
    module = PolicyModule(RolloutConfig(target=str(tiny_rl.TASK / "digits"), reward="a:b", samples_per_prompt=2))
    module.trainer = Trainer(accelerator="cpu", max_steps=2, logger=False, default_root_dir=tmp_path, **flag)
    with pytest.raises(DsparkError, match=f"trainer.{next(iter(flag))}: expected it left out"):
        module.setup("fit")


def test_no_room_for_the_policy_is_one_error(tiny_rl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dspark.rl.save.save_file", full)
    with pytest.raises(DsparkError, match=r"expected room for a checkpoint, but got: .*No space left"):
        tiny_rl.run(tmp_path, 1)


def test_a_reward_that_fails_sometimes_counts_nowhere(tiny_rl: Any, tmp_path: Path) -> None:
    module = tiny_rl.run(tmp_path, 2, rollout={"reward": f"{__file__}:sometimes"}, max_failed_share=0.9)
    for line in module.history.lines:
        assert 0 < line["rollout/rewards_missing"] < 1
        assert line["rollout/reward"] > 0
    with pytest.raises(DsparkError, match=r"Or raise max_failed_share"):
        tiny_rl.run(tmp_path / "b", 2, rollout={"reward": f"{__file__}:sometimes"}, max_failed_share=0.0)


def test_a_checkpoint_of_something_else(tiny_rl: Any, tmp_path: Path) -> None:
    import torch

    tiny_rl.run(tmp_path, 2)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    del saved["dspark_record"]
    torch.save(saved, tmp_path / "other.ckpt")
    with pytest.raises(DsparkError, match=r"expected one of an RL run"):
        tiny_rl.run(tmp_path, 4, ckpt=str(tmp_path / "other.ckpt"))
