"""Trains the draft model: `lightning fit recipes/drafter.yaml`. Backbone, Markov head and confidence head together.

One step: run the frozen target on the batch (features and laws, no gradient), encode the context, run every block
teacher-forced, take the three losses as weighted means. The draft model is the only thing with parameters here; a
checkpoint holds it, its config and nothing of the target.
Left out on purpose: draft and target on different devices, an average of weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor

from dspark.contracts import DsparkError
from dspark.drafter.blocks import Blocks, blocks_at
from dspark.drafter.config import DrafterConfig
from dspark.drafter.initialise import bigram_counts, initialise_from_target
from dspark.drafter.model import Drafter, DraftOutput
from dspark.drafter.regression import start_by_regression
from dspark.training import losses
from dspark.training.batches import SequenceBatch
from dspark.training.checkpoint import CHECKPOINT_KEY, name_moments, seal
from dspark.training.feature_report import FeatureReport, announce
from dspark.training.features import FeatureCache
from dspark.training.frozen import Capture, FrozenTargetModule, blocks_of, capture, laws_at
from dspark.training.labels import TargetLaw, acceptance, overlap_from_l1, slot_weights
from dspark.training.metrics import MeanPer, expected_tau
from dspark.training.optim import make_optimizer
from dspark.training.options import (
    DrafterOptions,
    FeatureOptions,
    InitOptions,
    LossOptions,
    OptimizerOptions,
    as_options,
    plain,
)
from dspark.training.sharding import fill, forget_packed, is_sharded, moment_order, refuse_numbered, shard, whole
from dspark.training.start import observe
from dspark.training.vocabulary import draft_vocabulary


@dataclass(frozen=True, slots=True)
class Judged:
    """One batch of B blocks, P slots: what the draft says, the target's law there ([B,P,...]), which slots count."""

    blocks: Blocks
    output: DraftOutput
    law: TargetLaw
    counted: Tensor


