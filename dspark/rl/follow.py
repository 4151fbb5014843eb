"""The draft model follows the policy: the rounds of each rollout train it, between the policy's updates.

What a round shows is used twice. Its anchor is a place where the draft model had to draft: there the draft layers
learn the present policy's law (training's own losses). Its outcome, accepted up to here and no further, is the label
the confidence head learns from, for the very tokens that were drafted.

The trained copy is fp32 and in training mode; the serving copy, which the runner drafts with, has the policy's dtype.
Under the coupled and greedy verifiers none of this changes a trajectory: it is the draft model that is trained.
Not a LightningModule: its parameters take no part in the policy's gradient reduction, its gradients are averaged here.
Left out on purpose: calibration maps are kept as they came with the draft model, not fitted again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dspark import ops
from dspark.contracts import DsparkError
from dspark.drafter.model import Drafter
from dspark.rl.options import FollowOptions
from dspark.rl.ranks import Ranks
from dspark.target.decoder import Target
from dspark.training import losses
from dspark.training.batches import RoundBatch, partition
from dspark.training.data import round_batch
from dspark.training.frozen import Capture, blocks_of, capture, law_reader
from dspark.training.labels import laws_at, observed_events
from dspark.training.objective import Judged, alphas, counts, measure, weigh
from dspark.training.optim import make_optimizer
from dspark.training.sources import Sample


class Follower:
    """The draft model of one RL run. serving: what the runner drafts with, as serve() last left it.

    drafter: as loaded, with its calibration. total: optimizer steps of the whole run, for the schedule.
    """

    def __init__(self, drafter: Drafter, policy: Target, options: FollowOptions, total: int, ranks: Ranks):
        self.options, self.policy, self.ranks, self.total = options, policy, ranks, total
        self.trained = Drafter(drafter.config, drafter.draft_ids)
        self.trained.load_state_dict(drafter.state_dict())
        self.serving = drafter.to(policy.dtype).eval()
        self.optimizer, self.schedule = make_optimizer(
            self.trained.named_parameters(), options.optimizer, max(1, total)
        )

    def serve(self) -> Drafter:
        """The serving copy, with the trained weights and (like the trained one) the policy's embedding and LM head as
        they are now: to be called before every rollout, for the policy moves."""
        with torch.no_grad():
            for theirs, ours in zip(self.serving.parameters(), self.trained.parameters(), strict=True):
                theirs.copy_(ours)
                ops.forget(theirs)
        for drafter in (self.serving, self.trained):
            drafter.bind(self.policy.embed_weight, self.policy.head_weight)
        return self.serving

    def learn(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Takes the steps on the rounds of a rollout. Returns the mean of each loss over them, by name."""
        self.serve()  # the policy has moved
        self.trained.train()
        told: dict[str, list[float]] = {}
        for part in partition([len(s.rounds) for s in samples], range(len(samples)), self.options.steps):
            for name, value in self._step([samples[i] for i in part]).items():
                told.setdefault(name, []).append(value)
        self.trained.eval()
        known = {name: [v for v in values if v == v] for name, values in told.items()}  # of steps that had rounds
        return {name: sum(values) / len(values) if values else math.nan for name, values in known.items()}

    def _step(self, samples: Sequence[Sample]) -> dict[str, float]:
        loss, told = self._losses(samples)
        if loss.requires_grad:
            loss.backward()
        if not any(value == value for value in told.values()):
            return told  # no rank has a round to learn from
        for parameter in self.trained.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad = self.ranks.add(parameter.grad)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.schedule.step()
        return told

    def _losses(self, samples: Sequence[Sample]) -> tuple[Tensor, dict[str, float]]:
        """This rank's part of the loss, and the means over all ranks, NaN where nothing counts."""
        names = alphas(self.options.losses, confidence_head=False)
        batch = round_batch([s for s in samples if s.rounds], self.trained.config.num_predictions)
        judged = bce = None
        if len(batch.anchors):
            seen = capture(self.policy, batch, self.trained.config.target_layer_ids)
            judged, bce = self._judge(batch, seen), self._confidence(batch, seen)
        weights = weigh(self.trained, judged, self.options.losses) if judged else torch.zeros(())
        table = counts(judged, weights, names) if judged else torch.zeros(len(names))
        heads = torch.zeros(1) if bce is None else bce[1].reshape(1)
        *totals, events = self.ranks.add(torch.cat([table, heads])).tolist()
        loss, sums = torch.zeros(()), torch.zeros(len(names) + 1)
        if judged:
            shares = {
                name: alpha / max(total, 1e-6) for (name, alpha), total in zip(names.items(), totals, strict=True)
            }
            measured = measure(self.trained, judged, self.options.losses, weights, shares)
            loss, sums[:-1] = measured.loss, torch.stack([measured.sums[name] for name in names])
        if bce is not None:
            loss = loss + self.options.losses.confidence * bce[0] / max(events, 1e-6)
            sums[-1] = bce[0].detach()
        means = self.ranks.add(sums) / torch.tensor([*totals, events])
        return loss, dict(zip([*names, "confidence"], means.tolist(), strict=True))

    def _judge(self, batch: RoundBatch, seen: Capture) -> Judged | None:
        """The draft model teacher-forced on what the policy said from each anchor on."""
        blocks, rows, counted = blocks_of(batch, seen, self.trained.config.num_predictions)
        if not bool(counted.any()):
            return None
        law, index = laws_at(
            law_reader(self.policy, seen, self.trained, self.options.losses.temperature), rows - 1, counted
        )
        states = self.trained.block_states(*blocks.inputs(self.trained.encode(seen.features, batch.positions())))
        return Judged(states, self.trained.to_columns(blocks.labels), law, index, counted)

    def _confidence(self, batch: RoundBatch, seen: Capture) -> losses.SumCount | None:
        """(sum, count) of the head's cross entropy against what the verifier did to the drafted tokens. The features
        are the policy's as it is now, an update after the rounds; the head alone learns."""
        if self.trained.confidence_head is None or not self.options.losses.confidence:
            return None
        served, drafted = self.serving, batch.drafted
        labels, observed = observed_events(batch.verified, batch.accepted, self.trained.config.num_predictions)
        begin = batch.offsets[batch.sequence]
        anchor_ids = batch.ids[begin + batch.anchors]
        with torch.no_grad():
            context = served.encode(seen.features, batch.positions())
            hidden = served.backbone(anchor_ids, batch.anchors, drafted, context, begin, begin + batch.anchors)
            law = served.law(served.draft_logits(hidden, anchor_ids, drafted), drafted)
            previous = torch.cat([anchor_ids[:, None], drafted[:, :-1]], dim=1)
            markov = self.trained.markov_head
            embedding = None if markov is None else markov.markov_w1(previous)
        logits = self.trained.confidence_logits(hidden.float(), embedding, law)
        observed = observed & seen.finite[batch.sequence][:, None]
        return losses.confidence_bce(logits, labels, observed.float())

    def state_dict(self) -> dict[str, Any]:
        """Plain tensors and values, for a checkpoint."""
        return {
            "drafter": self.trained.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "total": self.total,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises DsparkError where the schedule would be bent: another number of steps in all."""
        if state["total"] != self.total and self.options.optimizer.min_lr_ratio < 1:
            raise DsparkError(
                f"follow.optimizer: expected {state['total']} steps in all, by which its rate falls, but got "
                f"{self.total}. Give total_steps: {state['total']}, or the trainer.max_steps that began the run."
            )
        self.trained.load_state_dict(state["drafter"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(dict(state["schedule"]))  # takes a part out of what it is given
