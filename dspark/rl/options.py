"""The settings of an RL recipe beside those of its rollouts: plain dataclasses, a sentence a field."""

from __future__ import annotations

from dataclasses import dataclass, field

from dspark.rl.advantage import OBJECTIVES, Objective
from dspark.training.options import LossOptions, OptimizerOptions, as_options
from dspark.training.ranges import COUNT, NATURAL, NOT_NEGATIVE, POSITIVE, SHARE, check, one_of


@dataclass(kw_only=True)
class ObjectiveOptions:
    """What a policy update minimises.

    Args:
        kind: grpo: advantages divided by the group's spread, a sample's tokens averaged; dr_grpo: neither; reinforce: a
            leave-one-out baseline and no clip.
        clip_low: the ratio counts down to 1 - this (grpo, dr_grpo); no effect in the first update after a rollout.
        clip_high: and up to 1 + this.
        kl: weight of the KL divergence from the reference, the weights the run starts from; 0 leaves the reference out.
        updates_per_rollout: optimizer steps on each rollout, each on its own share of the samples.
    """

    kind: Objective = "dr_grpo"
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl: float = 0.0
    updates_per_rollout: int = 1

    def __post_init__(self) -> None:
        shares = {"clip_low": SHARE, "clip_high": NOT_NEGATIVE, "kl": NOT_NEGATIVE, "kind": one_of(OBJECTIVES)}
        check("objective", self, **shares, updates_per_rollout=NATURAL)


@dataclass(kw_only=True)
class PolicyOptimizerOptions:
    """AdamW of the policy; its rate stays where the warm-up ends.

    Args:
        lr: learning rate.
        warmup_steps: steps of linear warm-up; step s has (s + 1) / warmup_steps of the rate.
        weight_decay: on matrices only; norms and biases have none.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        max_norm: longest gradient; a longer one is shortened to this.
    """

    lr: float = 1e-5
    warmup_steps: int = 0
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.99
    max_norm: float = 1.0

    def __post_init__(self) -> None:
        check("optimizer", self, max_norm=POSITIVE)
        assert self.adamw, "checks the others"

    @property
    def adamw(self) -> OptimizerOptions:
        given = {n: getattr(self, n) for n in ("lr", "warmup_steps", "weight_decay", "beta1", "beta2")}
        return OptimizerOptions(**given, min_lr_ratio=1.0)


@dataclass(kw_only=True)
class FollowOptions:
    """How the draft model follows the policy: trained on what its rounds in the rollouts show.

    Args:
        steps: optimizer steps after each rollout, each on its own share of the rounds; 0 leaves the draft model alone.
        optimizer: AdamW of the draft model and its schedule, counted in its own steps.
        losses: of the draft layers, at the anchors of the rounds. The confidence head learns from whether the verifier
            accepted (the event itself), whatever `label` says; `confidence` is its weight.
    """

    steps: int = 0
    optimizer: OptimizerOptions = field(default_factory=lambda: OptimizerOptions(lr=3e-4, min_lr_ratio=1.0))
    losses: LossOptions = field(default_factory=lambda: LossOptions(ce=0.0, soft_ce=1.0, l1=0.0))

    def __post_init__(self) -> None:
        check("follow", self, steps=COUNT)
        self.optimizer = as_options(OptimizerOptions, self.optimizer)
        self.losses = as_options(LossOptions, self.losses)
