"""AdamW and its schedule, as pure functions of the options and the step."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from dspark.training.options import OptimizerOptions

FRESH = ("layers.", "confidence_head.")  # the parts of a draft model that no regression solved for


def lr_factor(step: int, total_steps: int, options: OptimizerOptions) -> float:
    """Share of the peak rate at `step` (0-based): (s + 1) / warmup, then half a cosine down to min_lr_ratio."""
    if step < options.warmup_steps:
        return (step + 1) / options.warmup_steps
    progress = (step - options.warmup_steps) / max(1, total_steps - options.warmup_steps)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
    return options.min_lr_ratio + (1.0 - options.min_lr_ratio) * cosine


def make_optimizer(
    parameters: Iterable[tuple[str, nn.Parameter]], options: OptimizerOptions, total_steps: int
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
    """AdamW over the trainable ones of the named parameters; weight decay on matrices only, fresh parts at their own
    rate."""
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, parameter in parameters:
        if parameter.requires_grad:
            fresh = options.fresh_lr_ratio != 1.0 and name.startswith(FRESH)
            groups.setdefault((parameter.ndim < 2, fresh), []).append(parameter)
    rated = [
        {
            "params": group,
            "weight_decay": 0.0 if small else options.weight_decay,
            "lr": options.lr * (options.fresh_lr_ratio if fresh else 1.0),
        }
        for (small, fresh), group in sorted(groups.items())
    ]
    optimizer = torch.optim.AdamW(rated, lr=options.lr, betas=(options.beta1, options.beta2))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(step, total_steps, options))
    return optimizer, schedule
