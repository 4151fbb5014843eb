"""What a fit's callbacks leave behind; the others are tested where they matter (test_resume, test_drafter_module)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from dspark.training.callbacks import LastCheckpoint, StepTimes
from dspark.training.data import TrajectoryDataModule
from dspark.training.sources import Sample, Samples


@pytest.mark.parametrize(("options", "steps"), [({"limit_val_batches": 0}, 3), ({"val_check_interval": 2}, 2)])
def test_step_times_leave_validation_out(
    tiny: Any, target: Any, data_dir: Path, tmp_path: Path, options: dict[str, Any], steps: int
) -> None:
    """Four steps have three intervals between them; a validation after the second breaks one."""
    module = tiny.make_module()
    trainer = tiny.make_trainer(tmp_path, 4, callbacks=[StepTimes()], check_val_every_n_epoch=None, **options)
    trainer.fit(module, TrajectoryDataModule([str(data_dir)], [str(data_dir)], token_budget=40))
    told = json.loads((tmp_path / "steps.json").read_text())
    assert told["steps"] == steps
    assert 0 < told["median_seconds"] < 60
    assert "train/step_seconds" in trainer.callback_metrics


def test_rows_left_out_are_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    sample = Sample("a", "p", "math", torch.arange(5), torch.ones(5, dtype=torch.bool))
    monkeypatch.setattr("dspark.training.data.read_samples", lambda *_: Samples([sample], {"no supervised token": 2}))
    TrajectoryDataModule(["somewhere"]).samples("train")
    assert capsys.readouterr().err == "data.train: left out 2 rows: no supervised token\n"


def test_only_what_this_run_wrote_is_its_last_checkpoint(
    tiny: Any, target: Any, data_dir: Path, tmp_path: Path
) -> None:
    """An older run's last.ckpt in the same folder is nothing to resume a cut run from."""
    (tmp_path / "last.ckpt").write_bytes(b"an older run's")
    for every, written in ((100, None), (1, tmp_path / "last.ckpt")):
        callback = LastCheckpoint(every_n_train_steps=every)
        trainer = tiny.make_trainer(tmp_path, 3, enable_checkpointing=True, limit_val_batches=0,
                                    callbacks=[callback, Raises()])  # fmt: skip
        with pytest.raises(KeyError):
            trainer.fit(tiny.make_module(), TrajectoryDataModule([str(data_dir)], token_budget=60))
        assert callback.written == written


class Raises(Callback):
    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            raise KeyError
