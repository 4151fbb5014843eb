"""Trains the confidence head alone: `lightning fit recipes/confidence.yaml`. The draft layers are frozen.

Labels are what the verifier did in untruncated rounds (or, by option, the analytic acceptance probability at the same
slots). A block's hidden states come from target features captured online, through the same inference ops as the runner
uses, so the head sees what it will see when it serves; only the head itself is differentiated.
The checkpoint holds the whole draft model (load_drafter reads it like one of DrafterModule), nothing of the target.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from dspark.calibration.events import Events
from dspark.calibration.report import format_table
from dspark.contracts import DsparkError
from dspark.drafter.identity import drafter_hash, layers_hash, tensor_hashes
from dspark.drafter.model import Drafter
from dspark.training import losses
from dspark.training.adopt import refuse_other_shape, saved_config, tell_adopted
from dspark.training.batches import RoundBatch
from dspark.training.checkpoint import drafter_in, load_drafter, reading_the_law, seal, served
from dspark.training.confidence_test import (
    CALIBRATION,
    confidence_report,
    gathered,
    older_report,
    on_first_rank,
    splits,
)
from dspark.training.data import RoundsDataModule
from dspark.training.frozen import Capture, FrozenTargetModule, capture, law_reader
from dspark.training.labels import acceptance, laws_at, observed_events
from dspark.training.optim import make_optimizer
from dspark.training.options import OptimizerOptions, ReportOptions, as_options, plain
from dspark.training.ranges import POSITIVE, check
from dspark.training.sources import sampled_as
from dspark.training.watch import Watch


@dataclass(frozen=True, slots=True)
class Judged:
    """B rounds, P slots: raw confidence logits, labels in [0, 1], observed bool, draft logits [B,P,Vd] if wanted."""

    logits: Tensor
    labels: Tensor
    observed: Tensor
    draft_logits: Tensor | None


class ConfidenceModule(FrozenTargetModule):
    """The confidence head in training.

    Args:
        target: the target model the rollouts came from.
        drafter: the draft model: a checkpoint of DrafterModule (.ckpt) or an exported directory.
        labels: observed (what the verifier did), or the analytic acceptance probability of a verifier.
        temperature: of the laws behind analytic labels.
        optimizer: AdamW and its schedule.
        reset_head: start the head afresh instead of from where drafter training left it.
        target_dtype: dtype the target runs in.
        max_skipped_share: share of sequences with non-finite features past which the run stops.
        report: the calibration and its report that `lightning test` makes.
        with_law: the head reads the log-odds of the draft's own law too; with reset_head it starts from them alone. No
            other format than ours holds such a head.
    """

    tests_last: ClassVar[bool] = True  # an untrained head says nothing

    def __init__(
        self,
        target: str,
        drafter: str,
        labels: Literal["observed", "rejection", "coupled", "greedy"] = "observed",
        temperature: float = 1.0,
        optimizer: OptimizerOptions | None = None,
        reset_head: bool = False,
        target_dtype: str = "bfloat16",
        max_skipped_share: float = 0.05,
        report: ReportOptions | None = None,
        with_law: bool = False,
    ):
        super().__init__(target, target_dtype, max_skipped_share)
        self.report = as_options(ReportOptions, report or ReportOptions())
        self.source, self.label_kind, self.temperature = drafter, labels, temperature
        check("model", self, temperature=POSITIVE)
        self.optimizer_options = as_options(OptimizerOptions, optimizer or OptimizerOptions(warmup_steps=5))
        self.reset_head, self.with_law = reset_head, with_law
        self.drafter: Drafter  # built in setup()
        self._running: list[Drafter] = []  # in a list, so that it is no submodule
        rest: dict[str, Any] = {"temperature": temperature, "reset_head": reset_head, "with_law": with_law}
        rest |= {
            "target_dtype": target_dtype,
            "max_skipped_share": max_skipped_share,
            "optimizer": self.optimizer_options,
            "report": self.report,
        }
        self.save_hyperparameters(plain(target=target, drafter=drafter, labels=labels, **rest))

    def setup(self, stage: str) -> None:
        """Load target and draft model once; freeze all but the confidence head."""
        super().setup(stage)
        if self._running:
            return
        self.drafter = self._with_head(load_drafter(self.source, self.target))
        if self.with_law:
            self.drafter = reading_the_law(self.drafter, self.target)
        if self.reset_head and self.drafter.confidence_head is not None:
            self.drafter.confidence_head.forget()
        self._prepare()

    def _with_head(self, drafter: Drafter) -> Drafter:
        if drafter.confidence_head is None:
            raise DsparkError(f"{self.source}: expected a draft model with a confidence head, but this one has none.")
        return drafter

    def _prepare(self) -> None:
        """Freeze all but the confidence head of self.drafter; the runner's side of it."""
        head = self._with_head(self.drafter).confidence_head
        assert head is not None, "just looked"
        self.drafter.requires_grad_(False)
        head.requires_grad_(True)
        self._running[:] = [self._runner_side()]
        self.train(self.training)  # the trainer leaves modes as it finds them, and warns of frozen layers:
        warnings.filterwarnings("ignore", message=r".*module\(s\) in eval mode at the start of training.*")

    def _runner_side(self) -> Drafter:
        """The draft model in the runner's dtype: the frozen layers' outputs must be the ones that serving will see."""
        if self.drafter.dtype == self.target.dtype:
            return self.drafter
        return served(self.drafter, self.target)

    def configure_optimizers(self) -> Any:
        total = self.optimizer_options.total_steps or self.trainer.max_steps
        if total <= 0:
            raise DsparkError("trainer.max_steps: expected a number of steps for the schedule, but got none.")
        optimizer, schedule = make_optimizer(self.drafter.named_parameters(), self.optimizer_options, total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def train(self, mode: bool = True) -> ConfidenceModule:
        """Only the head ever enters training mode: the frozen layers keep to the inference ops."""
        super().train(mode)
        if self._running:
            self.drafter.eval()
            head, served = self.drafter.confidence_head, self._running[0].confidence_head
            assert head is not None, "setup() refuses a draft model without the head"
            assert served is not None, "the runner side is a copy"
            head.train(mode)
            if not mode and served is not head:
                served.load_state_dict(head.state_dict())
        return self

    # ---- one step -----------------------------------------------------------------------------------------------

    def judge(self, batch: RoundBatch, want_draft: bool = False) -> Judged | None:
        """The head on the rounds of a batch; None when it has none."""
        if len(batch.anchors) == 0:
            return None
        self._check_width(batch)
        slots, drafter = self.drafter.config.num_predictions, self._running[0]
        drafted = torch.nn.functional.pad(batch.drafted, (0, slots - batch.drafted.shape[1]))
        labels, observed = observed_events(batch.verified, batch.accepted, slots)
        seen = capture(self.target, batch, drafter.config.target_layer_ids)
        self.skips.update(batch, seen.finite)
        observed = observed & seen.finite[batch.sequence][:, None]
        begin = batch.offsets[batch.sequence]
        anchor_ids = batch.ids[begin + batch.anchors]
        with torch.no_grad():
            context = drafter.encode(seen.features, batch.positions())
            hidden = drafter.backbone(anchor_ids, batch.anchors, drafted, context, begin, begin + batch.anchors)
            wanted = want_draft or self.label_kind != "observed" or drafter.config.confidence_with_law
            draft_logits = drafter.draft_logits(hidden, anchor_ids, drafted) if wanted else None
            law = None if draft_logits is None else drafter.law(draft_logits, drafted)
        if draft_logits is not None and self.label_kind != "observed":
            labels = self._analytic(seen, begin + batch.anchors, observed, draft_logits)
        if self.training:  # fp32 with gradient; otherwise the runner's own arithmetic, bit for bit
            logits = self.drafter.draft_confidence(hidden.to(self.drafter.dtype), anchor_ids, drafted, law)
        else:
            logits = drafter.draft_confidence(hidden, anchor_ids, drafted, law)
        assert logits is not None, "setup() refuses a draft model without a confidence head"
        return Judged(logits, labels, observed, draft_logits)

    def _check_width(self, batch: RoundBatch) -> None:
        slots, width = self.drafter.config.num_predictions, int(batch.verified.max())
        if width > slots:
            raise DsparkError(
                f"data: expected rounds of at most {slots} drafted tokens for {self.source}, but got {width}. "
                "They were collected with another draft model."
            )

    def _analytic(self, seen: Capture, anchor_rows: Tensor, observed: Tensor, draft_logits: Tensor) -> Tensor:
        """Acceptance probability at the observed slots: there the sequence's own tokens are the drafted ones."""
        if not bool(observed.any()):
            return torch.zeros(observed.shape)
        rows = (anchor_rows[:, None] + torch.arange(observed.shape[1])).clamp_max(len(seen.hidden) - 1)
        law, index = laws_at(law_reader(self.target, seen, self.drafter, self.temperature), rows, observed)
        assert self.label_kind != "observed", "observed labels need no law"
        return acceptance(self.label_kind, draft_logits, law.rows(index), self.drafter.draft_ids, self.temperature)

    def training_step(self, batch: RoundBatch, batch_idx: int) -> Tensor:
        judged = self.judge(batch)
        zero = torch.zeros(())
        term = (zero, zero) if judged is None else self._bce(judged)
        count = self.across_ranks(term[1])
        loss = term[0] * self.trainer.world_size / count.clamp_min(1e-6) + self.zero_loss()
        if self.log_now:
            self.log("train/bce", loss.detach(), prog_bar=True, batch_size=1)
        return loss

    @staticmethod
    def _bce(judged: Judged) -> losses.SumCount:
        return losses.confidence_bce(judged.logits, judged.labels, judged.observed.float())

    # ---- validation and test ------------------------------------------------------------------------------------

    def _watch(self, split: str) -> None:
        """Every rank reads all samples of a split, so they agree on its domains."""
        domains = sorted({sample.domain for sample in self._data().samples(split)})
        self.watch = Watch(self.drafter.config.num_predictions, domains)

    def _data(self) -> RoundsDataModule:
        data = getattr(self.trainer, "datamodule", None)
        if not isinstance(data, RoundsDataModule):
            raise DsparkError(f"data: expected a RoundsDataModule, but got {type(data).__name__}.")
        return data

    def on_validation_epoch_start(self) -> None:
        self._watch("val")

    def validation_step(self, batch: RoundBatch, batch_idx: int) -> None:
        judged = self.judge(batch)
        if judged is not None:
            self._count(batch, judged)

    def _count(self, batch: RoundBatch, judged: Judged) -> None:
        domain = [batch.domains[i] for i in batch.sequence.tolist()]
        rates = torch.sigmoid(judged.logits)
        self.watch.update(rates, judged.labels, judged.observed, batch.accepted, batch.verified, domain)

    def on_validation_epoch_end(self) -> None:
        self._log("val")

    def _log(self, stage: str) -> None:
        """Everything goes to the loggers; what `validate` prints are the means over slots. `test` has its report."""
        self.streamed = {f"{stage}/{name}": float(value) for name, value in self.watch.told().items()}
        printed = [name for name in self.streamed if stage == "val" and name.count("/") == 2]
        for name in printed:
            on_bar = name in ("val/survival/ece", "val/conditional/nll")
            self.log(name, self.streamed[name], prog_bar=on_bar)
        rest = {name: value for name, value in self.streamed.items() if name not in printed}
        for logger in [] if self.trainer.sanity_checking else self.trainer.loggers:
            logger.log_metrics(rest, self.global_step)

    def on_test_start(self) -> None:
        """Raises DsparkError when there is nothing to calibrate on, or nothing to compare with."""
        data = self._data()
        if not data.paths["predict"]:
            raise DsparkError(
                "test: expected rounds to calibrate on in data.predict, but got none. Give "
                "--data.init_args.predict='[FOLDER]' (another split than data.test)."
            )
        data.refuse_foreign("predict", self.target.vocab_size, self.target.config.max_position_embeddings)
        self.refuse_other_drafts(data, "test", "predict")
        self._older = older_report(self.report, self.drafter.config.num_predictions)
        self.tested: list[dict[str, Any]] = []

    def on_fit_start(self) -> None:
        super().on_fit_start()
        self.refuse_other_drafts(self._data(), "train", *(["val"] if self.trainer.limit_val_batches else []))

    def refuse_other_drafts(self, data: RoundsDataModule, *splits: str) -> None:
        """Raises DsparkError for rounds that this draft model has not drafted."""
        layers = layers_hash(self.drafter.config, tensor_hashes(self.drafter.state_dict()))
        for split in splits:
            data.refuse_other_drafts(split, layers, self.source)

    def on_test_epoch_start(self) -> None:
        self._watch("test")

    def test_step(self, batch: RoundBatch, batch_idx: int) -> None:
        judged = self.judge(batch, want_draft=True)
        if judged is not None:
            self._count(batch, judged)
            self.tested.append(self._record(batch, judged))

    def on_test_epoch_end(self) -> None:
        """The streamed figures of the head as it is, then calibration and report."""
        self._log("test")
        found = (self.predict_step(batch, i) for i, batch in enumerate(self._data().predict_dataloader()))
        calibration = [part for part in found if part is not None]
        world = self.trainer.world_size
        tested, fitted_on = splits(gathered(self.tested, world), gathered(calibration, world))
        on_first_rank(self.trainer, lambda: self._report(tested, fitted_on))

    def _report(self, tested: Events, fitted_on: Events) -> None:
        folder = Path(self.report.out or Path(self.trainer.default_root_dir) / "report")
        paths = self._data().paths
        facts = {"checkpoint": str(self.trainer.ckpt_path or self.source), "target": self.target_source,
                 "labels": self.label_kind, "calibrated on": paths["predict"], "tested on": paths["test"],
                 "sampled": sampled_as(paths["test"])}  # fmt: skip
        logs = next((logger.log_dir for logger in self.trainer.loggers if isinstance(logger, TensorBoardLogger)), None)
        board = None if logs is None else Path(logs) / "report"
        identity = drafter_hash(self.drafter)
        report = confidence_report(tested, fitted_on, self.report, identity, folder, self._older, facts, board)
        print(f"{format_table(report)}\n\nwritten to {folder}/report.html, {CALIBRATION}")

    def predict_step(self, batch: RoundBatch, batch_idx: int) -> dict[str, Any] | None:
        """What calibration reads, or None for a batch without rounds: see _record."""
        judged = self.judge(batch, want_draft=True)
        return None if judged is None else self._record(batch, judged)

    @staticmethod
    def _record(batch: RoundBatch, judged: Judged) -> dict[str, Any]:
        """Per round of a sequence with finite features: confidence_logits [B,P] before any calibration, labels and
        observed [B,P], accepted and verified [B], draft_max_prob [B,P] (of the draft's law), domain, conversation,
        sequence (B names), anchor [B]."""
        assert judged.draft_logits is not None, "judged with want_draft"
        rows = judged.observed.any(dim=-1).nonzero().flatten()  # something was verified in every round
        kept, sequences = rows.tolist(), batch.sequence.tolist()
        return {
            "confidence_logits": judged.logits.detach()[rows],
            "labels": judged.labels[rows],
            "observed": judged.observed[rows],
            "accepted": batch.accepted[rows],
            "verified": batch.verified[rows],
            "draft_max_prob": torch.softmax(judged.draft_logits[rows], dim=-1).amax(dim=-1),
            "anchor": batch.anchors[rows],
            "domain": [batch.domains[sequences[i]] for i in kept],
            "conversation": [batch.conversations[i] for i in kept],
            "sequence": [batch.sample_ids[sequences[i]] for i in kept],
        }

    # ---- checkpoints --------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        seal(checkpoint, self.drafter.config)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Raises DsparkError as DrafterModule's; an evaluation takes the checkpoint's draft model as it is."""
        super().on_load_checkpoint(checkpoint)
        saved = saved_config(checkpoint, self.drafter.config)
        if self.fitting:
            reads = saved.confidence_with_law
            advice = f"{self.source} is another than the run began with."
            if reads != self.drafter.config.confidence_with_law:
                advice = f"Give --model.init_args.with_law={str(reads).lower()}, or start a new run."
            refuse_other_shape(saved, self.drafter.config, advice)
            self._refuse_other_layers(drafter_in(checkpoint, saved))
        else:
            if saved != self.drafter.config and self.trainer.is_global_zero:
                tell_adopted(saved, self.drafter.config)
            # All of it, the frozen layers too: `drafter:` may name a model that was trained again since.
            self.drafter = drafter_in(checkpoint, saved).bind(self.target.embed_weight, self.target.head_weight)
            self._prepare()
        self.refuse_other_optimizer(checkpoint, self.optimizer_options)

    def _refuse_other_layers(self, saved: Drafter) -> None:
        """A fit goes on with the layers that it froze, not with those of a draft model that was trained again."""
        ours, frozen = self.drafter.state_dict(), saved.state_dict()
        other = [name for name in frozen if "confidence_head" not in name and not torch.equal(frozen[name], ours[name])]
        if other:
            raise DsparkError(
                f"checkpoint: expected the draft layers of {self.source}, but it was begun with others ({other[0]} and "
                f"{len(other) - 1} more differ): that draft model was trained again since. Start a new run."
            )
