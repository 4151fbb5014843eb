"""What every fit carries along: checkpoints under fixed names, their check, a log of sample ids.

TensorBoard goes to tb_logs/<name> with a fixed version, so that a resumed run continues its own curves: points past
the checkpoint it resumes from are purged.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.trainer.states import TrainerFn

from dspark.files import atomic_write
from dspark.training.batches import SequenceBatch
from dspark.training.checkpoint import PREFIX
from dspark.training.window import inside_window


class _InRootDir(ModelCheckpoint):
    """Checkpoints go to the trainer's default_root_dir itself unless ``dirpath`` says otherwise."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.dirpath = self.dirpath or trainer.default_root_dir
        super().setup(trainer, pl_module, stage)


class BestCheckpoint(_InRootDir):
    """best.ckpt: the draft model with the best `monitor` so far, looked at after every validation.

    Args:
        dirpath: folder of the checkpoints; null takes trainer.default_root_dir.
        monitor: validation metric that decides.
        mode: max or min.
    """

    def __init__(self, dirpath: str | None = None, monitor: str = "val/tau", mode: str = "max"):
        super().__init__(
            dirpath=dirpath, filename="best", monitor=monitor, mode=mode, save_top_k=1, enable_version_counter=False
        )


class LastCheckpoint(_InRootDir):
    """last.ckpt, written every `every_n_train_steps` steps and when training ends: what a run resumes from.

    Never between the batches of one step (window.py): a run that is told to stop there stops after the step.

    Args:
        dirpath: folder of the checkpoints; null takes trainer.default_root_dir.
        every_n_train_steps: how much work a killed run may lose.
    """

    def __init__(self, dirpath: str | None = None, every_n_train_steps: int = 100):
        super().__init__(
            dirpath=dirpath,
            filename="last",
            every_n_train_steps=every_n_train_steps,
            save_top_k=1,
            enable_version_counter=False,
        )
        self._stop_asked = False
        self.written: Path | None = None  # by this run

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop_asked, self.written = False, None

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        super()._save_checkpoint(trainer, filepath)
        self.written = Path(filepath)

    @property
    def path(self) -> Path | None:
        """Where last.ckpt goes, once a trainer has said so."""
        return Path(self.dirpath) / "last.ckpt" if self.dirpath is not None else None

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        super().on_train_batch_end(trainer, *args)
        self._stop_between_steps(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        self._stop_between_steps(trainer)

    def _stop_between_steps(self, trainer: Trainer) -> None:
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking:
            return
        self._stop_asked |= trainer.should_stop
        trainer.should_stop = self._stop_asked and not inside_window(trainer)

    def _should_skip_saving_checkpoint(self, trainer: Trainer) -> bool:
        return super()._should_skip_saving_checkpoint(trainer) or inside_window(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._last_global_step_saved != trainer.global_step and self.path and not inside_window(trainer):
            self._save_checkpoint(trainer, str(self.path))


class DraftOnly(Callback):
    """Checks every checkpoint before it is written: the draft model's tensors and nothing else."""

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        assert_draft_only(checkpoint)


def assert_draft_only(checkpoint: dict[str, Any]) -> None:
    """Raises AssertionError when a checkpoint holds a tensor that is not the draft model's (a frozen target, say)."""
    foreign = [name for name in checkpoint["state_dict"] if not name.startswith(PREFIX)]
    assert not foreign, f"a checkpoint must hold the draft model only, but got {foreign[:5]}"


class StepTimes(Callback):
    """What a training step takes: train/step_seconds in the log, and when the fit ends steps.json in default_root_dir
    with the median (from the end of a step to the end of the next: data, step and optimizer; validation left out)."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._last: float | None = None

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last = None

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        now = time.perf_counter()
        if self._last is not None:
            self.seconds.append(now - self._last)
            pl_module.log("train/step_seconds", self.seconds[-1], batch_size=1)
        self._last = now

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.seconds and trainer.is_global_zero:
            told = {"steps": len(self.seconds), "median_seconds": statistics.median(self.seconds)}
            atomic_write(Path(trainer.default_root_dir) / "steps.json", json.dumps(told) + "\n")


class SampleLog(Callback):
    """Appends a line per training batch, "global_step sample ids", to a file: two runs saw the same data iff equal.

    Args:
        path: the file; None keeps the lines in memory only (`lines`).
    """

    def __init__(self, path: str | None = None):
        self.path = path
        self.lines: list[str] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: SequenceBatch, _: int) -> None:
        anchors = torch.stack([batch.sequence, batch.anchors]).flatten().tolist()
        line = f"{trainer.global_step} {','.join(batch.sample_ids)} {','.join(map(str, anchors))}"
        self.lines.append(line)
        if self.path is not None:
            Path(self.path).parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "a", encoding="utf-8") as stream:
                stream.write(line + "\n")


class ResumableTensorBoard(TensorBoardLogger):
    """TensorBoard in <save_dir>/<name>, always the same folder. A resumed run purges what lies past its checkpoint.

    Args:
        name: folder of the run below save_dir.
        save_dir: where all runs lie.
    """

    def __init__(self, name: str, save_dir: str = "tb_logs"):
        super().__init__(save_dir=save_dir, name=name, version="", default_hp_metric=False)
        self.resumed_at: int | None = None

    def resume_at(self, step: int) -> None:
        """Points from `step` on belong to the run that was cut: TensorBoard will drop them."""
        if self._experiment is not None:  # opened before the checkpoint was read, still without a point
            self._experiment.close()
            self._experiment = None
        self._kwargs["purge_step"] = self.resumed_at = step


class PurgeOnResume(Callback):
    """Tells ResumableTensorBoard where a resumed run goes on. No effect with another logger."""

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn != TrainerFn.FITTING:  # a checkpoint that is only looked at cuts no curve
            return
        for logger in trainer.loggers:
            if isinstance(logger, ResumableTensorBoard) and trainer.is_global_zero:
                logger.resume_at(int(checkpoint["global_step"]))
