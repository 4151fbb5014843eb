"""Synthetic heads: events whose true acceptance probability is known, and which report a distorted logit."""

from __future__ import annotations

import torch

from dspark.calibration.events import Events

DOMAINS = ("math", "code", "chat")


def synthetic_head(
    rounds: int, slots: int = 3, scale: float = 2.0, seed: int = 0, conversations: int = 40, maximum: bool = False
) -> Events:
    """True conditional probability sigmoid(z), reported logit scale * z: the right temperature is `scale`."""
    generator = torch.Generator().manual_seed(seed)
    z = 0.8 + 1.5 * torch.randn(rounds, slots, generator=generator)
    accepted = (torch.rand(rounds, slots, generator=generator) < torch.sigmoid(z)).long().cumprod(1).sum(1)
    noisy = torch.sigmoid(0.6 * z + torch.randn(rounds, slots, generator=generator)) if maximum else None
    domain = [DOMAINS[i % 3] for i in range(rounds)]
    conversation = [f"c{i % conversations}" for i in range(rounds)]
    return Events(scale * z, accepted, torch.full((rounds,), slots), domain, conversation, noisy)


def plain_events(logits: list[list[float]], accepted: list[int], verified: list[int]) -> Events:
    """Hand-written events of one domain, a conversation per round."""
    rounds = len(accepted)
    return Events(torch.tensor(logits), accepted, verified, ["math"] * rounds, [str(i) for i in range(rounds)])
