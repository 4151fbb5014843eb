"""Trains the draft model: `lightning fit recipes/drafter.yaml`. Backbone, Markov head and confidence head together.

One step: run the frozen target on the batch (features and laws, no gradient), encode the context, run every block
teacher-forced, take the three losses as weighted means. The draft model is the only thing with parameters here; a
checkpoint holds it, its config and nothing of the target.
Left out on purpose: draft and target on different devices, an average of weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning.pytorch import Callback
from torch import Tensor

from dspark.contracts import DsparkError
from dspark.drafter.blocks import blocks_at
from dspark.drafter.config import DrafterConfig
from dspark.drafter.initialise import bigram_counts, initialise_from_target
from dspark.drafter.model import Drafter
from dspark.drafter.regression import start_by_regression
from dspark.scorecard.report import refuse_difference
from dspark.scorecard.text import report_text
from dspark.training.adopt import refuse_other_shape, saved_config, shape_of, tell_adopted
from dspark.training.bars import HiddenBar
from dspark.training.batches import SequenceBatch
from dspark.training.blueprint import draft_config, draft_ids, refuse_contradictions
from dspark.training.checkpoint import name_moments, seal
from dspark.training.data import NOTHING_TO_PREDICT
from dspark.training.drafter_test import rollout_report, write_report
from dspark.training.feature_report import FeatureReport, announce
from dspark.training.features import FeatureCache
from dspark.training.frozen import Capture, FrozenTargetModule, blocks_of, capture, law_reader
from dspark.training.labels import TargetLaw, laws_at
from dspark.training.metrics import MeanPer, expected_tau
from dspark.training.objective import Judged, alphas, counts, measure, weigh
from dspark.training.optim import make_optimizer
from dspark.training.options import (
    DrafterOptions,
    FeatureOptions,
    InitOptions,
    LossOptions,
    OptimizerOptions,
    RolloutOptions,
    as_options,
    plain,
)
from dspark.training.sharding import fill, forget_packed, is_sharded, moment_order, refuse_numbered, shard, whole
from dspark.training.start import observe


class DrafterModule(FrozenTargetModule):
    """The draft model in training.

    Args:
        target: the target model: a local Hugging Face directory, a hub id, a .gguf file, or an embedded name.
        drafter: shape of the draft model.
        losses: weights of the losses.
        optimizer: AdamW and its schedule.
        init: where the draft model starts.
        test: the speculative rollouts of `lightning test`.
        features: where the target's features come from.
        target_dtype: dtype the target runs in; what the runner will use, so that features agree.
        seed: keys the initial weights.
        max_skipped_share: share of sequences with non-finite features past which the run stops.
    """

    tests_last: ClassVar[bool] = True  # `lightning test` without --ckpt_path takes last.ckpt

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
        test: RolloutOptions | None = None,
        features: FeatureOptions | None = None,
    ):
        super().__init__(target, target_dtype, max_skipped_share)
        self.shape = as_options(DrafterOptions, drafter)
        self.losses = as_options(LossOptions, losses or LossOptions())
        self.optimizer_options = as_options(OptimizerOptions, optimizer or OptimizerOptions())
        self.init = as_options(InitOptions, init or InitOptions())
        self.features = as_options(FeatureOptions, features or FeatureOptions())
        refuse_contradictions(self.shape, self.init)
        self.seed = seed
        self.config: DrafterConfig  # both built in setup()
        self.drafter: Drafter
        self.test = as_options(RolloutOptions, test or RolloutOptions())
        self.cache: FeatureCache | None = None
        self._ready = self._blank = False
        self._lightnings_bar = HiddenBar()
        self._origin: dict[str, Any] = {}  # of the weights, for the report
        given = {"drafter": self.shape, "losses": self.losses, "optimizer": self.optimizer_options, "init": self.init}
        given |= {"features": self.features}
        rest = {"target": target, "target_dtype": target_dtype, "seed": seed, "max_skipped_share": max_skipped_share}
        self.save_hyperparameters(plain(**given, **rest, test=self.test))

    # ---- construction -------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Load the target and build the draft model for it, once."""
        if stage == "predict":
            raise DsparkError(NOTHING_TO_PREDICT)
        super().setup(stage)
        self._lightnings_bar.show()  # where an exception cut off the test that hid it
        if stage == "test" and self._all_rollouts():
            self._lightnings_bar.hide(self.trainer)
        if not self._ready:
            self._ready = True
            self._blank = stage == "test"  # all of it comes from the checkpoint, so no training data are read
            self._build()
        if self.features.cache and stage != "test":
            self.cache = self.cache or FeatureCache(self.features.cache, self.target, self.config.target_layer_ids)
            announce(self.cache, self._data(), self.trainer, stage)

    def _build(self) -> None:
        self.config = draft_config(self.shape, self.target)
        ids = None if self._blank else draft_ids(self.config, self.target, self._data)
        self.drafter = Drafter(self.config, ids, seed=self.seed)
        self.drafter.bind(self.target.embed_weight, self.target.head_weight)
        if self.init.from_target and not self._blank:
            self._start_from_target()
        self._make_metrics()

    def _make_metrics(self) -> None:
        slots = self.config.num_predictions
        kinds = {name: MeanPer() for name in ("tau", *self._told)}
        self.val_metrics = torch.nn.ModuleDict({**kinds, "acceptance": MeanPer(slots)})

    def _become(self, config: DrafterConfig) -> None:
        """Another shape than the recipe's, still without its weights."""
        self.config, self.shape = config, shape_of(self.shape, config)
        self.drafter = Drafter(config, seed=self.seed).bind(self.target.embed_weight, self.target.head_weight)
        self._make_metrics()
        if self.cache is not None:
            self.cache = FeatureCache(str(self.features.cache), self.target, config.target_layer_ids)

    def _start_from_target(self) -> None:
        solved = self.init.regression and self.shape.architecture == "dspark"  # its Markov head too
        wanted = self.init.bigrams and self.shape.markov_rank > 0 and not solved
        bigrams = bigram_counts(self._data().train_sequences()) if wanted else None
        initialise_from_target(
            self.drafter, self.target, layers=self.init.layers, final_norm=self.init.final_norm,
            residual_scale=self.init.residual_scale, bigrams=bigrams, seed=self.seed,
        )  # fmt: skip

    def on_train_start(self) -> None:
        """The regression start, on the first rank for all; a resumed run has its weights already (that it is one is
        known only now)."""
        super().on_train_start()
        if not self.init.regression or self.trainer.ckpt_path:
            return
        drafter = whole(self.drafter).bind(self.target.embed_weight, self.target.head_weight)
        if self.trainer.is_global_zero:
            samples, quiet = self._data().samples("train"), self.trainer.progress_bar_callback is None
            seen = observe(self._look, samples, self.init.regression, self.config.num_predictions, self.seed, quiet)
            start_by_regression(drafter, seen, self.init.ridge)
        if self.trainer.world_size > 1 or is_sharded(self):
            fill(self.drafter, self.trainer.strategy.broadcast(drafter.state_dict()))

    def _look(self, batch: SequenceBatch, step: bool = False) -> Capture:
        """What the target says about the batch: from the cache, if there is one. step: asked in a training step."""
        if self.cache is None or self.trainer.testing:
            return capture(self.target, batch, self.config.target_layer_ids)
        return self.cache.capture(batch, step)

    def configure_callbacks(self) -> list[Callback]:
        return [FeatureReport()] if self.features.cache else []

    def configure_model(self) -> None:
        shard(self, self.drafter, self.trainer)

    def on_validation_start(self) -> None:
        forget_packed(self)

    def _data(self) -> Any:
        data = getattr(self.trainer, "datamodule", None)
        if data is None or not hasattr(data, "response_counts"):
            raise DsparkError(
                "drafter: expected a TrajectoryDataModule, which draft_vocab_size, init.bigrams, init.regression and "
                f"features.cache read, but got {type(data).__name__}. Give one, or switch the four off."
            )
        return data

    @property
    def _alphas(self) -> dict[str, float]:
        return alphas(self.losses, self.shape.confidence_head)

    @property
    def _told(self) -> tuple[str, ...]:
        """The losses that validation tells. A law cut to candidates has no finite cross entropy: a label may be none of
        them."""
        return tuple(name for name in self._alphas if not self.shape.candidates or name not in ("ce", "soft_ce"))

    def configure_optimizers(self) -> Any:
        total = self.optimizer_options.total_steps or self.trainer.max_steps
        if total <= 0:
            raise DsparkError("trainer.max_steps: expected a number of steps for the schedule, but got none.")
        optimizer, schedule = make_optimizer(self.drafter.named_parameters(), self.optimizer_options, total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    # ---- one step -----------------------------------------------------------------------------------------------

    def training_step(self, batch: SequenceBatch, batch_idx: int) -> Tensor:
        judged = self._judge_together(batch)
        loss, means = self._losses(judged)
        if self.log_now:
            self._log_step(means)
        return loss

    def _losses(self, judged: Judged | None) -> tuple[Tensor, dict[str, Tensor]]:
        """The weighted sum of the losses' means, and those means over all ranks where they are logged. A rank where
        nothing counts gives a loss of 0 that touches every parameter."""
        loss, names = torch.zeros(()), self._alphas
        weights = weigh(self.drafter, judged, self.losses) if judged else torch.zeros(())
        table = counts(judged, weights, names) if judged else torch.zeros(len(names))
        totals = self.across_ranks(table).clamp_min(1e-6)  # added over ranks before anything is divided by them
        sums = torch.zeros(len(names))
        if judged:
            measured = measure(self.drafter, judged, self.losses, weights, self._shares(totals))
            loss, sums = measured.loss, torch.stack([measured.sums[name] for name in names])
        if (not judged or self.trainer.world_size > 1) and not is_sharded(self):
            loss = loss + self.zero_loss()
        means = self.across_ranks(sums) / totals if self.log_now else sums / totals
        return loss, dict(zip(names, means, strict=True))

    def _shares(self, totals: Tensor) -> dict[str, float]:
        """What each loss' sum is multiplied by. Gradients are averaged over ranks: that is undone."""
        world = self.trainer.world_size
        return {k: a * world / total for (k, a), total in zip(self._alphas.items(), totals.tolist(), strict=True)}

    def _log_step(self, means: dict[str, Tensor]) -> None:
        total = sum(self._alphas[name] * value for name, value in means.items())
        self.log("train/loss", total, prog_bar=True, batch_size=1)
        values = {f"train/{name}": value for name, value in means.items()}
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        skipped = self.across_ranks(torch.tensor(float(self.skips.skipped)))
        self.log_dict({**values, "train/lr": rate, "train/skipped": skipped}, batch_size=1)

    def _judge(self, batch: SequenceBatch) -> Judged | None:
        """Draft model and target on one batch; None when no slot counts."""
        if not batch.sample_ids:
            return None
        seen = self._look(batch, self.training)
        self.skips.update(batch, seen.finite)
        blocks, rows, counted = blocks_of(batch, seen, self.config.num_predictions)
        if not bool(counted.any()):
            return None
        law_of = law_reader(self.target, seen, self.drafter, self.losses.temperature)
        law, index = laws_at(law_of, rows - 1, counted)
        context = self.drafter.encode(seen.features, batch.positions())
        states = self.drafter.block_states(*blocks.inputs(context))
        return Judged(states, self.drafter.to_columns(blocks.labels), law, index, counted)

    def _judge_together(self, batch: SequenceBatch) -> Judged | None:
        return self._judge(batch) or (self._idle() if is_sharded(self) else None)

    def _idle(self) -> Judged:
        """One block that counts nothing, for a rank without any: slices of a model meet in its forward and backward, so
        every rank has to go through them."""
        anchor, slots = torch.zeros(1, dtype=torch.int64), self.config.num_predictions
        blocks = blocks_at(torch.zeros(2, dtype=torch.int64), torch.tensor([0, 2]), anchor, anchor + 1, slots)
        width = len(self.config.target_layer_ids) * self.config.hidden_size
        context = self.drafter.encode(torch.zeros(2, width), torch.arange(2))
        states, nothing = self.drafter.block_states(*blocks.inputs(context)), torch.zeros(1, slots, dtype=torch.int64)
        law = TargetLaw(torch.zeros(1, self.config.num_columns), torch.zeros(1), anchor)
        return Judged(states, nothing, law, nothing, nothing.bool())

    # ---- validation ---------------------------------------------------------------------------------------------

    def validation_step(self, batch: SequenceBatch, batch_idx: int) -> None:
        judged = self._judge_together(batch)
        if judged is None:
            return
        weights, counted = weigh(self.drafter, judged, self.losses), judged.counted
        told = dict.fromkeys(self._told, 0.0)
        measured = measure(self.drafter, judged, self.losses, weights, told)
        self._metric("tau").update(*expected_tau(measured.acceptance, counted))
        self._metric("acceptance").update(measured.acceptance.sum(0), counted.float().sum(0))
        for (name, total), count in zip(measured.sums.items(), counts(judged, weights, told), strict=True):
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
                self.log_dict({f"val/acceptance/slot_{k}": value for k, value in enumerate(values, 1)})
            else:
                self.log(f"val/{name}", values[0], prog_bar=name == "tau")
            metric.reset()

    def predict_step(self, *_: Any) -> None:
        raise DsparkError(NOTHING_TO_PREDICT)

    # ---- test ---------------------------------------------------------------------------------------------------

    def on_test_start(self) -> None:
        """Raises DsparkError when there is nothing to test, or nothing to test it on."""
        if self._blank:
            raise DsparkError(
                "test: expected a trained draft model, but got none. Give --ckpt_path CHECKPOINT, or train first: "
                "lightning fit recipes/drafter.yaml."
            )
        if not self.test.prompts and not self._data().paths["test"]:
            raise DsparkError(
                "test: expected prompts to roll out, but got none. Give --model.init_args.test.prompts="
                "data/prompts/test.jsonl."
            )
        forget_packed(self)

    def on_test_end(self) -> None:
        self._lightnings_bar.show()

    def _all_rollouts(self) -> bool:
        """Whether the test has no sequences, so that the trainer's steps say nothing of how far it is."""
        paths = getattr(getattr(self.trainer, "datamodule", None), "paths", {})
        return bool(self.test.prompts) and not paths.get("test")

    test_step = validation_step

    def on_test_epoch_end(self) -> None:
        """The analytic figures where sequences were given, then the rollouts' report."""
        if self._data().paths["test"]:
            self.on_validation_epoch_end()
        drafter, report = whole(self.drafter), None  # whole by all ranks, sliced or not
        if self.test.prompts and self.trainer.is_global_zero:
            report = self._report(drafter)
        report = self.trainer.strategy.broadcast(report)
        if report is not None:
            refuse_difference(report)

    def _report(self, drafter: Drafter) -> dict[str, Any]:
        quiet = self.trainer.progress_bar_callback is None
        facts = {"checkpoint": str(self.trainer.ckpt_path or ""), "step": self.trainer.global_step, **self._origin}
        report = rollout_report(self.target, self.target_source, drafter, self.test, facts, quiet)
        folder = Path(self.test.out or self.trainer.default_root_dir)
        write_report(report, folder, self.trainer.loggers, facts["step"])
        print(f"{report_text(report)}\n\nwritten to {folder}")
        return report

    # ---- checkpoints --------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        seal(checkpoint, self.config)
        name_moments(checkpoint, moment_order(self, self.trainer.optimizers))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Raises DsparkError when a fit is to go on from another draft model than the recipe describes, or the
        checkpoint is of another target; an evaluation takes the checkpoint's shape."""
        super().on_load_checkpoint(checkpoint)
        saved = saved_config(checkpoint, self.config)
        if self.fitting or is_sharded(self):  # slices have been cut by now
            refuse_other_shape(saved, self.config)
        if saved != self.config:
            if self.trainer.is_global_zero:
                tell_adopted(saved, self.config)
            self._become(saved)
        self.refuse_other_optimizer(checkpoint, self.optimizer_options)
        self._blank = False
        self._origin = {"step": int(checkpoint.get("global_step", 0))}
        if is_sharded(self):
            refuse_numbered(checkpoint)
