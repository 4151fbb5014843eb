"""The drafter module on a tiny target: gradients, learning, broken samples, what validation and checkpoints leave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.contracts import DsparkError
from dspark.training.callbacks import DraftOnly
from dspark.training.checkpoint import CHECKPOINT_KEY, load_drafter
from dspark.training.data import TrajectoryDataModule
from dspark.training.vocabulary import draft_vocabulary


def fit(tiny: Any, module: Any, path: Path, tmp_path: Path, steps: int, **options: Any) -> tuple[Any, Any]:
    data = TrajectoryDataModule([str(path)], val=[str(path)], token_budget=60)
    trainer = tiny.make_trainer(tmp_path, steps, **options)
    trainer.fit(module, data)
    return trainer, data


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn", "pair"])
def test_every_parameter_and_slot_zero_get_gradient(
    tiny: Any, target: Any, data_dir: Path, tmp_path: Path, head: str
) -> None:
    module = tiny.make_module(markov_head=head)
    _, data = fit(tiny, module, data_dir, tmp_path, 1, limit_val_batches=0)
    module.train()
    judged = module._judge(next(iter(data.train_dataloader())))
    judged.states.hidden.retain_grad()
    module._losses(judged)[0].backward()
    counted = judged.states.hidden.grad.abs().sum(-1) > 0
    assert torch.equal(counted, judged.counted)
    assert bool(counted[:, 0].all())
    assert all(p.grad is not None for p in module.parameters())
    assert not target.embed_weight.requires_grad
    assert target.embed_weight.grad is None


def test_a_batch_without_counted_slots_gives_a_loss_of_zero_that_touches_everything(
    tiny: Any, target: Any, data_dir: Path, tmp_path: Path
) -> None:
    module = tiny.make_module()
    fit(tiny, module, data_dir, tmp_path, 1, limit_val_batches=0)
    module.zero_grad()
    loss, means = module._losses(None)
    loss.backward()
    assert float(loss.detach()) == 0.0 and set(means) == {"ce", "l1", "confidence"}
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in module.parameters())


@pytest.mark.parametrize("label", ["rejection", "coupled", "greedy"])
def test_coupled_loss_and_survival_weights_train_and_validate(
    tiny: Any, target: Any, data_dir: Path, tmp_path: Path, label: str
) -> None:
    losses = {"coupled": 0.9, "l1": 0.0, "weighting": "survival", "label": label, "temperature": 0.7}
    module = tiny.make_module(losses=losses, draft_vocab_size=25)
    trainer, _ = fit(tiny, module, data_dir, tmp_path, 2, val_check_interval=1)
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert 0.0 < logged["train/coupled"] < 1.0 and 0.0 < logged["val/coupled"] < 1.0
    assert logged["val/coupled"] >= logged["val/l1"] / 2  # the coupled verifier accepts no more than rejection does
    assert all(bool(p.isfinite().all()) for p in module.parameters())


def test_training_learns_one_sequence_by_heart(tiny: Any, target: Any, tmp_path: Path) -> None:
    path = tiny.write_directory(tmp_path / "one", rows=tiny.make_rows(1))
    module = tiny.make_module(total_steps=70, lr=2e-2, losses={"ce": 1.0, "l1": 0.0})
    _, data = fit(tiny, module, path, tmp_path, 70, limit_val_batches=0)
    module.drafter.eval()
    batch = next(iter(data.val_dataloader()))
    judged = module._judge(batch)
    said = module.drafter.slot_logits(judged.states.hidden, judged.states.phi)
    agree = (said.argmax(-1) == judged.columns) & judged.counted
    lengths = 1 + agree.long().cumprod(-1).sum(-1)
    assert float(lengths.float().mean()) > 0.9 * float(1 + judged.counted.sum(-1).float().mean())


@pytest.mark.parametrize(
    "shape",
    [
        {"draft_vocab_size": 25},
        {"candidates": 4, "convolution": True, "layer_fusion": True, "num_layers": 2, "markov_head": "pair"},
    ],
    ids=["reduced", "options"],
)
def test_validation_reports_and_training_mode_comes_back(
    tiny: Any, target: Any, data_dir: Path, tmp_path: Path, shape: dict[str, Any]
) -> None:
    module = tiny.make_module(losses={"soft_ce": 0.1}, **shape)
    trainer, _ = fit(tiny, module, data_dir, tmp_path, 2, val_check_interval=1)
    logged = trainer.callback_metrics
    assert 1.0 <= float(logged["val/tau"]) <= 4.0
    assert all(0.0 <= float(logged[f"val/acceptance/slot_{k}"]) <= 1.0 for k in (1, 2, 3))
    assert float(logged["val/l1"]) <= 2.0
    told = [name for name in ("l1", "ce", "soft_ce", "confidence") if f"val/{name}" in logged]
    assert told == (["l1", "confidence"] if "candidates" in shape else ["l1", "ce", "soft_ce", "confidence"])
    assert all(bool(logged[f"val/{name}"].isfinite()) for name in told)
    assert module.training
    assert module.drafter.training


def test_the_regression_start_is_far_better_than_a_random_one(
    tiny: Any, target: Any, data_dir: Path, tmp_path: Path
) -> None:
    """After one step of no size: the target's law is much nearer, in every slot."""
    distance, accepted = {}, {}
    for count in (0, 100):
        module = tiny.make_module(lr=1e-12, regression=count, input_fusion=True, losses={"label": "greedy"})
        trainer, _ = fit(tiny, module, data_dir, tmp_path, 1, val_check_interval=1)
        distance[count] = float(trainer.callback_metrics["val/l1"])
        accepted[count] = [float(trainer.callback_metrics[f"val/acceptance/slot_{k}"]) for k in (1, 2, 3)]
    assert distance[100] < 0.7 * distance[0]
    assert all(new > old + 0.2 for new, old in zip(accepted[100], accepted[0], strict=True)), accepted


