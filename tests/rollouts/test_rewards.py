"""Rewards: what counts as a number, what is counted as a failure, and what a function of the user's cannot do."""

from __future__ import annotations

import json
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from dspark.contracts import DsparkError
from dspark.rollouts.rewards import NoReward, Scorer, as_number, load_reward
from dspark.rollouts.store import read_trajectories

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "value",
    [2, 2.0, np.float32(2), np.int64(2), np.array(2), np.array(2.0, np.float16), torch.tensor(2), torch.tensor(2.0)],
)
def test_real_numbers(value):
    got = as_number(value)
    assert (type(got), got) == (float, 2.0)


@pytest.mark.parametrize("value", [True, np.True_, torch.tensor(True)])
def test_truth_values(value):
    assert as_number(value) == 1.0


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ("0.5", "returned str"),
        (b"1", "returned bytes"),
        (None, "returned NoneType"),
        ([1.0], "returned list"),
        (np.array([1.0]), "returned ndarray"),
        (np.array("0.5"), "returned str"),
        (torch.tensor([1.0]), "returned Tensor"),
        (1 + 0j, "returned complex"),
        (np.complex64(1), "returned complex"),
        (Decimal("0.5"), "returned Decimal"),
        (Fraction(1, 2), "returned Fraction"),
        (NAN, "not finite"),
        (-INF, "not finite"),
        (np.float32("nan"), "not finite"),
        (torch.tensor(INF), "not finite"),
    ],
)
def test_everything_else_is_none(value, kind):
    with pytest.raises(NoReward) as caught:
        as_number(value)
    assert caught.value.kind == kind


REWARDS = """
import sys

print("loaded")


class Odd(BaseException):
    def __str__(self):
        raise ValueError("not even a message")


def uneven(sample):
    print("scoring", sample.prompt_id)
    number = int(sample.prompt_id[1:])
    if number == 0:
        raise KeyError("no unit test")
    if number == 1:
        sys.exit("enough")
    if number == 2:
        raise Odd
    if number == 3:
        return "0.5"
    return 10**400 if number == 4 else 1


def meddling(sample):
    before = sample.messages[0]["content"]
    sample.messages[0]["content"] = "something else"
    if before == "something else":
        return -1
    try:
        sample.text = "mine"
    except AttributeError:
        return len(before)


def interrupted(sample):
    raise KeyboardInterrupt
"""


@pytest.fixture
def rewards(tmp_path: Path) -> str:
    (tmp_path / "rewards.py").write_text(REWARDS)
    return str(tmp_path / "rewards.py")


def test_failures_are_counted_by_kind_and_the_first_are_told(fakes, tmp_path, rewards, capsys):
    summary = fakes.run(tmp_path / "a", config=fakes.with_config(reward=f"{rewards}:uneven"))
    kinds = {"KeyError": 3, "SystemExit": 3, "Odd": 3, "returned str": 3, "OverflowError": 3}
    assert summary["reward_failures_by_kind"] == kinds
    assert summary["reward_failures"] == summary["rewards_missing"] == 15
    assert len(summary["reward_errors"]) == 5
    assert summary["reward_errors"][0].endswith(": KeyError: 'no unit test'")
    found = {t.prompt_id: t.reward for t in read_trajectories(tmp_path / "a")}
    assert found == {f"p{i:02d}": None for i in range(5)} | {"p05": 1.0}
    json.dumps(summary)
    said = capsys.readouterr()
    assert said.out == ""  # stdout is the summary's
    assert "loaded" in said.err and "scoring p05" in said.err


def test_a_function_gets_an_input_of_its_own(fakes, tmp_path, rewards):
    prompts = fakes.make_prompts()
    summary = fakes.run(tmp_path / "a", config=fakes.with_config(reward=f"{rewards}:meddling"), prompts=prompts)
    assert summary["reward_failures"] == 0
    assert {t.reward for t in read_trajectories(tmp_path / "a")} == {len(prompts[0].messages[0]["content"])}


def test_an_interrupt_ends_the_run(fakes, tmp_path, rewards):
    with pytest.raises(KeyboardInterrupt):
        fakes.run(tmp_path / "a", config=fakes.with_config(reward=f"{rewards}:interrupted"))


def test_rewards_that_fail_do_not_depend_on_the_order_of_finishing(fakes, tmp_path, rewards):
    for name, engine in (("a", fakes.FakeEngine(1)), ("b", fakes.FakeEngine(16, seed=3))):
        fakes.run(tmp_path / name, engine, fakes.with_config(reward=f"{rewards}:uneven"))
    assert fakes.contents(tmp_path / "a") == fakes.contents(tmp_path / "b")


def test_a_module_that_exits_at_import(tmp_path):
    (tmp_path / "bad.py").write_text("raise SystemExit('bye')")
    with pytest.raises(DsparkError, match="SystemExit: bye"):
        load_reward(f"{tmp_path}/bad.py:f")


def test_long_messages_are_cut(fakes):
    scorer = Scorer(lambda sample: "x" * 10_000)
    assert scorer(None, "p-0") is None
    assert len(scorer.errors[0]) < 400
