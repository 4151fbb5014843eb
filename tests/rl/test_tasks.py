"""The tasks that ship: rewards, files, and a tiny policy that learns one from nothing, as its recipe says."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from dspark import cli
from dspark.rl.tasks import right_sum, same_digits
from dspark.rollouts.rewards import RewardInput

ROOT = Path(__file__).resolve().parents[2]
LAST = 20


def sample(asked: str, text: str, stopped: bool = True) -> RewardInput:
    messages = ({"role": "system", "content": "1 2 3"}, {"role": "user", "content": asked})
    return RewardInput("p", "", messages, (1,), (2,), text, "stop" if stopped else "length")


@pytest.mark.parametrize(
    ("text", "stopped", "reward"),
    [("123", True, 1.0), ("123", False, 0.75), ("129", True, 0.75), ("12", True, 0.5), ("", True, 0.0),
     ("1234", True, 0.75), ("321", True, 0.5)],
)  # fmt: skip
def test_same_digits(text: str, stopped: bool, reward: float) -> None:
    assert same_digits(sample("123", text, stopped)) == reward


@pytest.mark.parametrize(
    ("text", "stopped", "reward"),
    [("12", True, 1.0), ("7 + 5 = 12.", True, 1.0), ("12 is 7 + 5", True, 0.0), ("13", True, 0.0), ("", True, 0.0),
     ("7 + 5 = 12", False, 0.0)],
)  # fmt: skip
def test_right_sum(text: str, stopped: bool, reward: float) -> None:
    assert right_sum(sample("7 + 5 = ?", text, stopped)) == reward


def test_the_files_are_what_the_script_writes(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("make_tasks", ROOT / "data" / "rl" / "make_tasks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.write(tmp_path)
    names = sorted(str(f.relative_to(tmp_path)) for f in tmp_path.rglob("*") if f.is_file())
    assert names == ["digits.jsonl", *(f"digits/{n}.json" for n in ("config", "tokenizer", "tokenizer_config")),
                     "sums.jsonl"]  # fmt: skip
    for name in names:
        assert (tmp_path / name).read_bytes() == (ROOT / "data" / "rl" / name).read_bytes(), name


def test_the_sums_of_the_two_splits_differ() -> None:
    rows = [json.loads(line) for line in (ROOT / "data" / "rl" / "sums.jsonl").read_text().splitlines()]
    asked = {split: {r["messages"][-1]["content"] for r in rows if r["split"] == split} for split in ("train", "test")}
    assert [len(asked[s]) for s in ("train", "test")] == [301, 60]
    assert not asked["train"] & asked["test"]


@pytest.mark.slow
def test_a_tiny_policy_learns_from_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """recipes/rl-digits.yaml, whole: from a reward near chance to more than 0.8, no log-probability off by a bit."""
    monkeypatch.chdir(ROOT)
    places: Any = ["--trainer.default_root_dir", str(tmp_path), "--model.init_args.rollout.out", str(tmp_path / "r"),
                   "--trainer.enable_progress_bar=false", "--trainer.logger=false"]  # fmt: skip
    assert cli.main(["fit", "recipes/rl-digits.yaml", *places]) == 0
    lines = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    rewards = [line["rollout/reward"] for line in lines]
    assert rewards[0] < 0.2
    assert sum(rewards[-LAST:]) / LAST > 0.8
    assert all(line["train/logprob_diff_max"] == 0.0 for line in lines)
    assert (tmp_path / "policy" / "model.safetensors").exists()
