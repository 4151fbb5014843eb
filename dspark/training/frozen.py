"""The frozen target inside a training step: capture, skip broken samples, keep it out of the module tree.

Features are captured online under no_grad: the target runs on the batch and what it says is used at once (or kept,
features.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from dspark.contracts import DsparkError
from dspark.drafter.blocks import Blocks, blocks_at
from dspark.drafter.model import Drafter
from dspark.target.decoder import Target
from dspark.target.load import load_target
from dspark.training.batches import SequenceBatch
from dspark.training.labels import TargetLaw, reduced_law, slot_mask, target_law
from dspark.training.options import OptimizerOptions
from dspark.training.ranges import SHARE, check
from dspark.training.sources import refuse_foreign
from dspark.training.window import mark, refuse_inside

PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")
STEPS_KEY = "dspark_max_steps"  # trainer.max_steps of the run that wrote a checkpoint
SPLITS = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",), "predict": ("predict",)}  # read by a stage


@dataclass(frozen=True, slots=True)
class Capture:
    """What the target says about a batch: hidden [N,H] after its final norm, features [N,n*H], finite [R] bool: the
    sequences whose values are all finite (the others are zeroed). normaliser [N] fp32 and argmax [N] int64 of the
    logits (labels.normalise) where they are known already: they are what needs the whole LM head."""

    hidden: Tensor
    features: Tensor
    finite: Tensor
    normaliser: Tensor | None = None
    argmax: Tensor | None = None


def capture(target: Target, batch: SequenceBatch, taps: tuple[int, ...]) -> Capture:
    """One forward pass of the target over the R sequences of the batch (R >= 1)."""
    return capture_sequences(target, batch.sequences(), taps)


@torch.no_grad()
def capture_sequences(target: Target, sequences: Sequence[Tensor], taps: tuple[int, ...]) -> Capture:
    """As capture, over R sequences [S]. Raises DsparkError for a sequence that the target cannot read."""
    for ids in sequences:  # a data module's samples have been looked at before, with their names
        refuse_foreign("a sequence", ids, target.vocab_size, target.config.max_position_embeddings)
    hidden, features, offsets = target.forward_sequences(sequences, taps)
    assert features is not None, "a draft model taps at least one target layer"
    assert offsets.diff().tolist() == [len(s) for s in sequences], "captured lengths differ from the sequences' lengths"
    row_ok = torch.isfinite(features.sum(dim=-1, dtype=torch.float32)) & torch.isfinite(
        hidden.sum(dim=-1, dtype=torch.float32)
    )
    sequence = torch.arange(len(sequences)).repeat_interleave(offsets.diff())
    bad_rows = torch.zeros(len(sequences), dtype=torch.int64).index_add_(0, sequence, (~row_ok).long())
    finite = bad_rows == 0
    if not bool(finite.all()):
        keep = finite[sequence][:, None]
        hidden, features = torch.where(keep, hidden, 0), torch.where(keep, features, 0)
    return Capture(hidden, features, finite)


def law_reader(target: Target, seen: Capture, drafter: Drafter, temperature: float) -> Callable[[Tensor], TargetLaw]:
    """rows [n] of the batch -> the target's law there over the draft vocabulary, for labels.laws_at. A known normaliser
    leaves the LM head's other columns out and changes no bit."""
    ids, hidden = drafter.draft_ids, seen.hidden
    if ids is None or temperature != 1.0 or seen.normaliser is None or seen.argmax is None:
        return lambda rows: target_law(target.logits(hidden[rows]), ids, temperature)
    head, normaliser, argmax = drafter.head_columns(target.dtype), seen.normaliser, seen.argmax
    return lambda rows: reduced_law(target.logits(hidden[rows], head), normaliser[rows], argmax[rows])


def blocks_of(batch: SequenceBatch, seen: Capture, slots: int) -> tuple[Blocks, Tensor, Tensor]:
    """The blocks, the row of each slot's label [B,K], and which slots count [B,K]; none of a broken sequence."""
    blocks = blocks_at(batch.ids, batch.offsets, batch.sequence, batch.anchors, slots)
    rows, counted = slot_mask(batch.loss_mask, blocks.begin, batch.offsets[batch.sequence + 1], batch.anchors, slots)
    return blocks, rows, counted & seen.finite[batch.sequence][:, None]


def refuse_precision(trainer: Trainer) -> None:
    """Raises DsparkError for a trainer.precision that keeps weights in another dtype than fp32: the least squares, the
    losses and the frozen batches are not made for it."""
    if trainer.precision not in PRECISIONS:
        raise DsparkError(
            f"trainer.precision: expected one of {', '.join(PRECISIONS)}, but got {trainer.precision}. The draft "
            "model's weights are trained in fp32; what the target runs in is model.init_args.target_dtype."
        )


