"""Where a run stands inside a window of trainer.accumulate_grad_batches, and what follows for its checkpoints.

Inside one, gradients of some batches wait for the others; no checkpoint holds them. One that is written there serves
for looking at the model, and says so; a run that went on from it would have lost those batches.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn

from dspark.contracts import DsparkError

INSIDE_KEY = "dspark_inside_accumulation"


def inside_window(trainer: Trainer) -> bool:
    """Whether batches have been seen whose gradients no step has taken yet. Asked between two batches of a fit."""
    return trainer.state.fn == TrainerFn.FITTING and trainer.fit_loop.epoch_loop._should_accumulate()


def mark(checkpoint: dict[str, Any], trainer: Trainer) -> None:
    """Puts the fact into a checkpoint that is about to be written inside a window."""
    if inside_window(trainer):
        checkpoint[INSIDE_KEY] = True


def refuse_inside(checkpoint: dict[str, Any], path: Any) -> None:
    """Raises DsparkError when a fit is to go on from a checkpoint that was written inside a window."""
    if checkpoint.get(INSIDE_KEY):
        raise DsparkError(
            f"{path}: expected a checkpoint that a run can go on from, but this one was written between the batches of "
            "one step (trainer.accumulate_grad_batches), whose gradients it lacks. Resume from last.ckpt; this one "
            "serves for test and validate."
        )
