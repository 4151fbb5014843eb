"""What the tests of this room share: a random target, trajectory directories, modules and trainers."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from lightning.pytorch import Trainer

from dspark.target.decoder import Target
from dspark.target.families import read_config
from dspark.target.weights import random_weights
from dspark.training.drafter_module import DrafterModule
from dspark.training.options import DrafterOptions, FeatureOptions, InitOptions, LossOptions, OptimizerOptions

VOCAB = 29
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 128,
}


def make_target(dtype: torch.dtype = torch.float32) -> Target:
    config = read_config(CONFIG)
    return Target(config, random_weights(config, 1, dtype, scale=0.35), eos_ids=(3,))


def make_rows(count: int, seed: int = 0, prompt: int = 4) -> list[dict[str, Any]]:
    """`count` trajectories of 6 to 17 response tokens; the response follows a cycle, so there is much to learn."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for i in range(count):
        length = 6 + int(torch.randint(0, 12, (1,), generator=generator))
        start = int(torch.randint(5, 20, (1,), generator=generator))
        response = [5 + (start + 3 * k) % 20 for k in range(length)]
        ids = torch.randint(5, 25, (prompt,), generator=generator).tolist()
        domain = ("math", "code")[i % 2]
        rows.append({"trajectory_id": f"t{seed}-{i:03d}", "prompt_id": f"p{i}", "domain": domain, "prompt_ids": ids,
                     "response_ids": response, "sampling": json.dumps({"stop_ids": [3]})})  # fmt: skip
    return rows


def make_rounds(rows: list[dict[str, Any]], slots: int = 3) -> list[dict[str, Any]]:
    """Rounds whose drafts are the true continuation up to a pseudo-random slot and wrong there."""
    found = []
    for row in rows:
        ids, anchor, number = row["prompt_ids"] + row["response_ids"], len(row["prompt_ids"]), 0
        while anchor + slots < len(ids):
            accepted = (anchor * 7 + len(ids)) % (slots + 1)
            drafted = ids[anchor + 1 : anchor + 1 + slots]
            if accepted < slots:
                drafted[accepted] = 4  # never in a response
            found.append({"trajectory_id": row["trajectory_id"], "round": number, "anchor": anchor, "drafted": drafted,
                          "verified": slots, "accepted": accepted})  # fmt: skip
            anchor, number = anchor + accepted + 1, number + 1
    return found


def write_directory(path: Path, count: int = 12, seed: int = 0, rows: list[dict[str, Any]] | None = None) -> Path:
    """A finished trajectory directory: one shard, its rounds, a manifest with hashes."""
    path.mkdir(parents=True)
    rows = make_rows(count, seed) if rows is None else rows
    kinds = {"trajectories": rows, "rounds": make_rounds(rows)}
    entry: dict[str, Any] = {"index": 0}
    for kind, content in kinds.items():
        file = path / f"{kind}-00000.parquet"
        pq.write_table(pa.Table.from_pylist(content), file)
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        entry[kind] = {"file": file.name, "sha256": digest, "rows": len(content)}
    (path / "manifest.json").write_text(json.dumps({"state": "complete", "shards": [entry]}))
    return path


def make_module(
    total_steps: int = 8,
    lr: float = 3e-3,
    losses: dict[str, Any] | None = None,
    regression: int = 0,
    fresh: float = 1.0,
    features: dict[str, Any] | None = None,
    share: float = 0.05,
    **shape: Any,
) -> DrafterModule:
    settings = {"mask_token_id": 28, "target_layer_ids": [0, 2], "block_size": 3, "num_layers": 1, "markov_rank": 4}
    optimizer = OptimizerOptions(lr=lr, warmup_steps=2, total_steps=total_steps, fresh_lr_ratio=fresh)
    init = InitOptions(from_target=False, regression=regression)
    options = DrafterOptions(**{**settings, **shape}), LossOptions(**(losses or {})), optimizer, init
    return DrafterModule(
        "tiny", *options, "float32", max_skipped_share=share, features=FeatureOptions(**(features or {}))
    )


def make_trainer(tmp_path: Path, max_steps: int, **options: Any) -> Trainer:
    settings = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "log_every_n_steps": 1,
                "enable_model_summary": False, "accelerator": "cpu", "devices": 1, "gradient_clip_val": 1.0,
                "num_sanity_val_steps": 0, "default_root_dir": tmp_path, "max_steps": max_steps}  # fmt: skip
    return Trainer(**{**settings, **options})