@dataclass(slots=True)
class SkipCount:
    """Sequences seen and skipped for non-finite features, and the share past which the run stops."""

    max_share: float
    seen: int = 0
    skipped: int = 0
    names: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        check("max_skipped_share", self, max_share=SHARE)

    def update(self, batch: SequenceBatch, finite: Tensor) -> None:
        """Count one batch. Raises DsparkError when too many were skipped (judged on at least 20 sequences)."""
        bad = [name for name, ok in zip(batch.sample_ids, finite.tolist(), strict=True) if not ok]
        self.seen, self.skipped = self.seen + len(batch.sample_ids), self.skipped + len(bad)
        self.names = (self.names + bad)[-5:]
        if self.skipped > self.max_share * max(self.seen, 20):
            raise DsparkError(
                f"training: expected finite target features, but {self.skipped} of {self.seen} sequences had NaN or "
                f"infinity (last: {self.names}), more than the share {self.max_share}. Try target_dtype float32."
            )


class FrozenTargetModule(LightningModule):
    """A LightningModule that trains beside a frozen target, which is loaded in setup and is no submodule: checkpoints,
    optimiser and device moves never see it."""

    def __init__(self, target: str, target_dtype: str, max_skipped_share: float):
        super().__init__()
        self.target_source, self.target_dtype = target, target_dtype
        self.skips = SkipCount(max_skipped_share)
        self._target: Target | None = None
        self._resumed_from: list[str] = []

    def setup(self, stage: str) -> None:
        """Raises DsparkError for a precision that does not work, and for data that the target cannot read."""
        if self._trainer is None:
            return
        refuse_precision(self.trainer)
        data: Any = getattr(self.trainer, "datamodule", None)
        for split in SPLITS[stage] if hasattr(data, "refuse_foreign") else ():
            if split != "val" or self.trainer.limit_val_batches:
                data.refuse_foreign(split, self.target.vocab_size, self.target.config.max_position_embeddings)

    @property
    def target(self) -> Target:
        if self._target is None:
            self._target = load_target(self.target_source, self.target_dtype)
        return self._target

    def on_fit_start(self) -> None:
        """Back to training mode after an evaluation that an exception cut off: the trainer restores modes only at its
        end. Parts that their owner put in evaluation mode stay as they are."""
        if not self.training:
            self.train()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        mark(checkpoint, self.trainer)
        checkpoint[STEPS_KEY] = self.trainer.max_steps

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Raises DsparkError when a fit cannot go on from this checkpoint."""
        if self.fitting:
            refuse_inside(checkpoint, self.trainer.ckpt_path)
            self._resumed_from = self._told_resumed(checkpoint)

    def _told_resumed(self, checkpoint: dict[str, Any]) -> list[str]:
        """From which step a fit goes on; and that another max_steps bends the cosine, if that follows it."""
        total, before = self.trainer.max_steps, checkpoint.get(STEPS_KEY)
        end = f" of {total}" if total > 0 else ""
        lines = [f"resumed at step {int(checkpoint.get('global_step', 0))}{end}"]
        fixed = checkpoint.get("hyper_parameters", {}).get("optimizer", {}).get("total_steps")
        if before not in (None, total) and not fixed:
            lines.append(f"the learning rate's cosine now ends at step {total}, not {before} as before")
        return lines

    def on_train_start(self) -> None:
        """Says that it goes on, once nothing can refuse it any more."""
        if self.trainer.is_global_zero:
            for line in self._resumed_from:
                print(line, file=sys.stderr)
        self._resumed_from = []

    @property
    def fitting(self) -> bool:
        return self._trainer is not None and self.trainer.state.fn == TrainerFn.FITTING

    def refuse_other_optimizer(self, checkpoint: dict[str, Any], options: OptimizerOptions) -> None:
        """A resumed optimizer keeps the settings it was saved with: a recipe that asks for others is refused, for it
        would be ignored. Raises DsparkError."""
        if not self.fitting:
            return
        saved, given = checkpoint.get("hyper_parameters", {}).get("optimizer", {}), asdict(options)
        differing = [f"{k}: saved {saved.get(k)!r}, given {v!r}" for k, v in given.items() if saved.get(k) != v]
        if differing:
            raise DsparkError(
                f"checkpoint: expected the optimizer of this recipe, but got another ({'; '.join(differing)}). Resume "
                "with the settings that started the run, or start a new one."
            )

    @property
    def log_now(self) -> bool:
        """Whether this step's numbers are kept (every log_every_n_steps); nothing is computed for the log otherwise."""
        return (self.trainer.global_step + 1) % getattr(self.trainer, "log_every_n_steps", 1) == 0

    def zero_loss(self) -> Tensor:
        """A loss of 0 that touches every trainable parameter, so that ranks without data reduce with the others."""
        terms = [p.sum() * 0.0 for p in self.parameters() if p.requires_grad]
        return torch.stack(terms).sum()

    def across_ranks(self, values: Tensor) -> Tensor:
        """Sum of `values` over all ranks, detached."""
        values = values.detach()
        return values if self.trainer.world_size == 1 else self.trainer.strategy.reduce(values.clone(), reduce_op="sum")
