"""A sequential draft model (MTP) through everything that trains: least-squares start, steps, checkpoint, confidence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.contracts import DsparkError
from dspark.training.checkpoint import CHECKPOINT_KEY, load_drafter
from dspark.training.confidence_module import ConfidenceModule
from dspark.training.data import RoundsDataModule, TrajectoryDataModule
from dspark.training.options import OptimizerOptions

MTP = {"architecture": "mtp", "num_layers": 3, "markov_rank": 0, "confidence_with_markov": False}


def fit(tiny: Any, module: Any, data_dir: Path, tmp_path: Path, steps: int, **options: Any) -> Any:
    trainer = tiny.make_trainer(tmp_path, steps, log_every_n_steps=1, **options)
    trainer.fit(module, TrajectoryDataModule([str(data_dir)], val=[str(data_dir)], token_budget=60))
    return trainer


@pytest.fixture
def draft(tiny: Any, target: Any, data_dir: Path, tmp_path: Path) -> Path:
    """A checkpoint of three steps."""
    fit(tiny, tiny.make_module(**MTP), data_dir, tmp_path, 3, limit_val_batches=0).save_checkpoint(tmp_path / "d.ckpt")
    return tmp_path / "d.ckpt"


def test_every_parameter_is_trained(tiny: Any, target: Any, data_dir: Path, tmp_path: Path) -> None:
    module = tiny.make_module(**MTP)
    module.setup("fit")
    before = {n: p.detach().clone() for n, p in module.drafter.named_parameters()}
    fit(tiny, module, data_dir, tmp_path, 3, limit_val_batches=0)
    assert not [n for n, p in module.drafter.named_parameters() if torch.equal(p, before[n])]


def test_the_regression_start_is_far_better_than_a_random_one(
    tiny: Any, target: Any, data_dir: Path, tmp_path: Path
) -> None:
    """After one step of no size, in every slot."""
    accepted = {}
    for count in (0, 100):
        module = tiny.make_module(lr=1e-12, regression=count, losses={"label": "greedy"}, **MTP)
        logged = fit(tiny, module, data_dir, tmp_path, 1, val_check_interval=1).callback_metrics
        accepted[count] = [float(logged[f"val/acceptance/slot_{k}"]) for k in (1, 2, 3)]
    assert all(new > old + 0.2 for new, old in zip(accepted[100], accepted[0], strict=True)), accepted


def test_confidence_training_sees_what_the_runner_sees(tiny: Any, target: Any, draft: Path, data_dir: Path) -> None:
    """Hidden states of rounds follow the drafted tokens: the same bits as drafting, and only the head is trained."""
    module = ConfidenceModule("tiny", str(draft), target_dtype="float32", optimizer=OptimizerOptions())
    module.setup("fit")
    drafter, data = module.drafter, RoundsDataModule([str(data_dir)], val=[str(data_dir)], token_budget=60)
    for batch in data.val_dataloader():
        judged = module.eval().judge(batch)
        _, features, _ = target.forward_sequences(batch.sequences(), drafter.config.target_layer_ids)
        begin = batch.offsets[batch.sequence]
        place = (batch.ids[begin + batch.anchors], batch.anchors)
        rows = (drafter.encode(features, batch.positions()), begin, begin + batch.anchors)
        assert torch.equal(judged.logits, drafter.teacher_forced(*place, batch.drafted, *rows).confidence_logits)
        others = drafter.teacher_forced(*place, (batch.drafted + 1) % 29, *rows).confidence_logits
        assert not torch.equal(judged.logits, others)
    module.train()._bce(module.judge(batch))[0].backward()
    moved = {n for n, p in module.drafter.named_parameters() if p.grad is not None}
    assert moved == {"confidence_head.proj.weight", "confidence_head.proj.bias"}


def test_a_checkpoint_from_before_the_field_is_a_parallel_one(
    tiny: Any, target: Any, data_dir: Path, tmp_path: Path, draft: Path
) -> None:
    assert load_drafter(draft, target).config.architecture == "mtp"
    fit(tiny, tiny.make_module(), data_dir, tmp_path, 1, limit_val_batches=0).save_checkpoint(tmp_path / "p.ckpt")
    saved = torch.load(tmp_path / "p.ckpt", weights_only=True)
    del saved[CHECKPOINT_KEY]["architecture"]
    torch.save(saved, tmp_path / "p.ckpt")
    assert load_drafter(tmp_path / "p.ckpt", target).config.architecture == "dspark"
    data = TrajectoryDataModule([str(data_dir)], token_budget=60)
    trainer = tiny.make_trainer(tmp_path, 2, limit_val_batches=0)
    trainer.fit(tiny.make_module(), data, ckpt_path=tmp_path / "p.ckpt", weights_only=True)
    assert trainer.global_step == 2
    with pytest.raises(DsparkError, match="architecture: saved 'dspark', given 'mtp'"):
        tiny.make_trainer(tmp_path, 3).fit(
            tiny.make_module(**MTP), data, ckpt_path=tmp_path / "p.ckpt", weights_only=True
        )