class DrafterModule(FrozenTargetModule):
    """The draft model in training.

    Args:
        target: the target model: a local Hugging Face directory, a hub id, a .gguf file, or an embedded name.
        drafter: shape of the draft model.
        losses: weights of the losses.
        optimizer: AdamW and its schedule.
        init: where the draft model starts.
        features: where the target's features come from.
        target_dtype: dtype the target runs in; what the runner will use, so that features agree.
        seed: keys the initial weights.
        max_skipped_share: share of sequences with non-finite features past which the run stops.
    """

    def __init__(
        self,
        target: str,
        drafter: DrafterOptions,
        losses: LossOptions | None = None,
        optimizer: OptimizerOptions | None = None,
        init: InitOptions | None = None,
        target_dtype: str = "bfloat16",
        seed: int = 0,
        max_skipped_share: float = 0.05,
        features: FeatureOptions | None = None,
    ):
        super().__init__(target, target_dtype, max_skipped_share)
        self.shape = as_options(DrafterOptions, drafter)
        self.losses = as_options(LossOptions, losses or LossOptions())
        self.optimizer_options = as_options(OptimizerOptions, optimizer or OptimizerOptions())
        self.init = as_options(InitOptions, init or InitOptions())
        self.features = as_options(FeatureOptions, features or FeatureOptions())
        if self.init.regression and not self.shape.input_fusion:
            raise DsparkError(
                "init.regression: expected drafter.input_fusion: true with it, but got false. Switch that on, or set "
                "init.regression: 0."
            )
        self.seed = seed
        self.config: DrafterConfig  # both built in setup()
        self.drafter: Drafter
        self.cache: FeatureCache | None = None
        self._ready = False
        given = {"drafter": self.shape, "losses": self.losses, "optimizer": self.optimizer_options, "init": self.init}
        given |= {"features": self.features}
        rest = {"target": target, "target_dtype": target_dtype, "seed": seed, "max_skipped_share": max_skipped_share}
        self.save_hyperparameters(plain(**given, **rest))

    # ---- construction -------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Load the target and build the draft model for it, once."""
        if not self._ready:
            self._ready = True
            self._build()
        if self.features.cache:
            self.cache = self.cache or FeatureCache(self.features.cache, self.target, self.config.target_layer_ids)
            announce(self.cache, self._data(), self.trainer, stage)

    def _build(self) -> None:
        ids = self._draft_ids()
        self.config = self._config(0 if ids is None else len(ids))
        self.drafter = Drafter(self.config, ids, seed=self.seed)
        self.drafter.bind(self.target.embed_weight, self.target.head_weight)
        if self.init.from_target:
            self._start_from_target()
        slots = self.config.num_predictions
        kinds = {name: MeanPer() for name in ("tau", "l1", "ce", "confidence", *self._weights)}
        self.val_metrics = torch.nn.ModuleDict({**kinds, "acceptance": MeanPer(slots)})

    def _start_from_target(self) -> None:
        wanted = self.init.bigrams and self.shape.markov_rank > 0 and not self.init.regression
        bigrams = bigram_counts(self._data().train_sequences()) if wanted else None
        initialise_from_target(
            self.drafter, self.target, layers=self.init.layers, final_norm=self.init.final_norm,
            residual_scale=self.init.residual_scale, bigrams=bigrams, seed=self.seed,
        )  # fmt: skip

    def on_train_start(self) -> None:
        """The regression start, on the first rank for all; a resumed run has its weights already (that it is one is
        known only now)."""
        if not self.init.regression or self.trainer.ckpt_path:
            return
        drafter = whole(self.drafter).bind(self.target.embed_weight, self.target.head_weight)
        if self.trainer.is_global_zero:
            samples, quiet = self._data().samples("train"), self.trainer.progress_bar_callback is None
            seen = observe(self._look, samples, self.init.regression, self.config.num_predictions, self.seed, quiet)
            start_by_regression(drafter, seen, self.init.ridge)
        if self.trainer.world_size > 1:
            fill(self.drafter, self.trainer.strategy.broadcast(drafter.state_dict()))

    def _look(self, batch: SequenceBatch) -> Capture:
        """What the target says about the batch: from the cache, if there is one."""
        if self.cache is None:
            return capture(self.target, batch, self.config.target_layer_ids)
        return self.cache.capture(batch, self.training)

    def configure_callbacks(self) -> list[Callback]:
        return [FeatureReport()] if self.features.cache else []

    def configure_model(self) -> None:
        shard(self, self.drafter, self.trainer)

    def on_validation_start(self) -> None:
        forget_packed(self)

    on_test_start = on_validation_start

    def _config(self, draft_vocab_size: int) -> DrafterConfig:
        chosen = {k: v for k, v in plain(shape=self.shape)["shape"].items() if k != "draft_vocab_size"}
        if chosen["mask_token_id"] in self.target.eos_ids:
            raise DsparkError(
                f"drafter.mask_token_id: expected an id no text uses, but got the stop id {chosen['mask_token_id']}."
            )
        mine = self.target.config
        kept = {"qk_norm": mine.qk_norm, "attention_bias": mine.qkv_bias, "mlp_bias": mine.mlp_bias}
        kept |= {"attention_out_bias": mine.output_bias}
        return DrafterConfig.for_target(self.target, **chosen, **kept, draft_vocab_size=draft_vocab_size)

    def _data(self) -> Any:
        data = getattr(self.trainer, "datamodule", None)
        if data is None or not hasattr(data, "response_counts"):
            raise DsparkError(
                "drafter: expected a TrajectoryDataModule, which draft_vocab_size, init.bigrams, init.regression and "
                f"features.cache read, but got {type(data).__name__}. Give one, or switch the four off."
            )
        return data

    def _draft_ids(self) -> Tensor | None:
        size = self.shape.draft_vocab_size
        if size == 0 or size >= self.target.vocab_size:
            return None
        counts = self._data().response_counts(self.target.vocab_size)
        return draft_vocabulary(counts, size, [*self._data().stop_ids(), *self.target.eos_ids])

    @property
    def _weights(self) -> dict[str, float]:
        """Weight of each loss, in a fixed order: what ranks add up must line up."""
        both = {"ce": self.losses.ce, "l1": self.losses.l1}
        both |= {"soft_ce": self.losses.soft_ce} if self.losses.soft_ce else {}
        return both | ({"confidence": self.losses.confidence} if self.shape.confidence_head else {})

    def configure_optimizers(self) -> Any:
        total = self.optimizer_options.total_steps or self.trainer.max_steps
        if total <= 0:
            raise DsparkError("trainer.max_steps: expected a number of steps for the schedule, but got none.")
        optimizer, schedule = make_optimizer(self.drafter.named_parameters(), self.optimizer_options, total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    # ---- one step -----------------------------------------------------------------------------------------------

    def training_step(self, batch: SequenceBatch, batch_idx: int) -> Tensor:
        judged = self._judge_together(batch)
        loss, means = self._combine(self._loss_terms(judged) if judged else {})
        if self.log_now:
            self._log_step(means)
        return loss

    def _combine(self, terms: dict[str, losses.SumCount]) -> tuple[Tensor, dict[str, Tensor]]:
        """The weighted sum of the losses' means, and the means for the log: sums and weights are added over all ranks
        before they are divided. A rank where nothing counts gives a loss of 0 that touches every parameter."""
        none = (torch.zeros(()), torch.zeros(()))
        table = torch.stack([torch.stack(terms.get(name, none)) for name in self._weights])
        totals = self.across_ranks(table)
        counts, world = totals[:, 1].clamp_min(1e-6), self.trainer.world_size
        weights = torch.tensor(list(self._weights.values()))
        loss = (weights * table[:, 0] / counts).sum() * world  # gradients are averaged over ranks: undo it
        if (not terms or world > 1) and not is_sharded(self):
            loss = loss + self.zero_loss()
        return loss, dict(zip(self._weights, totals[:, 0] / counts, strict=True))

    def _log_step(self, means: dict[str, Tensor]) -> None:
        total = sum(self._weights[name] * value for name, value in means.items())
        self.log("train/loss", total, prog_bar=True, batch_size=1)
        values = {f"train/{name}": value for name, value in means.items()}
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        skipped = self.across_ranks(torch.tensor(float(self.skips.skipped)))
        self.log_dict({**values, "train/lr": rate, "train/skipped": skipped}, batch_size=1)

    def _judge(self, batch: SequenceBatch) -> Judged | None:
        """Draft model and target on one batch; None when no slot counts."""
        if not batch.sample_ids:
            return None
        seen = self._look(batch)
        self.skips.update(batch, seen.finite)
        blocks, rows, counted = blocks_of(batch, seen, self.config.num_predictions)
        if not bool(counted.any()):
            return None
        ids, temperature = self.drafter.draft_ids, self.losses.temperature
        law, index = laws_at(self.target, seen.hidden, rows - 1, counted, ids, temperature)
        context = self.drafter.encode(seen.features, batch.positions())
        return Judged(blocks, self.drafter.teacher_forced(*blocks.inputs(context)), law.rows(index), counted)

    def _judge_together(self, batch: SequenceBatch) -> Judged | None:
        return self._judge(batch) or (self._idle() if is_sharded(self) else None)

    def _idle(self) -> Judged:
        """One block that counts nothing, for a rank without any: slices of a model meet in its forward and backward, so
        every rank has to go through them."""
        anchor, slots = torch.zeros(1, dtype=torch.int64), self.config.num_predictions
        blocks = blocks_at(torch.zeros(2, dtype=torch.int64), torch.tensor([0, 2]), anchor, anchor + 1, slots)
        width = len(self.config.target_layer_ids) * self.config.hidden_size
        output = self.drafter.teacher_forced(
            *blocks.inputs(self.drafter.encode(torch.zeros(2, width), torch.arange(2)))
        )
        law = TargetLaw(torch.zeros_like(output.logits), torch.zeros(1, slots), torch.zeros(1, slots).long())
        return Judged(blocks, output, law, torch.zeros(1, slots, dtype=torch.bool))

    def _loss_terms(self, judged: Judged) -> dict[str, losses.SumCount]:
        """(sum, sum of weights) of each loss."""
        weights = slot_weights(judged.counted, self.losses.decay)
        logits, law, temperature = judged.output.logits, judged.law, self.losses.temperature
        log_draft = torch.log_softmax(logits, dim=-1)
        terms = {"ce": losses.cross_entropy(log_draft, self.drafter.to_columns(judged.blocks.labels), weights)}
        if temperature != 1.0:  # the law's own temperature: both laws are compared as they will be sampled
            log_draft = torch.log_softmax(logits / temperature, dim=-1)
        if self.losses.soft_ce:
            terms["soft_ce"] = losses.soft_cross_entropy(log_draft, law, weights)
        distance = losses.l1_distance(log_draft.exp(), law)
        terms["l1"] = losses.weighted(distance, weights)
        if judged.output.confidence_logits is not None:
            label = overlap_from_l1(distance.detach()) if self.losses.label == "rejection" else self._labels(judged)
            terms["confidence"] = losses.confidence_bce(judged.output.confidence_logits, label, weights)
        return terms

    def _labels(self, judged: Judged) -> Tensor:
        ids, temperature = self.drafter.draft_ids, self.losses.temperature
        return acceptance(self.losses.label, judged.output.logits, judged.law, ids, temperature)

    # ---- validation ---------------------------------------------------------------------------------------------

    def validation_step(self, batch: SequenceBatch, batch_idx: int) -> None:
        judged = self._judge_together(batch)
        if judged is None:
            return
        accepted, counted = self._labels(judged), judged.counted
        self._metric("tau").update(*expected_tau(accepted, counted))
        self._metric("acceptance").update((accepted * counted).sum(0), counted.float().sum(0))
        for name, (total, count) in self._loss_terms(judged).items():
            self._metric(name).update(total, count)

    def _metric(self, name: str) -> MeanPer:
        metric = self.val_metrics[name]
        assert isinstance(metric, MeanPer)
        return metric

    def on_validation_epoch_end(self) -> None:
        for name in self.val_metrics:
            metric = self._metric(name)
            values = metric.compute().float().reshape(-1)  # torchmetrics squeezes a single value
            if name == "acceptance":
                self.log_dict({f"val/acceptance_{k}": value for k, value in enumerate(values)})
            else:
                self.log(f"val/{name}", values[0], prog_bar=name == "tau")
            metric.reset()

    test_step = validation_step
    on_test_epoch_end = on_validation_epoch_end

    # ---- checkpoints --------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        seal(checkpoint, self.config)
        name_moments(checkpoint, moment_order(self, self.trainer.optimizers))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Raises DsparkError when the checkpoint holds another draft model than the recipe describes."""
        saved, given = checkpoint.get(CHECKPOINT_KEY, {}), self.config.to_dict()
        differing = [f"{k}: saved {saved.get(k)!r}, given {given[k]!r}" for k in given if saved.get(k) != given[k]]
        if differing:
            raise DsparkError(
                f"checkpoint: expected the draft model of this recipe, but got another: {'; '.join(differing)}. "
                "Resume with the recipe (and target) that started the run."
            )
        self.refuse_other_optimizer(checkpoint, self.optimizer_options)
        if is_sharded(self):
            refuse_numbered(checkpoint)
