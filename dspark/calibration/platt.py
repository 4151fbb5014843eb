"""Platt scaling: p = sigmoid(z / T + b) per slot, the maximum of the likelihood of the slot's own decisions.

Targets are Platt's (1999), (n+ + 1) / (n+ + 2) and 1 / (n- + 2): with labels of one kind the answer stays finite. The
problem is convex and two-dimensional: damped Newton steps. 1 / T is held in [0.1, 10], so the map never turns round.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dspark.calibration.events import Events
from dspark.slot_maps import SlotMap

_LIMIT = 10.0
_STEPS = 50


def fit_platt(events: Events, num_bins: int) -> tuple[SlotMap, ...]:
    """A temperature and a shift per slot; a slot that no round reached keeps its sigmoid. num_bins is not used: the
    methods share a signature."""
    seen, logits, labels = events.conditional_observed, events.confidence_logits.double(), events.labels
    return tuple(_fit(logits[at, k], labels[at, k]) if at.any() else SlotMap() for k, at in enumerate(seen.unbind(1)))


def _fit(z: Tensor, y: Tensor) -> SlotMap:
    """z, y [n] fp64. In units of z's own spread, from slope 0: a sigmoid that is saturated everywhere has no slope to
    follow. Never a worse likelihood than the map that was there."""
    positives, negatives = float(y.sum()), float((1 - y).sum())
    target = torch.where(y > 0.5, (positives + 1) / (positives + 2), 1 / (negatives + 2))
    middle, spread = float(z.mean()), float(z.std(correction=0).clamp_min(1e-6))
    scaled = (z - middle) / spread
    start = torch.tensor([0.0, float(torch.logit(target.mean()))], dtype=torch.float64)
    found = _newton(torch.stack([scaled, torch.ones_like(z)], dim=1), target, start)
    slope = min(max(float(found[0]) / spread, 1 / _LIMIT), _LIMIT)
    shift = float(found[1]) - middle * float(found[0]) / spread
    if slope * spread != float(found[0]):  # at a limit: the best shift there
        only = _newton(torch.ones_like(z)[:, None], target, start[1:], slope * (z - middle))
        shift = float(only[0]) - slope * middle
    fitted = SlotMap(1.0 / slope, shift)
    return fitted if _loss(slope * z + shift, target) < _loss(z, target) else SlotMap()


def _loss(score: Tensor, target: Tensor) -> float:
    return float((torch.nn.functional.softplus(score) - target * score).mean())


def _newton(inputs: Tensor, target: Tensor, start: Tensor, offset: Tensor | float = 0.0) -> Tensor:
    """Minimises the mean logistic loss of inputs [n,d] @ x + offset, with a millionth of ridge towards the start."""

    def loss(x: Tensor) -> Tensor:
        score = inputs @ x + offset
        fit = (torch.nn.functional.softplus(score) - target * score).mean()
        return fit + 5e-7 * (x - start).square().sum()

    x = start
    for _ in range(_STEPS):
        p = torch.sigmoid(inputs @ x + offset)
        slope = inputs.T @ (p - target) / len(target) + 1e-6 * (x - start)
        curve = inputs.T @ (inputs * (p * (1 - p))[:, None]) / len(target) + 1e-6 * torch.eye(len(x), dtype=x.dtype)
        step, size = torch.linalg.solve(curve, slope), 1.0
        while size > 1e-6 and loss(x - size * step) > loss(x):
            size /= 2
        x = x - size * step
        if float(step.abs().max()) < 1e-10:
            break
    return x
