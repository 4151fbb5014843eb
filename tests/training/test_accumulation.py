"""Gradients of several batches to a step: a run that was killed, twice, ends with the weights of one that was not."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer

from dspark.contracts import DsparkError
from dspark.training.callbacks import BestCheckpoint, LastCheckpoint, SampleLog
from dspark.training.data import TrajectoryDataModule
from dspark.training.window import INSIDE_KEY

WINDOW, STEPS = 3, 6  # an epoch has 7 batches: windows of 3, 3 and 1


class Cut(Exception):
    """As a kill: nothing is written after it."""


class CutAfter(Callback):
    def __init__(self, batches: int):
        self.left = batches

    def on_train_batch_start(self, *_: Any) -> None:
        self.left -= 1
        if self.left < 0:
            raise Cut


class StopAfter(CutAfter):
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        trainer.should_stop |= self.left <= 0

    def on_train_batch_start(self, *_: Any) -> None:
        self.left -= 1


def run(
    tiny: Any, data_dir: Path, root: Path, resume: Path | None = None, callbacks: tuple[Any, ...] = (), **options: Any
) -> tuple[Any, Any, SampleLog]:
    data = TrajectoryDataModule([str(data_dir)], val=[str(data_dir)], token_budget=30, anchors_per_sequence=4)
    log = SampleLog()
    trainer = tiny.make_trainer(
        root, STEPS, enable_checkpointing=True, accumulate_grad_batches=WINDOW,
        callbacks=[log, *callbacks, LastCheckpoint(every_n_train_steps=1)], **options,
    )  # fmt: skip
    module = tiny.make_module(total_steps=STEPS)
    trainer.fit(module, data, ckpt_path=resume, weights_only=True if resume else None)
    return trainer, module, log


def test_a_stop_is_forgotten_by_the_next_fit(tiny: Any, target: Any, data_dir: Path, tmp_path: Path) -> None:
    """The same callback in two fits: the second is not cut short by what stopped the first."""
    callback, steps = LastCheckpoint(every_n_train_steps=100), []
    for stop in ([StopAfter(2)], []):
        trainer = tiny.make_trainer(
            tmp_path, 6, limit_val_batches=0, enable_checkpointing=True, callbacks=[*stop, callback]
        )
        trainer.fit(tiny.make_module(), TrajectoryDataModule([str(data_dir)], token_budget=60))
        steps.append(trainer.global_step)
    assert steps == [2, 6]


def assert_same(one: tuple[Any, Any, Any], other: tuple[Any, Any, Any]) -> None:
    for name, tensor in one[1].state_dict().items():
        assert torch.equal(other[1].state_dict()[name], tensor), name
    states = [made[0].optimizers[0].state_dict()["state"] for made in (one, other)]
    for key, state in states[0].items():
        for name, value in state.items():
            assert torch.equal(states[1][key][name], value), (key, name)


@pytest.mark.parametrize(("first", "second"), [(7, 1), (7, 2), (4, 1), (4, 5), (3, 2), (8, 2), (9, 5)])
def test_killed_twice_equals_straight(
    tiny: Any, target: Any, data_dir: Path, tmp_path: Path, first: int, second: int
) -> None:
    straight = run(tiny, data_dir, tmp_path / "whole")
    assert straight[0].num_training_batches == 7
    last = tmp_path / "cut" / "last.ckpt"
    with pytest.raises(Cut):
        run(tiny, data_dir, last.parent, callbacks=(CutAfter(first),))
    with pytest.raises(Cut):
        run(tiny, data_dir, last.parent, last, callbacks=(CutAfter(second),))
    again = run(tiny, data_dir, last.parent, last)
    assert again[0].global_step == STEPS
    assert 0 < len(again[2].lines) < len(straight[2].lines)
    assert again[2].lines == straight[2].lines[-len(again[2].lines) :]
    assert_same(straight, again)


def test_a_checkpoint_from_inside_a_step_says_so_and_is_no_start(
    tiny: Any, target: Any, data_dir: Path, tmp_path: Path
) -> None:
    checks = {"val_check_interval": 2, "callbacks": (BestCheckpoint(), CutAfter(5))}
    with pytest.raises(Cut):
        run(tiny, data_dir, tmp_path, **checks)
    best, last = (torch.load(tmp_path / f"{name}.ckpt", weights_only=True) for name in ("best", "last"))
    assert best[INSIDE_KEY]
    assert INSIDE_KEY not in last
    with pytest.raises(DsparkError, match=r"best\.ckpt.*last\.ckpt"):
        run(tiny, data_dir, tmp_path / "again", tmp_path / "best.ckpt")
    data = TrajectoryDataModule([str(data_dir)], val=[str(data_dir)], token_budget=30)
    looking = tiny.make_trainer(tmp_path, 1)
    looking.validate(tiny.make_module(), data, ckpt_path=tmp_path / "best.ckpt", weights_only=True, verbose=False)


@pytest.mark.parametrize("asked", [1, 2, 3, 5])
def test_a_run_that_is_told_to_stop_takes_its_step_first(
    tiny: Any, target: Any, data_dir: Path, tmp_path: Path, asked: int
) -> None:
    straight = run(tiny, data_dir, tmp_path / "whole")
    stopped = run(tiny, data_dir, tmp_path / "cut", callbacks=(StopAfter(asked),))
    assert len(stopped[2].lines) == -(-asked // WINDOW) * WINDOW
    assert_same(straight, run(tiny, data_dir, tmp_path / "cut", tmp_path / "cut" / "last.ckpt"))


def test_a_run_out_of_time_takes_its_step_first(tiny: Any, target: Any, data_dir: Path, tmp_path: Path) -> None:
    stopped = run(tiny, data_dir, tmp_path, max_time=timedelta(microseconds=1))
    assert stopped[0].global_step == 1
    assert len(stopped[2].lines) == WINDOW
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 1
