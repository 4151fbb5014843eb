"""From training to serving: a conversation learnt by heart is drafted whole by the runner.

The response is the target's own greedy one, so every draft of it can be accepted. A tap, position or slot that training
and runner see differently shows as an accepted length below its largest, whatever the loss said.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dspark.contracts import Completion, Request, SamplingParams
from dspark.drafter.model import Drafter
from dspark.runner import Engine, EngineOptions
from dspark.target.decoder import Target
from dspark.training.data import TrajectoryDataModule

PROMPT, LENGTH, SLOTS, STEPS = (10, 24, 9, 13), 24, 4, 70
KINDS = {
    "vanilla": {"markov_head": "vanilla"},
    "gated": {"markov_head": "gated"},
    "rnn": {"markov_head": "rnn"},
    "pair": {"markov_head": "pair"},
    "options": {
        "markov_head": "pair",
        "candidates": 4,
        "convolution": True,
        "layer_fusion": True,
        "num_layers": 2,
        "input_fusion": True,
    },
    "none": {"markov_rank": 0, "confidence_with_markov": False},
    "mtp": {"architecture": "mtp", "num_layers": SLOTS, "markov_rank": 0, "confidence_with_markov": False},
}
CASES = [(kind, True) for kind in KINDS] + [(kind, False) for kind in KINDS if kind != "mtp"]


def answer(target: Target, prompt: tuple[int, ...], length: int, drafter: Drafter | None = None) -> Completion:
    request = Request(prompt, SamplingParams(temperature=0.0, max_tokens=length))
    return Engine(target, drafter, EngineOptions(verifier="greedy")).generate([request])[0]


def accepted(done: Completion) -> list[int]:
    """Accepted drafts of every round but the last, which the end may cut short."""
    return [r.accepted for r in done.rounds[:-1]]


@pytest.mark.parametrize(("kind", "from_anchor"), CASES)
def test_a_conversation_learnt_by_heart_is_drafted_whole(
    tiny: Any, target: Target, tmp_path: Path, kind: str, from_anchor: bool
) -> None:
    plain = answer(target, PROMPT, LENGTH)
    learnt = {"prompt_ids": list(PROMPT), "response_ids": list(plain.token_ids)}
    path = tiny.write_directory(tmp_path / "one", rows=[row | learnt for row in tiny.make_rows(STEPS)])
    shape = {"sample_from_anchor": from_anchor, "block_size": SLOTS if from_anchor else SLOTS + 1, **KINDS[kind]}
    losses = {"ce": 1.0, "l1": 0.0, "decay": 0.0}
    module = tiny.make_module(total_steps=STEPS, lr=2e-2, losses=losses, **shape)
    trainer = tiny.make_trainer(tmp_path, STEPS, limit_val_batches=0, log_every_n_steps=STEPS)
    trainer.fit(module, TrajectoryDataModule([str(path)], token_budget=len(PROMPT) + LENGTH))
    fresh = Drafter(module.config, seed=1).bind(target.embed_weight, target.head_weight).eval()
    assert sum(accepted(answer(target, PROMPT, LENGTH, fresh))) < SLOTS
    done = answer(target, PROMPT, LENGTH, module.drafter.eval())
    assert done.token_ids == plain.token_ids
    assert accepted(done) == [SLOTS] * ((LENGTH - 1) // (SLOTS + 1)), [r.drafted for r in done.rounds]
