"""A draft model with a sliding window accepts as much in the runner as its trainer measured, however deep the context.

Trained with a window and served without one (or with another rule for it), acceptance collapses once the context is
longer than the window, with no error. So: prompts of half a window, one and four, and per prompt the accepted drafts of
the runner's first round against the trainer's own forward pass, in train mode, over the same tokens.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.contracts import Request, SamplingParams
from dspark.drafter.model import Drafter
from dspark.runner import Engine, EngineOptions
from dspark.target.decoder import Target
from dspark.training.data import TrajectoryDataModule

WINDOW, SLOTS, PROMPTS = 8, 3, 40
DEPTHS = (WINDOW // 2, WINDOW, 4 * WINDOW)
KINDS = {"dspark": {}, "mtp": {"architecture": "mtp", "num_layers": SLOTS}}


def generate(target: Target, prompts: list[list[int]], drafter: Drafter | None = None) -> list[Any]:
    """Greedy answers just long enough for one whole round."""
    params = SamplingParams(temperature=0.0, max_tokens=SLOTS + 2)
    return Engine(target, drafter, EngineOptions("greedy")).generate([Request(tuple(p), params) for p in prompts])


def write(tiny: Any, target: Target, path: Path, depth: int) -> Path:
    """Trajectories: random prompts of that length, and the target's answers."""
    generator = torch.Generator().manual_seed(depth)
    prompts = torch.randint(5, 25, (PROMPTS, depth), generator=generator).tolist()
    answers = [list(done.token_ids) for done in generate(target, prompts)]
    rows = tiny.make_rows(PROMPTS)
    pairs = [{"prompt_ids": p, "response_ids": a} for p, a in zip(prompts, answers, strict=True)]
    return tiny.write_directory(path, rows=[row | pair for row, pair in zip(rows, pairs, strict=True)])


def by_trainer(module: Any, path: Path) -> dict[tuple[int, ...], int]:
    """Per sequence, the leading slots of its first block where draft and target agree, by the training step's pass."""
    data, found = TrajectoryDataModule([str(path)], token_budget=400), {}
    data.setup("fit")
    module.train()
    for batch in data.train_dataloader():
        judged = module._judge(batch)
        logits = module.drafter.slot_logits(judged.states.hidden, judged.states.phi)
        agree = logits.argmax(-1) == judged.law.argmax[judged.index]
        first = torch.tensor([int((batch.sequence == i).nonzero()[0]) for i in range(len(batch.sample_ids))])
        runs = agree[first].long().cumprod(-1).sum(-1).tolist()
        found |= {tuple(ids.tolist()): run for ids, run in zip(batch.sequences(), runs, strict=True)}
    return found


def by_runner(target: Target, drafter: Drafter, sequences: list[tuple[int, ...]], depth: int) -> list[int]:
    return [done.rounds[0].accepted for done in generate(target, [list(s[:depth]) for s in sequences], drafter)]


@pytest.mark.parametrize("kind", KINDS)
def test_acceptance_at_every_depth_is_the_trainers(tiny: Any, target: Target, tmp_path: Path, kind: str) -> None:
    paths = {depth: write(tiny, target, tmp_path / str(depth), depth) for depth in DEPTHS}
    module = tiny.make_module(total_steps=60, lr=1e-2, sliding_window=WINDOW, **KINDS[kind])
    trainer = tiny.make_trainer(tmp_path, 60, limit_val_batches=0, log_every_n_steps=60)
    trainer.fit(module, TrajectoryDataModule([str(p) for p in paths.values()], token_budget=400))
    wide = Drafter(replace(module.config, sliding_window=0)).bind(target.embed_weight, target.head_weight).eval()
    wide.load_state_dict(module.drafter.state_dict())
    for depth, path in paths.items():
        trained = by_trainer(module, path)
        served = by_runner(target, module.drafter.eval(), list(trained), depth)
        assert served == list(trained.values())
        assert 0 < sum(served) < SLOTS * PROMPTS, f"inconclusive at depth {depth}"
        without = by_runner(target, wide, list(trained), depth)
        assert (without == served) == (depth <= WINDOW)  # a window that is lost shows, once it is too short
