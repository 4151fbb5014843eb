"""Collecting: seeds, counts, progress, rewards, and the recipe."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from dspark.contracts import DsparkError
from dspark.noise import derive_seed
from dspark.rollouts.collect import RolloutConfig
from dspark.rollouts.store import read_trajectories


def test_ids_groups_and_seeds(fakes, finished):
    for t in read_trajectories(finished):
        prompt, _, sample = t.trajectory_id.rpartition("-")
        assert (t.group_id, t.prompt_id) == (prompt, prompt)
        assert t.seq_seed == derive_seed(11, prompt, int(sample))
        assert (t.params.max_tokens, t.params.stop_ids, t.params.seq_seed) == (9, (fakes.STOP,), t.seq_seed)


def test_progress_counts_what_is_on_disk(fakes, tmp_path):
    seen: list[tuple[int, int, int]] = []
    with pytest.raises(RuntimeError):
        fakes.run(tmp_path / "run", fakes.FakeEngine(stop_after=4))
    summary = fakes.run(tmp_path / "run", on_progress=lambda *counts: seen.append(counts))
    assert [done for done, _, _ in seen] == list(range(4, 19))
    assert {total for _, total, _ in seen} == {18}
    assert seen[-1][2] == summary["tokens"]
    assert summary["new_tokens"] == summary["tokens"] - seen[0][2]


def test_runner_that_announces_nothing(fakes, finished, tmp_path):
    fakes.run(tmp_path / "run", fakes.FakeEngine(announce=False))
    assert fakes.contents(tmp_path / "run") == fakes.contents(finished)


def test_limit_duplicates_and_no_prompts(fakes, tmp_path):
    prompts = fakes.make_prompts()
    summary = fakes.run(tmp_path / "a", prompts=[prompts[0], prompts[0], *prompts], config=fakes.with_config(limit=2))
    assert (summary["prompts"], summary["duplicate_prompts"], summary["trajectories"]) == (2, 2, 6)
    with pytest.raises(DsparkError, match="at least one prompt"):
        fakes.collect([], fakes.FakeEngine(), fakes.CONFIG, str(tmp_path / "b"), fakes.facts())
    assert not (tmp_path / "b").exists()


def test_skip_passes_over_distinct_prompts(fakes, tmp_path):
    prompts = fakes.make_prompts()
    whole, rest = fakes.with_config(), fakes.with_config(skip=2)
    fakes.run(tmp_path / "whole", config=whole)
    fakes.run(tmp_path / "rest", prompts=[prompts[0], *prompts], config=rest)
    skipped = {p.prompt_id for p in prompts[:2]}
    wanted = [t for t in read_trajectories(tmp_path / "whole") if t.prompt_id not in skipped]
    assert read_trajectories(tmp_path / "rest") == wanted != []
    with pytest.raises(DsparkError, match="skip passes over 99"):
        fakes.run(tmp_path / "none", config=fakes.with_config(skip=99))


def test_default_stop_ids_are_the_tokenizers(fakes, tmp_path):
    fakes.run(tmp_path / "a", config=fakes.with_config(stop_ids=None), eos_ids=(2, 3))
    assert read_trajectories(tmp_path / "a")[0].params.stop_ids == (2, 3)


def test_engine_with_another_verifier(fakes, tmp_path):
    with pytest.raises(DsparkError, match="config's verifier coupled"):
        fakes.run(tmp_path / "a", base=fakes.facts(verifier="rejection"))


REWARDS = """
import math

calls = 0

def length(sample):
    return len(sample.response_ids)

def uneven(sample):
    if sample.domain == "code":
        raise KeyError("no unit test")
    return math.nan if sample.domain == "chat" else sample.text.count("9")

def words(sample):
    return "many"

constant = 3
"""


@pytest.fixture
def rewards(tmp_path: Path) -> str:
    (tmp_path / "rewards.py").write_text(REWARDS)
    return str(tmp_path / "rewards.py")


def test_rewards(fakes, tmp_path, rewards):
    summary = fakes.run(tmp_path / "a", config=fakes.with_config(reward=f"{rewards}:length"))
    assert all(t.reward == len(t.response_ids) for t in read_trajectories(tmp_path / "a"))
    assert summary["reward_failures"] == 0


def test_failing_rewards_are_missing_and_counted(fakes, tmp_path, rewards):
    config = fakes.with_config(reward=f"{rewards}:uneven")
    summary = fakes.run(tmp_path / "a", config=config, decode=lambda ids: " ".join(map(str, ids)))
    trajectories = read_trajectories(tmp_path / "a")
    assert {t.domain for t in trajectories if t.reward is None} == {"code", "chat"}
    assert all(t.reward is not None for t in trajectories if t.domain == "math")
    assert any(t.reward for t in trajectories)
    assert summary["reward_failures"] == summary["rewards_missing"] == 12
    assert len(summary["reward_errors"]) == 5
    assert any("KeyError: 'no unit test'" in message for message in summary["reward_errors"])
    fakes.run(tmp_path / "b", config=fakes.with_config(reward=f"{rewards}:words"))
    assert all(t.reward is None for t in read_trajectories(tmp_path / "b"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("length", 'expected "module:function"'),
        (":length", 'expected "module:function"'),
        ("os:", 'expected "module:function"'),
        ("os:not-a-name", 'expected "module:function"'),
        ("no_such_module_here:f", "ModuleNotFoundError"),
        ("no/such/file.py:f", "FileNotFoundError"),
        ("{rewards}:missing", "nothing of that name"),
        ("{rewards}:constant", "found a int"),
    ],
)
def test_rewards_that_cannot_be_loaded(fakes, tmp_path, rewards, name, message):
    with pytest.raises(DsparkError, match=message):
        fakes.run(tmp_path / "a", config=fakes.with_config(reward=name.format(rewards=rewards)))
    assert not (tmp_path / "a").exists()


def test_reward_module_that_fails_at_import(fakes, tmp_path):
    (tmp_path / "bad.py").write_text("1 / 0")
    with pytest.raises(DsparkError, match="ZeroDivisionError"):
        fakes.run(tmp_path / "a", config=fakes.with_config(reward=f"{tmp_path}/bad.py:f"))


def test_recipe_is_every_field_of_the_config():
    recipe = yaml.safe_load((Path(__file__).parents[2] / "recipes" / "rollout.yaml").read_text())
    config = RolloutConfig.from_dict(recipe)
    assert set(recipe) == set(config.as_dict())
    assert config.params((2,)).stop_ids == (2,)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temprature": 1.0}, "Did you mean 'temperature'"),
        ({"xyzzy": 1}, "Known: target, drafter"),
        ({"limit": -1}, "limit"),
        ({"skip": -1}, "skip"),
        ({"limit": True}, "limit"),
        ({"limit": 1.5}, "limit"),
        ({"temperature": "1e-3"}, "temperature to be float, but got '1e-3'"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"samples_per_prompt": 0}, "samples_per_prompt"),
        ({"verifier": "maybe"}, "verifier"),
        ({"verifier": "greedy", "temperature": 0.5}, "temperature > 0"),
        ({"stop_ids": 2}, "stop_ids"),
        ({"stop_ids": ["</s>"]}, "stop_ids"),
        ({"run_seed": 2**63}, "run_seed"),
        ({"gamma": -1}, "gamma"),
    ],
)
def test_config_errors(values, message):
    with pytest.raises(DsparkError, match=message):
        RolloutConfig.from_dict(values)
