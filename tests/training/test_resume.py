"""N steps straight equal N/2, resume, N/2: bit for bit, in the middle of an epoch and at its end."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.contracts import DsparkError
from dspark.training.callbacks import LastCheckpoint, PurgeOnResume, ResumableTensorBoard, SampleLog
from dspark.training.checkpoint import CHECKPOINT_KEY
from dspark.training.data import TrajectoryDataModule

STEPS = 8


def run(
    tiny: Any, data_dir: Path, root: Path, steps: int, resume: Path | None = None, **options: Any
) -> tuple[Any, Any, Any]:
    data = TrajectoryDataModule([str(data_dir)], val=[str(data_dir)], token_budget=60, anchors_per_sequence=4)
    log = SampleLog()
    callbacks = [log, LastCheckpoint(str(root), every_n_train_steps=1000), *options.pop("callbacks", [])]
    trainer = tiny.make_trainer(root, steps, callbacks=callbacks, enable_checkpointing=True, **options)
    module = tiny.make_module(total_steps=STEPS, regression=100, input_fusion=True, fresh=3.0)
    trainer.fit(module, data, ckpt_path=resume, weights_only=True if resume else None)
    return trainer, module, log


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 5])  # an epoch has 4 batches
def test_resume_is_exact(tiny: Any, target: Any, data_dir: Path, tmp_path: Path, cut: int) -> None:
    straight, whole, all_lines = run(tiny, data_dir, tmp_path / "whole", STEPS)
    assert straight.num_training_batches == 4
    _, _, first = run(tiny, data_dir, tmp_path / "half", cut)
    resumed, second_module, second = run(tiny, data_dir, tmp_path / "rest", STEPS, tmp_path / "half" / "last.ckpt")
    assert first.lines + second.lines == all_lines.lines
    for name, tensor in whole.state_dict().items():
        assert torch.equal(second_module.state_dict()[name], tensor), name
    states = [t.optimizers[0].state_dict()["state"] for t in (straight, resumed)]
    assert len(states[0]) == len(list(whole.parameters())) > 0
    for key, state in states[0].items():
        assert float(state["step"]) == STEPS
        assert bool(state["exp_avg_sq"].abs().sum() > 0)
        for name, value in state.items():
            assert torch.equal(states[1][key][name], value), (key, name)
    assert straight.lr_scheduler_configs[0].scheduler.state_dict()["last_epoch"] == STEPS
    assert resumed.lr_scheduler_configs[0].scheduler.state_dict()["last_epoch"] == STEPS


def test_resume_after_a_kill_in_the_middle_of_an_epoch(tiny: Any, target: Any, data_dir: Path, tmp_path: Path) -> None:
    """The checkpoint is one that the run wrote on its way (every 3 steps), not one written at its end."""
    _, whole, all_lines = run(tiny, data_dir, tmp_path / "whole", STEPS)
    on_the_way = LastCheckpoint(str(tmp_path / "way"), every_n_train_steps=3)
    on_the_way.on_train_end = lambda *_: None
    run(tiny, data_dir, tmp_path / "first", 5, callbacks=[on_the_way], val_check_interval=2)
    _, module, lines = run(
        tiny, data_dir, tmp_path / "rest", STEPS, tmp_path / "way" / "last.ckpt", val_check_interval=2
    )
    assert lines.lines == all_lines.lines[3:]
    for name, tensor in whole.state_dict().items():
        assert torch.equal(module.state_dict()[name], tensor), name


@pytest.mark.slow
@pytest.mark.parametrize("cached", [False, True])
def test_resume_after_sigkill(runs: Any, target: Any, data_dir: Path, tmp_path: Path, cached: bool) -> None:
    """A process that gets no chance to say anything, in its second epoch of four batches; its last checkpoint is two
    steps old. The other half sees the same sequences and anchors and ends with the same weights and moments."""
    features = {"features": {"cache": str(tmp_path / "cache")}} if cached else {}
    run = {"train": str(data_dir), "val": str(data_dir), "budget": 60, "anchors": 4, "steps": STEPS, **features}
    died = runs.launch("one", tmp_path, [{"name": "killed", **run, "every": 5, "kill_after": 7}])
    assert died.returncode == -signal.SIGKILL, died.stderr[-3000:]
    assert not (tmp_path / "killed" / "end.ckpt").exists()
    at_kill = torch.load(tmp_path / "killed" / "last.ckpt", weights_only=True)
    moments = at_kill["optimizer_states"][0]["state"]
    assert at_kill["global_step"] == 5
    assert len(moments) == len(trained_names(at_kill)) > 0
    assert all(float(m["step"]) == 5 and bool(m["exp_avg_sq"].any()) for m in moments.values())
    _, trained, all_lines = runs.fit(tmp_path, "straight", **{**run, "features": {}})
    _, resumed, lines = runs.fit(tmp_path, "rest", **run, resume=str(tmp_path / "killed" / "last.ckpt"))
    assert (tmp_path / "killed" / "samples.txt").read_text().splitlines() == all_lines.lines[:7]
    assert lines.lines == all_lines.lines[5:]
    assert len({line.split(" ", 1)[1] for line in all_lines.lines}) == STEPS  # no two steps drew the same
    for name, tensor in trained.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], tensor), name
    ends = [torch.load(tmp_path / name / "end.ckpt", weights_only=True) for name in ("straight", "rest")]
    for name, state in ends[0]["optimizer_states"][0]["state"].items():
        for kind, value in state.items():
            assert torch.equal(ends[1]["optimizer_states"][0]["state"][name][kind], value), (name, kind)
        assert not torch.equal(state["exp_avg"], moments[name]["exp_avg"]), name
    if cached:
        assert resumed.cache.tallies[True].made == 0
        assert resumed.cache.tallies[True].hits > 0


def trained_names(checkpoint: dict[str, Any]) -> list[str]:
    return [name for name, tensor in checkpoint["state_dict"].items() if tensor.is_floating_point()]


def test_resume_with_another_shape_is_refused(tiny: Any, target: Any, data_dir: Path, tmp_path: Path) -> None:
    run(tiny, data_dir, tmp_path / "half", 2)
    data = TrajectoryDataModule([str(data_dir)], token_budget=60)
    with pytest.raises(DsparkError, match="block_size"):
        tiny.make_trainer(tmp_path, 4).fit(
            tiny.make_module(block_size=2), data, ckpt_path=tmp_path / "half" / "last.ckpt", weights_only=True
        )


def test_a_checkpoint_older_than_a_field_is_resumed(tiny: Any, target: Any, data_dir: Path, tmp_path: Path) -> None:
    """Its config lacks the field, which means the default."""
    run(tiny, data_dir, tmp_path / "half", 2)
    path = tmp_path / "half" / "last.ckpt"
    saved = torch.load(path, weights_only=True)
    for name in ("convolution", "candidates", "layer_fusion"):
        saved[CHECKPOINT_KEY].pop(name)
    torch.save(saved, path)
    trainer, _, _ = run(tiny, data_dir, tmp_path / "rest", 3, path)
    assert trainer.global_step == 3


def test_tensorboard_goes_on_in_the_same_folder_and_purges(
    tiny: Any, target: Any, data_dir: Path, tmp_path: Path
) -> None:
    def logger() -> ResumableTensorBoard:
        return ResumableTensorBoard("run", save_dir=str(tmp_path / "tb"))

    run(tiny, data_dir, tmp_path / "half", 5, logger=logger(), callbacks=[PurgeOnResume()])
    time.sleep(1.1)  # event files are read in the order of their names: the second, then a count as text (10 before 9)
    again = logger()
    run(
        tiny,
        data_dir,
        tmp_path / "rest",
        STEPS,
        tmp_path / "half" / "last.ckpt",
        logger=again,
        callbacks=[PurgeOnResume()],
    )
    assert again.resumed_at == 5
    assert Path(again.log_dir) == tmp_path / "tb" / "run"
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(again.log_dir)
    events.Reload()
    steps = [event.step for event in events.Scalars("train/loss")]
    assert steps == sorted(set(steps))
    assert len(steps) == STEPS


def test_other_optimizer_settings_on_resume_are_refused(
    tiny: Any, target: Any, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The saved optimizer would win without a word, or (another number of groups) end in a traceback of torch's."""
    run(tiny, data_dir, tmp_path / "half", 2)
    whole = tiny.make_module
    for other in ({"fresh": 1.0}, {"lr": 1.0}):
        monkeypatch.setattr(tiny, "make_module", lambda other=other, **given: whole(**{**given, **other}))
        with pytest.raises(DsparkError, match="expected the optimizer of this recipe"):
            run(tiny, data_dir, tmp_path / "rest", STEPS, tmp_path / "half" / "last.ckpt")


def test_a_resumed_run_says_where_it_goes_on_and_that_its_cosine_is_another(
    tiny: Any, target: Any, data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fit(steps: int, total: int, resume: Path | None = None) -> str:
        trainer = tiny.make_trainer(tmp_path, steps, callbacks=[LastCheckpoint()], enable_checkpointing=True)
        data = TrajectoryDataModule([str(data_dir)], token_budget=60)
        trainer.fit(tiny.make_module(total_steps=total), data, ckpt_path=resume, weights_only=True if resume else None)
        return capsys.readouterr().err

    assert "resumed" not in fit(2, 0)
    longer = fit(4, 0, tmp_path / "last.ckpt")
    assert "resumed at step 2 of 4" in longer
    assert "cosine now ends at step 4, not 2" in longer
    assert "cosine" not in fit(4, 0, tmp_path / "last.ckpt")
    fit(2, 8)
    assert "cosine" not in fit(4, 8, tmp_path / "last.ckpt")
