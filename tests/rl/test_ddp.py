"""Two processes: each rolls out prompts of its own, gradients are averaged, and both end with the same weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


def two_processes(tiny_rl: Any, root: Path, **given: Any) -> None:
    arguments = {"root": str(root), "steps": 4, "strategy": "ddp", "devices": 2, **given}
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, tiny_rl.__file__, json.dumps(arguments)], check=False, capture_output=True, text=True,
        env=environment, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


def weights(root: Path) -> dict[str, torch.Tensor]:
    return torch.load(root / "last.ckpt", weights_only=True)["state_dict"]


def given(tiny_rl: Any, tmp_path: Path, dtype: str) -> dict[str, Any]:
    drafter = tiny_rl.make_drafter(tmp_path / "drafter", dtype)
    return {"rollout": {"drafter": drafter, "dtype": dtype}, "follow": {"steps": 2}, "token_budget": 60}


def same(tiny_rl: Any, a: Path, b: Path) -> None:
    """7 rollouts, for of the 7 groups of an epoch's prompts the second rank gets three; then its fourth is empty."""
    assert len(tiny_rl.shard_hashes(a)) == 7
    assert tiny_rl.shard_hashes(a) == tiny_rl.shard_hashes(b)
    assert all(torch.equal(w, weights(b)[n]) for n, w in weights(a).items())


def test_made_again_in_bf16(tiny_rl: Any, tmp_path: Path) -> None:
    for name in "ab":
        two_processes(tiny_rl, tmp_path / name, **given(tiny_rl, tmp_path, "bfloat16"))
    same(tiny_rl, tmp_path / "a", tmp_path / "b")


def test_resumed_in_the_middle(tiny_rl: Any, tmp_path: Path) -> None:
    options = given(tiny_rl, tmp_path, "float32")
    two_processes(tiny_rl, tmp_path / "whole", **options)
    two_processes(tiny_rl, tmp_path / "cut", **options | {"steps": 2})
    two_processes(tiny_rl, tmp_path / "cut", **options, ckpt=str(tmp_path / "cut" / "last.ckpt"))
    same(tiny_rl, tmp_path / "whole", tmp_path / "cut")


def test_two_ranks_are_one_run_with_twice_the_prompts(tiny_rl: Any, tmp_path: Path) -> None:
    """The first step of 2 x 3 prompts, against one process that answers the same six: the same gradient, though rewards
    are missing, more of them on one rank; and the same figures."""
    given: dict[str, Any] = {"max_failed_share": 1.0, "save_every": 1}
    given["rollout"] = {"limit": 6, "reward": f"{Path(__file__).with_name('test_refusals.py')}:sometimes"}
    two_processes(tiny_rl, tmp_path / "two", steps=1, **given)
    one = tiny_rl.run(tmp_path / "one", 1, prompts_per_rollout=6, **given)
    both = [tiny_rl.history(tmp_path / name)[0] for name in ("two", "one")]
    for name in ("reward", "rewards_missing", "groups_that_differ", "tokens", "stopped"):
        assert both[0][f"rollout/{name}"] == pytest.approx(both[1][f"rollout/{name}"]), name
    assert both[1]["rollout/rewards_missing"] > 0
    saved = torch.load(tmp_path / "two" / "last.ckpt", weights_only=True)["optimizer_states"][0]["state"]
    moments = one.trainer.optimizers[0].state_dict()["state"]  # the first is a tenth of the gradient
    for number, state in moments.items():
        ours = saved[number]["exp_avg"]
        assert float((ours - state["exp_avg"]).norm()) <= 1e-5 * float(ours.norm()), number  # in another order
        assert float(ours.norm()) > 0


def fails_on_one_rank(sample: Any) -> float:
    """On the second process, whose environment Lightning numbers."""
    if os.environ.get("LOCAL_RANK") == "1":
        raise ConnectionError("no judge")
    return float(len(sample.response_ids) % 2)


def test_an_error_on_one_rank_ends_both(tiny_rl: Any, tmp_path: Path) -> None:
    """And the other one says so, instead of waiting for what will not come."""
    arguments = {"root": str(tmp_path), "steps": 4, "strategy": "ddp", "devices": 2}
    arguments["rollout"] = {"reward": f"{__file__}:fails_on_one_rank"}
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, tiny_rl.__file__, json.dumps(arguments)], check=False, capture_output=True, text=True,
        env=environment, timeout=120,
    )  # fmt: skip
    assert done.returncode != 0
    assert "another one stopped" in done.stderr
    assert "ConnectionError: no judge" in done.stderr
