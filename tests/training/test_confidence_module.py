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
from dspark.training.confidence_test import events_of
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


@pytest.mark.parametrize("with_law", [False, True])
def test_logits_in_training_equal_the_runner_side_ones(
    target: Any, draft: Path, data_dir: Path, with_law: bool
) -> None:
    """The same rounds through Drafter.teacher_forced in eval mode: what the runner computes, to the last bit."""
    module = make(draft, with_law=with_law)
    module.setup("fit")
    drafter = module.drafter
    with torch.no_grad():
        drafter.confidence_head.proj.weight.add_(0.1)
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


def test_validation_watches_both_laws_per_slot_and_domain(
    tiny: Any, target: Any, draft: Path, data_dir: Path, tmp_path: Path
) -> None:
    module = make(draft)
    (printed,) = tiny.make_trainer(tmp_path, 1).validate(module, rounds(data_dir), verbose=False)
    logged = module.streamed
    assert printed == {name: pytest.approx(value, nan_ok=True) for name, value in logged.items() if name.count("/") < 3}
    for law in ("survival", "conditional"):
        for name in ("ece", "mass_ece", "brier", "nll", "auroc", "predicted", "observed"):
            for part in ("", "/slot_1", "/slot_3", "/math", "/code"):
                assert f"val/{law}/{name}{part}" in logged
    events = events_of(part for part in tiny.make_trainer(tmp_path, 1).predict(make(draft), rounds(data_dir)) if part)
    rates = events.confidence_logits.sigmoid()
    for law, p, seen in (
        ("conditional", rates, events.conditional_observed),
        ("survival", rates.cumprod(1), events.cumulative_observed),
    ):
        for slot in range(3):
            mine = seen[:, slot]
            brier = (p[mine, slot] - events.labels[mine, slot]).square().mean().item()
            assert logged[f"val/{law}/brier/slot_{slot + 1}"] == pytest.approx(brier, abs=1e-6)


def test_a_trained_head_that_shall_read_the_law_says_at_first_what_it_said(
    target: Any, draft: Path, data_dir: Path
) -> None:
    """Widened, not forgotten, unless reset_head asks for that."""
    (batch, *_) = rounds(data_dir).val_dataloader()
    said = {}
    for with_law in (False, True):
        module = make(draft, with_law=with_law)
        module.setup("predict")
        module.eval()
        assert module.drafter.config.confidence_with_law == with_law
        said[with_law] = module.judge(batch).logits
    assert said[True].abs().max() > 0
    torch.testing.assert_close(said[True], said[False], rtol=1e-6, atol=1e-6)


def test_a_head_that_reads_the_law_starts_from_it_and_learns(
    tiny: Any, target: Any, draft: Path, data_dir: Path, tmp_path: Path
) -> None:
    """At first it says what the draft's law does: all drafts of these rounds but the wrong ones have its odds. After
    training its checkpoint stands for itself."""
    module, data = make(draft, with_law=True, reset_head=True), rounds(data_dir)
    module.setup("predict")
    module.eval()
    for batch in data.predict_dataloader():
        judged = module.judge(batch, want_draft=True)
        p = judged.draft_logits.double().softmax(-1)
        column = module.drafter.to_columns(batch.drafted)
        drafted = torch.where(column < 0, 0.0, p.gather(-1, column.clamp_min(0)[..., None]).squeeze(-1))
        both = torch.stack([torch.logit(p.amax(-1)), torch.logit(drafted)]).clamp(-16, 16).mean(0)
        torch.testing.assert_close(judged.logits.double(), both, rtol=0, atol=1e-4)
    trainer = tiny.make_trainer(tmp_path, 10, limit_val_batches=0, callbacks=[DraftOnly()])
    trainer.fit(module, data)
    trainer.save_checkpoint(tmp_path / "law.ckpt")
    weight = module.drafter.confidence_head.proj.weight
    assert bool((weight[0, -2:] != 0.5).all())
    assert bool((weight[0, :-2] != 0).any())
    again = make(tmp_path / "law.ckpt")
    assert torch.equal(parts(tiny, tmp_path, again, data), parts(tiny, tmp_path, module, data))
    with pytest.raises(DsparkError, match=r"confidence_with_law: saved True, given False\. Give .*with_law=true"):
        tiny.make_trainer(tmp_path, 12).fit(make(draft), data, ckpt_path=str(tmp_path / "law.ckpt"), weights_only=True)


def parts(tiny: Any, tmp_path: Path, module: ConfidenceModule, data: RoundsDataModule) -> torch.Tensor:
    """Every confidence logit."""
    found = tiny.make_trainer(tmp_path, 1).predict(module, data)
    return torch.cat([part["confidence_logits"] for part in found if part is not None])


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
