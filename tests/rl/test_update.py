"""Updates on a rollout: the check before them, the kept support after them, and passes that add up to one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dspark.contracts import DsparkError, Request, SamplingParams
from dspark.rl.masters import Masters
from dspark.rl.mismatch import refuse_difference
from dspark.rl.options import ObjectiveOptions
from dspark.rl.policy import Policy
from dspark.rl.ranks import Ranks
from dspark.rl.rollout import Rollout, finished
from dspark.rl.support import Support, truncates
from dspark.rl.update import Updates
from dspark.rollouts.trajectory import Trajectory, sampling_json
from dspark.runner import Engine, EngineOptions

LAW = SamplingParams(temperature=0.8, top_p=0.7, max_tokens=6, stop_ids=(2,))


def make_rollout(policy: Policy, law: SamplingParams = LAW) -> Rollout:
    """4 groups of 4, rewards as they come."""
    prompts = [(3, 6 + i, 7, 4) for i in range(4)]
    requests = [Request(prompts[i // 4], law.with_seed(i)) for i in range(16)]
    done = Engine(policy.target, None, EngineOptions(max_batch=5)).generate(requests)
    trajectories = [
        Trajectory(
            f"{i // 4}-{i % 4}", str(i // 4), str(i // 4), "", r.prompt_ids, c.token_ids, c.logprobs, c.raw_logprobs,
            c.finish_reason, float(i * i % 5), c.seq_seed, "", sampling_json(r.params),
        )
        for i, (r, c) in enumerate(zip(requests, done, strict=True))
    ]  # fmt: skip
    return Rollout(trajectories, {}, 0.0, "")


def updates(policy: Policy, budget: int = 10_000, lr: float = 0.05, **options: Any) -> Updates:
    masters = Masters(policy.named_parameters())
    optimizer = torch.optim.SGD(masters.tensors, lr=lr)

    def backward(loss: Tensor) -> None:
        loss.backward()

    return Updates(
        policy, None, masters, ObjectiveOptions(**options), 6, budget, 1e9, Ranks(), backward, optimizer.step
    )


@pytest.fixture
def policy(tiny_rl: Any) -> Policy:
    return Policy(tiny_rl.start())


@pytest.mark.parametrize("field", ["logprobs", "raw_logprobs"])
def test_a_log_probability_that_is_off_by_one_bit_stops_the_run(policy: Policy, field: str) -> None:
    rollout, before = make_rollout(policy), [p.clone() for p in policy.parameters()]
    victim = rollout.trajectories[9]
    values = list(getattr(victim, field))
    at = max(i for i, value in enumerate(values) if value < 0)
    values[at] = torch.nextafter(torch.tensor(values[at]), torch.tensor(0.0)).item()
    rollout.trajectories[9] = replace(victim, **{field: tuple(values)})
    for share in (1, 4):  # the token is in the first update's samples, and in a later one's
        with pytest.raises(
            DsparkError, match=rf"trajectory 2-1, response token {at} \(id \d+\), {field[:-1]}: sampled"
        ):
            updates(policy, updates_per_rollout=share).learn(rollout)
    assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True)), "it stops before a step"


def test_all_is_equal_and_said_so(policy: Policy) -> None:
    told = updates(policy).learn(make_rollout(policy))
    assert told["logprob_diff_max"] == 0.0
    assert told["gradient_norm"] > 0.0


def test_passes_add_up_to_one_update(policy: Policy, tiny_rl: Any) -> None:
    rollout, other = make_rollout(policy), Policy(tiny_rl.start())
    whole, cut = updates(policy).learn(rollout), updates(other, budget=20).learn(rollout)
    assert whole["loss"] == pytest.approx(cut["loss"], abs=1e-6)
    for (name, a), (_, b) in zip(policy.named_parameters(), other.named_parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6), name  # the same sums in another order


def test_later_updates_hold_the_support_that_was_sampled_from(policy: Policy) -> None:
    """After a large step top-p keeps other tokens: sampled ones fall out of the law, and out of what it learns from;
    on the kept support every log-probability is finite."""
    rollout = make_rollout(policy)
    every = finished(rollout.trajectories)
    before, _, support = policy.supports(every)
    unmoved = policy.logprobs(every, support)[0].detach()
    assert torch.allclose(unmoved, before, atol=1e-6), (
        "where nothing moved it is the law itself, summed in another order"
    )
    assert 1 < float(support.counts.float().mean()) < 16
    updates(policy, lr=3.0).learn(rollout)
    fresh, kept = policy.logprobs(every)[0], policy.logprobs(every, support)[0]
    assert bool(fresh.isinf().any()), "the step was to be large enough"
    assert bool(kept.isfinite().all())
    kept.sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in policy.parameters() if p.grad is not None)


def test_every_pass_of_every_update_keeps_the_budget(policy: Policy) -> None:
    rollout = make_rollout(policy)
    longest = max(len(t.prompt_ids) + len(t.response_ids) for t in rollout.trajectories)
    given = updates(policy, budget=3 * longest, updates_per_rollout=4)
    shares = given._chunks(rollout.trajectories)
    assert [sorted(i for chunk in share for i in chunk) for share in shares] == [
        list(range(n, n + 4)) for n in (0, 4, 8, 12)
    ]
    tokens = [sum(len(rollout.trajectories[i].response_ids) for i in chunk) for share in shares for chunk in share]
    assert max(tokens) <= 4 * longest
    assert min(tokens) > 0


def test_a_gradient_that_is_not_finite_updates_nothing(policy: Policy) -> None:
    rollout, before = make_rollout(policy), [p.clone() for p in policy.parameters()]
    rollout.trajectories[0] = replace(rollout.trajectories[0], reward=1e300)
    with pytest.raises(DsparkError, match="expected a finite gradient"):
        updates(policy).learn(rollout)
    assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))


def test_two_updates_each_on_its_half(policy: Policy) -> None:
    told = updates(policy, lr=1.0, updates_per_rollout=2).learn(make_rollout(policy))
    assert told["logprob_diff_max"] == 0.0
    assert told["logprob_drift_max"] > 0.0, "the second half is scored with weights that have moved"


def test_a_law_without_truncation_needs_no_support() -> None:
    assert not truncates(SamplingParams(temperature=0.7))
    assert not truncates(SamplingParams(temperature=0.0, top_p=0.5))
    assert all(truncates(SamplingParams(**{k: v})) for k, v in (("top_p", 0.9), ("top_k", 3), ("min_p", 0.1)))


def test_support_cuts_what_a_law_does_not_keep() -> None:
    laws = torch.tensor([[0.0, 0.4, 0.6], [1.0, 0.0, 0.0]])
    logits = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], requires_grad=True)
    cut = Support.of(laws).cut(logits)
    assert torch.equal(cut.isfinite(), laws > 0)
    cut[laws > 0].sum().backward()
    assert torch.equal(logits.grad, (laws > 0).float())


def test_equal_log_probabilities_pass() -> None:
    refuse_difference([], torch.zeros(0), torch.zeros(0))
