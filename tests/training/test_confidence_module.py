"""The confidence head: only it moves, its labels are the verifier's, and what calibration gets from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dspark.contracts import DsparkError
from dspark.files import tensor_hash
from dspark.training.callbacks import DraftOnly
from dspark.training.checkpoint import load_drafter
from dspark.training.confidence_module import ConfidenceModule
from dspark.training.data import RoundsDataModule, TrajectoryDataModule
from dspark.training.options import OptimizerOptions


@pytest.fixture
def draft(tiny: Any, target: Any, data_dir: Path, tmp_path: Path) -> Path:
    """A checkpoint of a draft model trained for three steps."""
    trainer = tiny.make_trainer(tmp_path, 3, limit_val_batches=0)
    trainer.fit(tiny.make_module(draft_vocab_size=25), TrajectoryDataModule([str(data_dir)], token_budget=60))
    trainer.save_checkpoint(tmp_path / "draft.ckpt")
    return tmp_path / "draft.ckpt"


def rounds(data_dir: Path) -> RoundsDataModule:
    paths = [str(data_dir)]
    return RoundsDataModule(paths, val=paths, test=paths, predict=paths, token_budget=60)


def make(draft: Path, **options: Any) -> ConfidenceModule:
    return ConfidenceModule("tiny", str(draft), target_dtype="float32", optimizer=OptimizerOptions(lr=0.05), **options)


def bce(module: ConfidenceModule, data: RoundsDataModule) -> float:
    with torch.no_grad():
        totals = [module._bce(module.judge(batch)) for batch in data.val_dataloader()]
    return float(sum(t for t, _ in totals) / sum(c for _, c in totals))


@pytest.mark.parametrize("labels", ["observed", "rejection", "coupled", "greedy"])
def test_only_the_head_moves_and_the_loss_falls(
    tiny: Any, target: Any, draft: Path, data_dir: Path, tmp_path: Path, labels: str
) -> None:
    before = load_drafter(draft, target).state_dict()
    module, data = make(draft, labels=labels, reset_head=True), rounds(data_dir)
    module.setup("fit")
    start = bce(module, data)
    trainer = tiny.make_trainer(tmp_path, 30, callbacks=[DraftOnly()], limit_val_batches=0)
    trainer.fit(module, data)
    assert bce(module, data) < start
    moved = {n for n, t in module.drafter.state_dict().items() if not torch.equal(t, before[n])}
    assert moved == {"confidence_head.proj.weight", "confidence_head.proj.bias"}
    assert module.training
    assert not module.drafter.layers.training


def test_logits_in_training_equal_the_runner_side_ones(target: Any, draft: Path, data_dir: Path) -> None:
    """The same rounds through Drafter.teacher_forced in eval mode: what the runner computes, to the last bit."""
    module = make(draft)
    module.setup("fit")
    drafter = module.drafter
    for batch in rounds(data_dir).val_dataloader():
        module.eval()
        judged = module.judge(batch)
        _, features, _ = target.forward_sequences(batch.sequences(), drafter.config.target_layer_ids)
        begin = batch.offsets[batch.sequence]
        context = drafter.encode(features, batch.positions())
        anchors = batch.ids[begin + batch.anchors]
        out = drafter.teacher_forced(anchors, batch.anchors, batch.drafted, context, begin, begin + batch.anchors)
        assert torch.equal(judged.logits, out.confidence_logits)


def test_loss_stays_bounded_with_huge_hidden_states(target: Any, draft: Path, data_dir: Path) -> None:
    module = make(draft)
    module.setup("fit")
    with torch.no_grad():
        module.drafter.norm.weight.mul_(1000.0)
        module.drafter.confidence_head.proj.weight.fill_(1.0)
    assert bce(module, rounds(data_dir)) < 30


def test_predict_gives_calibration_what_it_reads(
    tiny: Any, target: Any, draft: Path, data_dir: Path, tmp_path: Path
) -> None:
    from dspark.calibration.events import Events

    data = rounds(data_dir)
    records = [r for r in tiny.make_trainer(tmp_path, 1).predict(make(draft), data) if r is not None]
    total = sum(len(r["accepted"]) for r in records)
    assert total == len(tiny.make_rounds(tiny.make_rows(12)))
    for record in records:
        names = ("confidence_logits", "accepted", "verified", "domain", "conversation", "draft_max_prob")
        events = Events(**{name: record[name] for name in names})
        assert torch.equal(events.labels.float(), record["labels"])
        assert torch.equal(events.conditional_observed, record["observed"])


def test_test_step_reports_per_slot_metrics(
    tiny: Any, target: Any, draft: Path, data_dir: Path, tmp_path: Path
) -> None:
    (logged,) = tiny.make_trainer(tmp_path, 1).test(make(draft), rounds(data_dir), verbose=False)
    for name in ("ece", "brier", "nll", "auroc", "predicted", "observed"):
        assert f"test/{name}/slot_1" in logged


def test_checkpoint_is_a_whole_draft_model(tiny: Any, target: Any, draft: Path, data_dir: Path, tmp_path: Path) -> None:
    module = make(draft)
    trainer = tiny.make_trainer(tmp_path, 2, limit_val_batches=0, callbacks=[DraftOnly()])
    trainer.fit(module, rounds(data_dir))
    trainer.save_checkpoint(tmp_path / "confident.ckpt")
    again = load_drafter(tmp_path / "confident.ckpt", target)
    for name, tensor in module.drafter.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_a_bundle_directory_serves_as_well(target: Any, draft: Path, data_dir: Path, tmp_path: Path) -> None:
    drafter = load_drafter(draft, target)
    folder = tmp_path / "bundle"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(drafter.config.to_dict()))
    save_file(drafter.state_dict(), folder / "model.safetensors")
    hashes = {name: tensor_hash(tensor) for name, tensor in drafter.state_dict().items()}
    (folder / "manifest.json").write_text(json.dumps({"tensors": hashes}))
    for name, tensor in load_drafter(folder, target).state_dict().items():
        assert torch.equal(drafter.state_dict()[name], tensor)
    tensors = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    tensors["fc.weight"][0, 0] += 1
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(DsparkError, match=r"fc\.weight differ: the file is damaged"):
        load_drafter(folder, target)
    del tensors["fc.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(DsparkError, match=r"fc\.weight"):
        load_drafter(folder, target)


def test_missing_draft_model_and_missing_head_are_clear_errors(
    tiny: Any, target: Any, data_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(DsparkError, match="Train it first"):
        make(tmp_path / "none.ckpt").setup("fit")
    trainer = tiny.make_trainer(tmp_path, 1, limit_val_batches=0)
    module = tiny.make_module(confidence_head=False, confidence_with_markov=False)
    trainer.fit(module, TrajectoryDataModule([str(data_dir)], token_budget=60))
    trainer.save_checkpoint(tmp_path / "headless.ckpt")
    with pytest.raises(DsparkError, match="confidence head"):
        make(tmp_path / "headless.ckpt").setup("fit")
