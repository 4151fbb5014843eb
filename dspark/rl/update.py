"""From a rollout to updates of the policy: check, score, weigh, step.

Before the first update every token of the rollout is scored by the trainer's forward pass and must be what the sampler
recorded. The samples of the first update are scored with gradients anyway; those of later ones in a pass of their own,
which also notes the tokens that truncation kept (support.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from dspark.contracts import DsparkError
from dspark.rl.advantage import advantages
from dspark.rl.masters import Masters
from dspark.rl.mismatch import recorded, refuse_difference, spread
from dspark.rl.objective import Tokens, clipped, kl_to_reference, surrogate
from dspark.rl.options import ObjectiveOptions
from dspark.rl.policy import Policy
from dspark.rl.ranks import Ranks
from dspark.rl.rollout import Rollout, finished
from dspark.rl.support import Support, truncates
from dspark.rollouts.trajectory import Trajectory
from dspark.training.batches import partition

Chunk = list[int]  # places in the rollout whose tokens fit into one forward pass
SUMS = ("loss", "kl", "clipped", "nats")


class Updates:
    """policy: in training; masters: what the optimizer steps on. reference: None without a KL term. most: tokens a
    sample may have; token_budget: tokens of a forward pass. backward(loss) leaves gradients in the policy's weights;
    step() applies the masters' gradients."""

    def __init__(
        self, policy: Policy, reference: Policy | None, masters: Masters, options: ObjectiveOptions, most: int,
        token_budget: int, max_norm: float, ranks: Ranks, backward: Callable[[Tensor], None],
        step: Callable[[], object],
    ):  # fmt: skip
        self.policy, self.reference, self.masters, self.options = policy, reference, masters, options
        self.most, self.token_budget, self.max_norm = most, token_budget, max_norm
        self.ranks, self._backward, self._step = ranks, backward, step

    def learn(self, rollout: Rollout) -> dict[str, float]:
        """All updates on one rollout. Returns what to log, over all ranks. Raises DsparkError where the trainer's
        log-probabilities are not the sampler's."""
        gain, counted = advantages(rollout.rewards, rollout.groups, self.options.kind)
        first, *later = self._chunks(rollout.trajectories)
        supports = [[self._checked_together(rollout.trajectories, chunk) for chunk in chunks] for chunks in later]
        told = [self._update(rollout.trajectories, gain, counted, first, None)]
        told += [
            self._update(rollout.trajectories, gain, counted, chunks, kept)
            for chunks, kept in zip(later, supports, strict=True)
        ]
        means = {name: sum(t[name] for t in told) / len(told) for name in (*SUMS, "gradient_norm")}
        return {**means, "logprob_diff_max": told[0]["diff"], "logprob_drift_max": max(t["diff"] for t in told)}

    def _chunks(self, trajectories: Sequence[Trajectory]) -> list[list[Chunk]]:
        """Per update its samples, in forward passes; as many of these on every rank."""
        sizes = [len(t.response_ids) for t in trajectories]
        for i, t in enumerate(trajectories):  # a prompt is run once for its neighbours
            if not i or t.prompt_ids != trajectories[i - 1].prompt_ids:
                sizes[i] += len(t.prompt_ids)
        shares = partition([1] * len(sizes), range(len(sizes)), self.options.updates_per_rollout)
        needed = max(-(-sum(sizes[i] for i in share) // self.token_budget) for share in shares)
        parts = int(self.ranks.largest(float(max(1, needed))))
        return [partition(sizes, share, parts) for share in shares]

    def _checked_together(self, trajectories: Sequence[Trajectory], chunk: Chunk) -> Support | None:
        return self.ranks.together(lambda: self._checked(trajectories, chunk))

    def _checked(self, trajectories: Sequence[Trajectory], chunk: Chunk) -> Support | None:
        chosen = [trajectories[i] for i in chunk]
        if not chosen:
            return None
        support = None
        if any(truncates(t.params) for t in chosen):
            logprobs, raw, support = self.policy.supports(finished(chosen))
        else:
            with torch.no_grad():
                logprobs, raw = self.policy.logprobs(finished(chosen))
        refuse_difference(chosen, logprobs, raw)
        return support

    def _update(
        self, trajectories: Sequence[Trajectory], gain: Tensor, counted: Tensor, chunks: list[Chunk],
        supports: list[Support | None] | None,
    ) -> dict[str, float]:  # fmt: skip
        """One optimizer step on these chunks. supports: None in the first update, which is checked here instead."""
        places = [i for chunk in chunks for i in chunk]
        tokens = sum(len(trajectories[i].response_ids) for i in places)
        samples, total = self.ranks.add(torch.tensor([float(counted[places].sum()), float(tokens)])).tolist()
        sums, diff = torch.zeros(len(SUMS) + 1), 0.0
        for number, chunk in enumerate(chunks):
            chosen = [trajectories[i] for i in chunk]
            logprobs, raw = self.policy.logprobs(finished(chosen), supports[number] if supports else None)
            if supports is None:
                self.ranks.together(partial(refuse_difference, chosen, logprobs, raw))
            theirs = recorded(chosen)
            diff = max(diff, spread(logprobs, theirs[0]), 0.0 if supports else spread(raw, theirs[1]))
            loss, parts = self._loss(chosen, gain[chunk], counted[chunk], logprobs, raw)
            self._backward(loss * self.ranks.world / max(samples, 1.0) + self._zero())
            self.masters.take()
            sums += parts
        norm = torch.nn.utils.clip_grad_norm_(self.masters.tensors, self.max_norm)
        *values, live = self.ranks.add(sums).tolist()
        _refuse_not_finite(float(norm), values[0])
        self._step()
        self.masters.give()
        means = [v / max(n, 1.0) for v, n in zip(values, (samples, samples, live, total), strict=True)]
        diff = self.ranks.largest(diff)
        return {**dict(zip(SUMS, means, strict=True)), "gradient_norm": float(norm), "diff": diff}

    def _loss(
        self, chosen: Sequence[Trajectory], gain: Tensor, counted: Tensor, logprobs: Tensor, raw: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The sum to be minimised; SUMS without gradient, and the tokens that count."""
        kind, low, high = self.options.kind, self.options.clip_low, self.options.clip_high
        lengths = torch.tensor([len(t.response_ids) for t in chosen], dtype=torch.int64)
        sample = torch.arange(len(chosen)).repeat_interleave(lengths)
        tokens = Tokens(sample, gain, counted, lengths, self.most, recorded(chosen)[0])
        loss, _ = surrogate(logprobs, tokens, kind, low, high)
        cut, live = clipped(logprobs, tokens, kind, low, high)
        kl = torch.zeros(())
        if self.reference is not None:
            cut_off = any(truncates(t.params) for t in chosen)  # then the two laws do not share a support
            with torch.no_grad():
                reference = self.reference.logprobs(finished(chosen))
            kl, _ = kl_to_reference(raw if cut_off else logprobs, reference[int(cut_off)], tokens, kind)
            loss = loss + self.options.kl * kl
        return loss, torch.stack([loss.detach(), kl.detach(), cut, -raw.detach().sum(), live])

    def _zero(self) -> Tensor | float:
        """A loss of 0 that touches every weight, so that ranks without samples reduce with the others."""
        if self.ranks.world == 1:
            return 0.0
        return torch.stack([p.float().sum() * 0.0 for p in self.policy.parameters()]).sum()


def _refuse_not_finite(norm: float, loss: float) -> None:
    if not (math.isfinite(norm) and math.isfinite(loss)):
        raise DsparkError(
            f"rl: expected a finite gradient, but its norm is {norm} and the loss {loss}. Nothing was updated. Are the "
            "rewards of ordinary size? Else begin a new run with a lower optimizer.lr or fewer updates_per_rollout."
        )
