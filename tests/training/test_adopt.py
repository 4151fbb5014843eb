"""A checkpoint of another shape: an evaluation takes it as it is, a fit says what the recipe lacks."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.contracts import DsparkError
from dspark.training.checkpoint import CHECKPOINT_KEY
from dspark.training.confidence_module import ConfidenceModule
from dspark.training.data import RoundsDataModule, TrajectoryDataModule

OTHER = {"block_size": 2, "markov_rank": 6, "draft_vocab_size": 20, "target_layer_ids": [1], "num_layers": 2}


@pytest.fixture
def made(tiny: Any, target: Any, data_dir: Path, tmp_path: Path) -> Path:
    trainer = tiny.make_trainer(tmp_path, 2, limit_val_batches=0)
    trainer.fit(tiny.make_module(**OTHER), TrajectoryDataModule([str(data_dir)], token_budget=60))
    trainer.save_checkpoint(tmp_path / "other.ckpt")
    return tmp_path / "other.ckpt"


def looked_at(tiny: Any, data_dir: Path, root: Path, verb: str, path: Path, **module: Any) -> tuple[Any, Any]:
    paths = [str(data_dir)]
    data, one = TrajectoryDataModule(paths, paths, paths, token_budget=60), tiny.make_module(**module)
    trainer = tiny.make_trainer(root, 1)
    figures = getattr(trainer, verb)(one, data, ckpt_path=path, weights_only=True, verbose=False)
    return one, figures[0]


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("verb", ["validate", "test"])
def test_an_evaluation_takes_the_checkpoints_shape(
    tiny: Any, data_dir: Path, tmp_path: Path, made: Path, verb: str, cached: bool
) -> None:
    features = {"features": {"cache": str(tmp_path / "cache")}} if cached else {}
    one, figures = looked_at(tiny, data_dir, tmp_path, verb, made, **features)
    _, wanted = looked_at(tiny, data_dir, tmp_path, verb, made, **OTHER)
    saved = torch.load(made, weights_only=True)
    assert one.config.to_dict() == saved[CHECKPOINT_KEY]
    for name, tensor in one.state_dict().items():
        if name.startswith("drafter."):
            assert torch.equal(tensor, saved["state_dict"][name]), name
    assert figures == wanted
    assert sum("acceptance" in name for name in figures) == 2


def test_the_recipes_candidates_still_hold(tiny: Any, data_dir: Path, tmp_path: Path, made: Path) -> None:
    one, _ = looked_at(tiny, data_dir, tmp_path, "validate", made, candidates=3)
    assert (one.config.candidates, one.config.block_size) == (3, 2)
    with pytest.raises(DsparkError, match="up to the 20 columns"):
        looked_at(tiny, data_dir, tmp_path, "validate", made, candidates=25)


def test_a_fit_lists_the_overrides(tiny: Any, data_dir: Path, tmp_path: Path, made: Path) -> None:
    data = TrajectoryDataModule([str(data_dir)], token_budget=60)
    with pytest.raises(DsparkError) as caught:
        tiny.make_trainer(tmp_path, 4).fit(tiny.make_module(), data, ckpt_path=made, weights_only=True)
    words = shlex.split(str(caught.value))  # as a shell would take what is told
    for name, value in OTHER.items():
        assert any(word.rstrip(",") == f"--model.init_args.drafter.{name}={json.dumps(value)}" for word in words), name


def test_an_evaluation_says_in_what_it_is_not_the_recipes(
    tiny: Any, data_dir: Path, tmp_path: Path, made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    looked_at(tiny, data_dir, tmp_path, "validate", made)
    said = capsys.readouterr().err
    assert "the checkpoint's draft model, not the recipe's" in said
    assert all(f"{name}: saved " in said for name in OTHER)
    looked_at(tiny, data_dir, tmp_path, "validate", made, **OTHER)
    assert "not the recipe's" not in capsys.readouterr().err


def test_a_checkpoint_of_another_target_is_no_shape(
    tiny: Any, target: Any, data_dir: Path, tmp_path: Path, made: Path
) -> None:
    target.__dict__["_fingerprint"] = "f" * 64
    for shape in ({}, OTHER):
        with pytest.raises(DsparkError, match="for another: target_fingerprint"):
            looked_at(tiny, data_dir, tmp_path, "validate", made, **shape)


def test_the_confidence_module_does_as_well(tiny: Any, target: Any, data_dir: Path, tmp_path: Path, made: Path) -> None:
    paths = [str(data_dir)]
    data = RoundsDataModule(paths, paths, paths, paths, token_budget=60)
    rest = {"block_size": 4, "num_layers": 1}
    trainer = tiny.make_trainer(tmp_path, 1, limit_val_batches=0)
    trainer.fit(tiny.make_module(**rest), TrajectoryDataModule(paths, token_budget=60))
    trainer.save_checkpoint(tmp_path / "mine.ckpt")

    def module(source: Path) -> ConfidenceModule:
        return ConfidenceModule("tiny", str(source), target_dtype="float32")

    fitted = tiny.make_trainer(tmp_path, 2, limit_val_batches=0)
    fitted.fit(module(tmp_path / "mine.ckpt"), data)
    fitted.save_checkpoint(tmp_path / "head.ckpt")
    narrow = tiny.make_module(block_size=3, num_layers=2)
    again = tiny.make_trainer(tmp_path, 1, limit_val_batches=0)
    again.fit(narrow, TrajectoryDataModule(paths, token_budget=60))
    again.save_checkpoint(tmp_path / "narrow.ckpt")
    figures = []
    for source in ("mine.ckpt", "narrow.ckpt"):
        judged = module(tmp_path / source)
        tester = tiny.make_trainer(tmp_path, 1)
        tester.test(judged, data, ckpt_path=tmp_path / "head.ckpt", weights_only=True, verbose=False)
        figures.append(judged.streamed)
    assert str(figures[0]) == str(figures[1])  # as text: a NaN is not equal to itself
    assert sum(name.startswith("test/survival/ece/slot_") for name in figures[0]) == 4
    with pytest.raises(DsparkError, match=r"narrow\.ckpt is another"):
        tiny.make_trainer(tmp_path, 4).fit(
            module(tmp_path / "narrow.ckpt"), data, ckpt_path=tmp_path / "head.ckpt", weights_only=True
        )
