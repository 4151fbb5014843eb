"""Trains the confidence head alone: `lightning fit recipes/confidence.yaml`. The draft layers are frozen.

Labels are what the verifier did in untruncated rounds (or, by option, the analytic acceptance probability at the same
slots). A block's hidden states come from target features captured online, through the same inference ops as the runner
uses, so the head sees what it will see when it serves; only the head itself is differentiated.
The checkpoint holds the whole draft model (load_drafter reads it like one of DrafterModule), nothing of the target.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torchmetrics import Metric

from dspark.calibration.metrics import SlotAUROC, SlotBrier, SlotECE, SlotMeanObserved, SlotMeanPredicted, SlotNLL
from dspark.contracts import DsparkError
from dspark.drafter.model import Drafter
from dspark.training import losses
from dspark.training.adopt import refuse_other_shape, saved_config, tell_adopted
from dspark.training.batches import RoundBatch
from dspark.training.checkpoint import drafter_in, load_drafter, seal, served
from dspark.training.frozen import Capture, FrozenTargetModule, capture, law_reader
from dspark.training.labels import acceptance, laws_at, observed_events
from dspark.training.optim import make_optimizer
from dspark.training.options import OptimizerOptions, as_options, plain
from dspark.training.ranges import POSITIVE, check

_METRICS = {"ece": SlotECE, "brier": SlotBrier, "nll": SlotNLL, "auroc": SlotAUROC,
            "predicted": SlotMeanPredicted, "observed": SlotMeanObserved}  # fmt: skip


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
        reset_head: start the head from zero instead of from where drafter training left it.
        target_dtype: dtype the target runs in.
        max_skipped_share: share of sequences with non-finite features past which the run stops.
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
    ):
        super().__init__(target, target_dtype, max_skipped_share)
        self.source, self.label_kind, self.temperature = drafter, labels, temperature
        check("model", self, temperature=POSITIVE)
        self.optimizer_options = as_options(OptimizerOptions, optimizer or OptimizerOptions(warmup_steps=5))
        self.reset_head = reset_head
        self.drafter: Drafter  # built in setup()
        self._running: list[Drafter] = []  # in a list, so that it is no submodule
        rest = {"temperature": temperature, "reset_head": reset_head, "target_dtype": target_dtype}
        rest |= {"max_skipped_share": max_skipped_share, "optimizer": self.optimizer_options}
        self.save_hyperparameters(plain(target=target, drafter=drafter, labels=labels, **rest))

    def setup(self, stage: str) -> None:
        """Load target and draft model once; freeze all but the confidence head."""
        super().setup(stage)
        if self._running:
            return
        self.drafter = load_drafter(self.source, self.target)
        if self.drafter.confidence_head is not None and self.reset_head:
            for parameter in self.drafter.confidence_head.parameters():
                torch.nn.init.zeros_(parameter)
        self._prepare()

    def _prepare(self) -> None:
        """Freeze all but the confidence head of self.drafter; the runner's side of it, and metrics of its width."""
        if self.drafter.confidence_head is None:
            raise DsparkError(f"{self.source}: expected a draft model with a confidence head, but this one has none.")
        self.drafter.requires_grad_(False)
        self.drafter.confidence_head.requires_grad_(True)
        self._running[:] = [self._runner_side()]
        self.train(self.training)  # the trainer leaves modes as it finds them, and warns of frozen layers:
        warnings.filterwarnings("ignore", message=r".*module\(s\) in eval mode at the start of training.*")
        slots = self.drafter.config.num_predictions
        self.slot_metrics = torch.nn.ModuleDict({name: kind(slots) for name, kind in _METRICS.items()})

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
            wanted = want_draft or self.label_kind != "observed"
            draft_logits = drafter.draft_logits(hidden, anchor_ids, drafted) if wanted else None
        if draft_logits is not None and self.label_kind != "observed":
            labels = self._analytic(seen, begin + batch.anchors, observed, draft_logits)
        if self.training:  # fp32 with gradient; otherwise the runner's own arithmetic, bit for bit
            logits = self.drafter.draft_confidence(hidden.to(self.drafter.dtype), anchor_ids, drafted)
        else:
            logits = drafter.draft_confidence(hidden, anchor_ids, drafted)
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

    def validation_step(self, batch: RoundBatch, batch_idx: int) -> None:
        judged = self.judge(batch)
        if judged is None:
            return
        rates = torch.sigmoid(judged.logits)
        for name in self.slot_metrics:
            self._metric(name).update(rates, judged.labels, judged.observed)

    def _metric(self, name: str) -> Metric:
        metric = self.slot_metrics[name]
        assert isinstance(metric, Metric)
        return metric

    def on_validation_epoch_end(self) -> None:
        self._log_metrics("val")

    test_step = validation_step

    def on_test_epoch_end(self) -> None:
        self._log_metrics("test")

    def _log_metrics(self, stage: str) -> None:
        for name in self.slot_metrics:
            metric = self._metric(name)
            values = metric.compute().float().reshape(-1)  # torchmetrics squeezes a single value
            self.log_dict({f"{stage}/{name}/slot_{k}": value for k, value in enumerate(values, 1)})
            self.log(f"{stage}/{name}", values.nanmean(), prog_bar=name in ("ece", "nll"))
            metric.reset()

    def predict_step(self, batch: RoundBatch, batch_idx: int) -> dict[str, Any] | None:
        """What calibration reads, per round: confidence_logits [B,P] before any temperature, labels and observed [B,P],
        accepted and verified [B], draft_max_prob [B,P] (of the draft's law), domain, conversation (B names)."""
        judged = self.judge(batch, want_draft=True)
        if judged is None or judged.draft_logits is None:
            return None
        domains = [batch.domains[i] for i in batch.sequence.tolist()]
        return {
            "confidence_logits": judged.logits.detach(),
            "labels": judged.labels,
            "observed": judged.observed,
            "accepted": batch.accepted,
            "verified": batch.verified,
            "draft_max_prob": torch.softmax(judged.draft_logits, dim=-1).amax(dim=-1),
            "domain": domains,
            "conversation": list(batch.conversations),
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
            refuse_other_shape(saved, self.drafter.config, f"{self.source} is another than the run began with.")
        if saved != self.drafter.config:
            if self.trainer.is_global_zero:
                tell_adopted(saved, self.drafter.config)
            self.drafter = drafter_in(checkpoint, saved).bind(self.target.embed_weight, self.target.head_weight)
            self._prepare()
        self.refuse_other_optimizer(checkpoint, self.optimizer_options)
