"""Isotonic regression: per slot the non-decreasing map of the logit with the least squared error on its own decisions.

Pool adjacent violators (Ayer et al., 1955) on logits in order, equal ones pooled first. Between two pools the map is a
straight line. Any monotone miscalibration is mended, given events: it has as many parameters as the data have steps.
With n events probabilities stay in [1 / (n + 2), (n + 1) / (n + 2)], for no finite sample shows certainty.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dspark.calibration.events import Events
from dspark.slot_maps import SlotMap


def fit_isotonic(events: Events, num_bins: int) -> tuple[SlotMap, ...]:
    """Knots per slot; a slot that no round reached keeps its sigmoid. num_bins is not used: the methods share a
    signature."""
    seen, logits, labels = events.conditional_observed, events.confidence_logits.double(), events.labels
    return tuple(_fit(logits[at, k], labels[at, k]) if at.any() else SlotMap() for k, at in enumerate(seen.unbind(1)))


def _fit(z: Tensor, y: Tensor) -> SlotMap:
    least = 1 / (len(y) + 2)
    knots = []
    for first, last, mean in pools(z, y):
        p = min(max(mean, least), 1 - least)
        knots += [(first, p)] if first == last else [(first, p), (last, p)]
    return SlotMap(knots=tuple(knots))


def pools(z: Tensor, y: Tensor) -> list[tuple[float, float, float]]:
    """z, y [n] fp64 -> (smallest z, largest z, mean y) of each pool, ascending in both."""
    values, group = z.unique(return_inverse=True)
    count = torch.bincount(group).double()
    total = torch.bincount(group, weights=y)
    stack: list[tuple[float, float, float, float]] = []  # first z, last z, events, labels
    for at, n, s in zip(values.tolist(), count.tolist(), total.tolist(), strict=True):
        first, events, labels = at, n, s
        while stack and stack[-1][3] * events >= labels * stack[-1][2]:
            first, _, earlier, theirs = stack.pop()
            events, labels = events + earlier, labels + theirs
        stack.append((first, at, events, labels))
    return [(first, last, labels / events) for first, last, events, labels in stack]
