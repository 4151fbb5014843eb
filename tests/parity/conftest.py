"""Cases of the numeric oracle: folders of checkpoints and tensors written by the reference implementation."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dspark.drafter.blocks import Blocks, blocks_at
from dspark.drafter.model import Drafter
from dspark.export.deepspec import read_deepspec
from dspark.target.load import load_target

ORACLE = Path(os.environ.get("DSPARK_ORACLE", Path(__file__).parents[3] / "shared" / "oracle"))


@dataclass(frozen=True)
class Case:
    """One draft case: its folder, meta.json and the tensors of train.safetensors (integers as int64)."""

    path: Path
    meta: dict[str, Any]
    train: dict[str, torch.Tensor]

    @property
    def keep(self) -> torch.Tensor:
        return self.train["block_keep_mask"].bool()

    def drafter(self) -> Drafter:
        config, state, embed, head = read_deepspec(self.path / "draft")
        drafter = Drafter(config)
        drafter.load_state_dict(state, strict=True)
        return drafter.bind(embed, head)

    @property
    def target_path(self) -> Path:
        return ORACLE / Path(self.meta["target"]).name

    def target(self):
        return load_target(str(self.target_path), "float32")

    def features(self, layer_ids: tuple[int, ...]) -> torch.Tensor:
        """Features [2*96, n*H] of the packed rows: the recorded ones, or the target's where there are none."""
        if "target_hidden_states" in self.train:
            return self.train["target_hidden_states"].flatten(0, 1)
        return self.target().forward_sequences(list(self.train["input_ids"]), layer_ids)[1]

    def blocks(self, size: int) -> Blocks:
        """The kept blocks of both rows."""
        ids, anchors = self.train["input_ids"], self.train["anchor_positions"]
        rows = torch.arange(len(ids))[:, None].expand_as(anchors)[self.keep]
        offsets = torch.arange(len(ids) + 1) * ids.shape[1]
        return blocks_at(ids.flatten(), offsets, rows, anchors[self.keep], size)


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    return {
        k: v if v.is_floating_point() else v.long() if v.dtype == torch.int32 else v for k, v in load_file(path).items()
    }


def names() -> list[str]:
    return sorted(p.parent.name for p in ORACLE.glob("*/train.safetensors")) if ORACLE.is_dir() else []


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        none = [pytest.param(None, marks=pytest.mark.skip(reason=f"no oracle cases in {ORACLE}; set DSPARK_ORACLE"))]
        metafunc.parametrize("case", names() or none, indirect=True)


@pytest.fixture
def case(request: pytest.FixtureRequest) -> Case:
    path = ORACLE / request.param
    return Case(path, json.loads((path / "meta.json").read_text()), load_tensors(path / "train.safetensors"))


@pytest.fixture
def decode(case: Case) -> dict[str, torch.Tensor]:
    if not (case.path / "decode.safetensors").exists():
        pytest.skip("this case has no decoding runs")
    return load_tensors(case.path / "decode.safetensors")
