"""The policy's loss, as pure functions of fp32 log-probabilities that return (sum, count).

Per token t of sample i, with ratio r = exp(logprob - recorded) and advantage A_i:
    grpo, dr_grpo:  min(r A, clip(r, 1 - low, 1 + high) A)          (PPO's clipped surrogate, arXiv:1707.06347)
    reinforce:      r A
A sample's tokens are added up and divided by its own length (grpo) or by one constant, the most tokens a sample may
have (dr_grpo, reinforce: no reward for length either way). count is the number of samples; who knows the ranks divides.
Where nothing has been updated since the rollout, r is exactly 1 and the gradient is A * grad logprob: no correction.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dspark.rl.advantage import Objective

SumCount = tuple[Tensor, Tensor]


class Tokens(NamedTuple):
    """N response tokens of S samples, one after the other. sample [N] int64: whose; advantage [S] fp32; counted [S]
    bool; lengths [S] int64; most: the tokens a sample may have; recorded [N] fp32: the sampler's log-probabilities."""

    sample: Tensor
    advantage: Tensor
    counted: Tensor
    lengths: Tensor
    most: int
    recorded: Tensor

    def weights(self, kind: Objective) -> Tensor:
        """Weight of each token [N] fp32, 0 for samples that do not count."""
        per_sample = self.lengths if kind == "grpo" else torch.full_like(self.lengths, self.most)
        return (self.counted / per_sample)[self.sample]


def surrogate(logprobs: Tensor, tokens: Tokens, kind: Objective, low: float, high: float) -> SumCount:
    """The loss to be minimised: logprobs [N] fp32 with gradient, of the law that was sampled from."""
    ratio = (logprobs - tokens.recorded).exp()
    gain = tokens.advantage[tokens.sample]
    term = ratio * gain
    if kind != "reinforce":
        term = torch.minimum(term, ratio.clamp(1 - low, 1 + high) * gain)
    return -(tokens.weights(kind) * term).sum(), tokens.counted.sum().float()


def kl_to_reference(ours: Tensor, reference: Tensor, tokens: Tokens, kind: Objective) -> SumCount:
    """k3, a never negative estimate of KL(policy || reference) on sampled tokens: exp(d) - 1 - d with d = reference -
    ours (http://joschu.net/blog/kl-approx.html). Both [N] fp32, log-probabilities of one law; unbiased where the tokens
    were drawn from it with the policy's present weights. Nats a token, weighted as the loss is."""
    difference = reference - ours
    return (tokens.weights(kind) * (difference.exp() - 1 - difference)).sum(), tokens.counted.sum().float()


def clipped(logprobs: Tensor, tokens: Tokens, kind: Objective, low: float, high: float) -> SumCount:
    """How many tokens' gradients the clip cuts off, of those that count."""
    if kind == "reinforce":
        return torch.zeros(()), tokens.counted[tokens.sample].sum().float()
    ratio = (logprobs.detach() - tokens.recorded).exp()
    gain = tokens.advantage[tokens.sample]
    cut = torch.where(gain > 0, ratio > 1 + high, (ratio < 1 - low) & (gain < 0))
    live = tokens.counted[tokens.sample]
    return (cut & live).sum().float(), live.sum().float()
