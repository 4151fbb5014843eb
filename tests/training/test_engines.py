"""recipes/engines.yaml over recipes/drafter.yaml: for a target like Llama, a draft model for other engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dspark import cli
from dspark.commands.export import export
from dspark.contracts import Request, SamplingParams
from dspark.export.bundle import load_bundle
from dspark.export.formats import load_draft
from dspark.runner import Engine, EngineOptions
from dspark.target.load import load_target
from dspark.target.weights import plan, random_weights

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
OVERLAY = [str(RECIPES / "drafter.yaml"), "--config", str(RECIPES / "engines.yaml")]


@pytest.fixture
def command(tmp_path: Path, tiny: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The recipe's command line, cut down to a tiny target and a handful of rows in the current folder."""
    monkeypatch.chdir(tmp_path)
    target, tensors = tiny.make_target(), {}
    weights = random_weights(target.config, 1, torch.float32, scale=0.35)
    for name, parts in plan(target.config).items():
        pieces = weights[name].split([shape[0] for _, shape in parts])
        tensors |= {part: piece.clone() for (part, _), piece in zip(parts, pieces, strict=True)}
    Path("target").mkdir()
    save_file(tensors, "target/model.safetensors")
    Path("target/config.json").write_text(json.dumps({**tiny.CONFIG, "eos_token_id": 3}))
    tiny.write_directory(tmp_path / "rows")
    options = {
        "model.init_args": {
            "target": "target", "target_dtype": "float32", "drafter.mask_token_id": 28, "drafter.markov_rank": 4,
            "drafter.target_layer_ids": "[0, 2]", "drafter.block_size": 3,
        },
        "data.init_args": {"train": "[rows]", "val": "[]", "train_prompts": 0},
        "trainer": {"max_steps": 4, "logger": "false", "limit_val_batches": 0, "val_check_interval": "null",
                    "callbacks": "[{class_path: dspark.training.callbacks.LastCheckpoint}]"},
    }  # fmt: skip
    return [*OVERLAY, *(f"--{at}.{name}={value}" for at, more in options.items() for name, value in more.items())]


def responses(drafter: Any, target: Any) -> list[tuple[Any, Any]]:
    drafter = drafter.to(target.dtype).bind(target.embed_weight, target.head_weight).eval()
    prompts = [(5, 8, 11), (7, 9), (20,)]
    requests = [Request(ids, SamplingParams(temperature=0.7, max_tokens=12, seq_seed=9)) for ids in prompts]
    done = Engine(target, drafter, EngineOptions("coupled")).generate(requests)
    rounds = [r for completion in done for r in completion.rounds]
    assert sum(r.verified for r in rounds) > sum(r.accepted for r in rounds) > 0
    return [(completion.token_ids, completion.rounds) for completion in done]


@pytest.mark.parametrize(("kind", "columns"), [("deepspec", 0), ("speculators", 12)])
def test_what_it_trains_goes_out_and_comes_back(command: list[str], kind: str, columns: int) -> None:
    assert cli.main(["fit", *command, f"--model.init_args.drafter.draft_vocab_size={columns}"]) == 0
    checkpoint, target = "runs/engines/drafter/last.ckpt", load_target("target", "float32")
    trained = load_draft(checkpoint, target).drafter
    assert trained.config.qk_norm
    assert not target.config.qk_norm
    export(checkpoint, "target", "float32", "theirs", kind=kind)
    export("theirs", "target", "float32", "ours")
    expected = responses(trained, target)
    assert responses(load_draft("theirs", target).drafter, target) == expected
    assert responses(load_bundle("ours").drafter, target) == expected


def test_the_test_reads_what_the_overlay_trains(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["test", *command]) == 2
    assert "runs/engines/drafter/last.ckpt: expected a checkpoint" in capsys.readouterr().err


def test_a_doubled_key_inside_the_overlay_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.yaml").write_text("model:\n  init_args:\n    seed: 1\n    seed: 2\n")
    assert cli.main(["fit", *OVERLAY, "--config", str(tmp_path / "mine.yaml"), "--print_config"]) == 2
    assert "mine.yaml:4: expected each key once, but model.init_args.seed" in capsys.readouterr().err
