"""The real runner behind the store: batch, draft model and interruption leave no trace; replay and trainer agree."""

from __future__ import annotations

import pytest
import torch

from dspark.rollouts.replay import replay
from dspark.rollouts.store import read_rounds, verify_hashes
from dspark.runner import Engine, EngineOptions

DTYPES = [torch.float32, torch.bfloat16]


def trajectory_files(fakes, folder):
    return {name: data for name, data in fakes.contents(folder).items() if name.startswith("trajectories")}


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", [{}, {"architecture": "mtp", "num_layers": 4}], ids=["dspark", "mtp"])
def test_rollouts_replay_bit_for_bit(fakes, models, tmp_path, dtype, kind):
    target = models.make_target(dtype)
    drafter = models.make_drafter(target, **kind)
    facts = fakes.facts(target=target.fingerprint, dtype=str(dtype))
    config = fakes.with_config(max_tokens=12, top_p=0.95)
    prompts = [p for p in fakes.make_prompts() if max(p.prompt_ids) < models.VOCAB]

    def engine(batch, speculate=True):
        return Engine(target, drafter if speculate else None, EngineOptions("coupled", max_batch=batch))

    for name, batch, speculate in (("a", 32, True), ("b", 3, True), ("plain", 5, False)):
        fakes.run(tmp_path / name, engine(batch, speculate), config, prompts, base=facts)
    want = trajectory_files(fakes, tmp_path / "a")
    assert fakes.contents(tmp_path / "b") == fakes.contents(tmp_path / "a")
    assert trajectory_files(fakes, tmp_path / "plain") == want
    rounds = [r for one in read_rounds(tmp_path / "a").values() for r in one]
    assert sum(r.accepted for r in rounds) > 0
    assert sum(r.verified - r.accepted for r in rounds) > 0
    result = replay(tmp_path / "a", engine(2, False), None, 0, {**facts, "drafter": None}, rescore=True)
    assert result.ok, result.first_difference
    assert (result.differing_bits, result.tokens) == (0, verify_hashes(tmp_path / "a")["counts"]["tokens"])


def test_a_changed_weight_is_found(fakes, models, tmp_path):
    target = models.make_target(torch.float32)
    config = fakes.with_config(max_tokens=12)
    fakes.run(tmp_path / "a", Engine(target), config, base=fakes.facts())
    other = models.make_target(torch.float32, seed=3)
    result = replay(tmp_path / "a", Engine(other), 4, 0, fakes.facts())
    assert result.differing_bits > 0
    assert result.first_difference.trajectory_id.startswith("p0")


def test_interrupted_by_the_user(fakes, models, tmp_path):
    target = models.make_target(torch.float32)
    drafter = models.make_drafter(target)
    engine = Engine(target, drafter, EngineOptions("coupled", max_batch=4))
    fakes.run(tmp_path / "whole", engine)

    def interrupt(done, total, tokens):
        if done == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fakes.run(tmp_path / "cut", engine, on_progress=interrupt)
    fakes.run(tmp_path / "cut", engine)
    assert fakes.contents(tmp_path / "cut") == fakes.contents(tmp_path / "whole")
