"""The RL bench: what is matched is checked in the run; runs side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dspark.bench import following, rl_step
from dspark.contracts import DsparkError, Request, SamplingParams
from dspark.drafter.config import DrafterConfig
from dspark.drafter.model import Drafter
from dspark.target.decoder import Target
from dspark.target.load import random_target

TASK = Path(__file__).resolve().parents[2] / "data" / "rl" / "digits"


@pytest.fixture
def target() -> Target:
    return random_target(TASK, "float32", 0, 0.2)


def make_drafter(target: Target) -> Drafter:
    config = DrafterConfig.for_target(target, block_size=3, mask_token_id=0, target_layer_ids=(0, 1), num_layers=1,
                                      sample_from_anchor=True, markov_rank=4)  # fmt: skip
    return Drafter(config, seed=1).bind(target.embed_weight, target.head_weight).eval()


def requests() -> list[Request]:
    return [Request((3, 6 + i // 4, 7, 4), SamplingParams(max_tokens=8, seq_seed=i)) for i in range(12)]


def test_all_sides_with_what_must_match_matching(target: Target) -> None:
    found = rl_step.bench_rl(target, make_drafter(target), requests(), 6, repeats=2)
    assert list(found) == ["matching", "whole prompts", "plain", "speculative"]
    assert all(found[name].differs == 0.0 for name in ("matching", "whole prompts", "speculative"))
    assert found["plain"].ratio == (1.0, 1.0, 1.0)
    assert found["speculative"].tau > 1.0
    assert found["matching"].tau == 1.0
    assert all(min(one.rollout) > 0 and min(one.update) > 0 for one in found.values())


def test_a_side_that_does_not_match_is_an_error(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    def off(self: Any, sequences: Any) -> Any:
        logprobs, raw = type(self).logprobs_before(self, sequences)
        return logprobs + 1e-6, raw

    from dspark.rl.policy import Policy

    monkeypatch.setattr(Policy, "logprobs_before", Policy.logprobs, raising=False)
    monkeypatch.setattr(Policy, "logprobs", off)
    with pytest.raises(DsparkError, match="the step 'matching' to match bit for bit, but"):
        rl_step.bench_rl(target, None, requests(), 6, repeats=1)


def history(folder: Path, tau: list[float], reward: float = 0.5) -> str:
    folder.mkdir()
    lines = [{"rollout": i, "rollout/tau": t, "rollout/ece": None, "rollout/reward": reward, "policy": f"{i} {reward}"}
             for i, t in enumerate(tau)]  # fmt: skip
    (folder / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(folder)


def test_runs_side_by_side(tmp_path: Path) -> None:
    runs = {"frozen": following.read_history(history(tmp_path / "a", [1.5] * 12)),
            "following": following.read_history(history(tmp_path / "b", [1.5, *[2.0] * 14]))}  # fmt: skip
    assert following.same_policy(runs)
    assert "1.50 -> 1.50" in following.table(runs)[1]
    assert "1.95 -> 2.00" in following.table(runs)[2]
    assert len(following.figure(runs).axes) == 3
    other = {**runs, "c": following.read_history(history(tmp_path / "c", [1.0], reward=0.25))}
    assert not following.same_policy(other)


@pytest.mark.parametrize("text", ["", "{}\n", "nonsense\n", None])
def test_no_history(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "history.jsonl").write_text(text)
    with pytest.raises(DsparkError, match="expected the history of an RL run"):
        following.read_history(tmp_path)
