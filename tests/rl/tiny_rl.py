"""Whole RL runs on the digits task, in this process or, as a script, in one of its own that a test may kill.

python tests/rl/tiny_rl.py '{"root": "...", "steps": 6, ...}'      the arguments of `run`
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer

from dspark.drafter.config import DrafterConfig
from dspark.drafter.model import Drafter
from dspark.export.bundle import save_bundle
from dspark.files import sha256_json, tensor_hash
from dspark.rl.policy_module import PolicyModule
from dspark.rl.tasks import same_digits
from dspark.rollouts.config import RolloutConfig
from dspark.rollouts.rewards import RewardInput
from dspark.target.decoder import Target
from dspark.target.load import random_target
from dspark.training.callbacks import LastCheckpoint
from dspark.training.checkpoint_io import AtomicCheckpointIO

TASK = Path(__file__).resolve().parents[2] / "data" / "rl"
SCALE = 0.1


calls = 0


def same_digits_or_death(sample: RewardInput) -> float:
    """The task's reward; the call that the environment names is the process' last."""
    global calls  # noqa: PLW0603
    calls += 1
    if calls == int(os.environ.get("DIE_AT", "0")):
        os.kill(os.getpid(), signal.SIGKILL)
    return same_digits(sample)


class KillAfter(Callback):
    """SIGKILL to this very process after `steps` steps."""

    def __init__(self, steps: int):
        self.steps = steps

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.steps:
            os.kill(os.getpid(), signal.SIGKILL)


def start(dtype: str = "float32", seed: int = 0) -> Target:
    return random_target(TASK / "digits", dtype, seed, SCALE)


def make_drafter(folder: Path, dtype: str = "float32", draft_ids: list[int] | None = None, **fields: Any) -> str:
    """A random draft model for the random start; some of its tokens are accepted by chance."""
    target = start(dtype)
    shape = {"block_size": 3, "mask_token_id": 0, "target_layer_ids": (0, 1), "num_layers": 1, "markov_rank": 4}
    shape |= {"sample_from_anchor": True, "confidence_head": True, "confidence_with_markov": True} | fields
    ids = torch.tensor(draft_ids) if draft_ids else None
    config = DrafterConfig.for_target(target, **shape, draft_vocab_size=len(draft_ids or ()))
    save_bundle(folder, Drafter(config, ids, seed=3).to(target.dtype), {"dtype": dtype})
    return str(folder)


def run(
    root: str | Path, steps: int, ckpt: str | None = None, kill: int = 0, rollout: dict[str, Any] | None = None,
    save_every: int = 2, strategy: str = "auto", devices: int = 1, callbacks: tuple[Callback, ...] = (), **options: Any,
) -> PolicyModule:  # fmt: skip
    """`steps` updates in `root`. rollout: of RolloutConfig; options: of PolicyModule."""
    root = Path(root)
    settings: dict[str, Any] = {
        "target": str(TASK / "digits"), "dtype": "float32", "prompts": str(TASK / "digits.jsonl"), "limit": 20,
        "samples_per_prompt": 4, "max_tokens": 8, "stop_ids": (2,), "reward": "dspark.rl.tasks:same_digits",
        "out": str(root / "rollouts"), "batch_size": 8,
    }  # fmt: skip
    options = {"prompts_per_rollout": 3, "random_weights": SCALE, "optimizer": {"lr": 0.01}, **options}
    module = PolicyModule(RolloutConfig(**(settings | (rollout or {}))), **options)
    ends = [KillAfter(kill)] if kill else []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(
            default_root_dir=root, max_steps=steps, accelerator="cpu", devices=devices, strategy=strategy, logger=False,
            enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
            callbacks=[LastCheckpoint(every_n_train_steps=save_every), *ends, *callbacks],
            plugins=[AtomicCheckpointIO()],
        )  # fmt: skip
        trainer.fit(module, ckpt_path=ckpt, weights_only=True)
    return module


def weights_hash(module: PolicyModule) -> str:
    return sha256_json({name: tensor_hash(p) for name, p in module.policy.named_parameters()})


def shard_hashes(root: str | Path) -> dict[str, str]:
    """sha256 of every trajectory shard of a run, by rollout and name."""
    files = sorted(Path(root).glob("rollouts/[0-9]*/trajectories-*.parquet"))
    return {f"{f.parent.name}/{f.name}": hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def history(root: str | Path) -> list[dict[str, Any]]:
    """Without the seconds."""
    lines = [json.loads(line) for line in (Path(root) / "history.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith("seconds/")} for line in lines]


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(**json.loads(sys.argv[1]))