def test_a_resumed_run_does_not_start_over(
    tiny: Any, target: Any, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = {"regression": 100, "input_fusion": True}
    trainer, _ = fit(tiny, tiny.make_module(**kind), data_dir, tmp_path, 2, limit_val_batches=0)
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    monkeypatch.setattr("dspark.training.drafter_module.observe", None)  # to call it again would be an error
    data = TrajectoryDataModule([str(data_dir)], token_budget=60)
    resumed = tiny.make_trainer(tmp_path, 3, limit_val_batches=0)
    resumed.fit(tiny.make_module(**kind), data, ckpt_path=tmp_path / "two.ckpt", weights_only=True)
    assert resumed.global_step == 3


def test_tau_equals_a_hand_computed_value() -> None:
    from dspark.training.metrics import expected_tau

    rates = torch.tensor([[0.5, 0.5, 0.9], [0.25, 0.0, 1.0], [0.3, 0.3, 0.3]])
    counted = torch.tensor([[True, True, False], [True, True, True], [False, False, False]])
    total, count = expected_tau(rates, counted)
    assert float(count) == 2
    assert abs(float(total) - (1.75 + 1.25)) < 1e-6


def test_a_sample_with_nan_features_is_skipped_and_counted(
    tiny: Any, target: Any, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, poisoned = target.forward_sequences, []

    def forward(sequences: Any, taps: Any) -> Any:
        hidden, features, offsets = real(sequences, taps)
        if not poisoned:
            poisoned.append(True)
            features[int(offsets[1]) - 1, 3] = float("nan")
        return hidden, features, offsets

    monkeypatch.setattr(target, "forward_sequences", forward)
    module = tiny.make_module()
    fit(tiny, module, data_dir, tmp_path, 3, limit_val_batches=0)
    assert module.skips.skipped == 1
    assert all(bool(p.isfinite().all()) for p in module.parameters())


def test_too_many_broken_samples_end_the_run(
    tiny: Any, target: Any, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = target.forward_sequences

    def forward(sequences: Any, taps: Any) -> Any:
        hidden, features, offsets = real(sequences, taps)
        return hidden, features * float("nan"), offsets

    monkeypatch.setattr(target, "forward_sequences", forward)
    with pytest.raises(DsparkError, match="NaN"):
        fit(tiny, tiny.make_module(), data_dir, tmp_path, 3, limit_val_batches=0)


def test_checkpoint_holds_the_draft_model_alone_and_loads_safely(
    tiny: Any, target: Any, data_dir: Path, tmp_path: Path
) -> None:
    module = tiny.make_module(draft_vocab_size=25)
    trainer, _ = fit(tiny, module, data_dir, tmp_path, 2, callbacks=[DraftOnly()])
    path = tmp_path / "draft.ckpt"
    trainer.save_checkpoint(path)
    saved = torch.load(path, weights_only=True)
    assert {k.split(".")[0] for k in saved["state_dict"]} == {"drafter"}
    assert saved[CHECKPOINT_KEY]["draft_vocab_size"] == 25
    assert saved["hyper_parameters"]["drafter"]["block_size"] == 3
    draft_bytes = sum(t.numel() * t.element_size() for t in module.drafter.state_dict().values())
    assert path.stat().st_size < 3 * draft_bytes + 80_000  # weights and two Adam moments
    again = load_drafter(path, target)
    for name, tensor in module.drafter.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_a_damaged_checkpoint_is_noticed(tiny: Any, target: Any, data_dir: Path, tmp_path: Path) -> None:
    """One bit of one weight: the file still loads, and would be exported and trusted."""
    trainer, _ = fit(tiny, tiny.make_module(), data_dir, tmp_path, 1, limit_val_batches=0)
    trainer.save_checkpoint(tmp_path / "whole.ckpt")
    saved = torch.load(tmp_path / "whole.ckpt", weights_only=True)
    saved["state_dict"]["drafter.fc.weight"].view(torch.int32)[0, 0] ^= 1
    torch.save(saved, tmp_path / "flipped.ckpt")
    assert load_drafter(tmp_path / "whole.ckpt", target)
    with pytest.raises(DsparkError, match=r"drafter\.fc\.weight differ: the file is damaged"):
        load_drafter(tmp_path / "flipped.ckpt", target)
    del saved["dspark_tensor_hashes"]
    torch.save(saved, tmp_path / "older.ckpt")
    with pytest.raises(DsparkError, match="written before they were kept"):
        load_drafter(tmp_path / "older.ckpt", target)


def test_a_frozen_target_in_the_tree_would_be_noticed(tiny: Any) -> None:
    from dspark.training.callbacks import assert_draft_only

    with pytest.raises(AssertionError, match="target"):
        assert_draft_only({"state_dict": {"drafter.fc.weight": 0, "target.embed": 0}})


def test_a_checkpoint_of_another_target_is_refused(tiny: Any, target: Any, data_dir: Path, tmp_path: Path) -> None:
    trainer, _ = fit(tiny, tiny.make_module(), data_dir, tmp_path, 1, limit_val_batches=0)
    trainer.save_checkpoint(tmp_path / "d.ckpt")
    other = tiny.make_target()
    other.__dict__["_fingerprint"] = "f" * 64
    with pytest.raises(DsparkError, match="trained for"):
        load_drafter(tmp_path / "d.ckpt", other)
    with pytest.raises(DsparkError, match="expected"):
        load_drafter(tmp_path / "missing.ckpt", target)


def test_reduced_vocabulary_ties_go_to_lower_ids_and_keep_stops() -> None:
    counts = torch.tensor([0, 5, 5, 0, 5, 2])
    assert draft_vocabulary(counts, 3, [3]).tolist() == [1, 2, 3]
    with pytest.raises(DsparkError, match="draft_vocab_size"):
        draft_vocabulary(counts, 0, [3])


def test_a_stop_id_as_mask_is_refused(tiny: Any, target: Any, data_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(DsparkError, match="mask_token_id"):
        fit(tiny, tiny.make_module(mask_token_id=3), data_dir, tmp_path, 1)


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("confidence", [True, False])
@pytest.mark.parametrize("alphas", [{"ce": 1.0, "l1": 0.0, "confidence": 0.0}, {}])
def test_every_combination_of_heads_and_losses_runs(
    tiny: Any, target: Any, data_dir: Path, tmp_path: Path, rank: int, confidence: bool, alphas: dict[str, float]
) -> None:
    with_markov = confidence and rank > 0
    module = tiny.make_module(
        losses=alphas, markov_rank=rank, confidence_head=confidence, confidence_with_markov=with_markov
    )
    trainer, _ = fit(tiny, module, data_dir, tmp_path, 1, limit_val_batches=1)
    assert float(trainer.callback_metrics["train/loss"]) > 0
