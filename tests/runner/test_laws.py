"""Exact laws by hand-written probabilities: never, always and sometimes accepted; the emitted token follows the
target."""

from __future__ import annotations

import torch

from dspark import noise, ops
from dspark.contracts import SamplingParams
from dspark.drafter.candidates import keep_candidates
from dspark.runner.verify import SamplingRows, residual_rows, verify

P = torch.tensor([0.5, 0.3, 0.2, 0.0])
Q = torch.tensor([0.2, 0.2, 0.5, 0.1])


def rows(count: int) -> SamplingRows:
    return SamplingRows.of([SamplingParams(seq_seed=i) for i in range(count)])


def test_never_and_always_accepted() -> None:
    one_hot = torch.eye(4)
    probs = torch.stack([one_hot[1], one_hot[2], one_hot[3]])
    sampling = rows(1).repeat(torch.tensor([3]))
    positions = torch.tensor([5, 6, 7])
    for verifier in ("greedy", "coupled", "rejection"):
        laws = torch.stack([one_hot[1], one_hot[2]])
        (always,) = verify(verifier, probs, sampling, positions, [(1, 2)], laws)
        assert (always.accepted, always.tokens, always.rows) == (2, [1, 2, 3], [0, 1, 2])
        laws = torch.stack([one_hot[0], one_hot[2]])
        (never,) = verify(verifier, probs, sampling, positions, [(0, 2)], laws)
        assert (never.accepted, never.tokens, never.rows) == (0, [1], [0])


def test_a_token_of_probability_zero_is_never_accepted() -> None:
    n = 2000
    laws = torch.tensor([[0.0, 0.0, 0.0, 1.0]]).repeat(n, 1)
    sampling = rows(n).repeat(torch.tensor([2] * n))
    verdicts = verify("rejection", P.repeat(2 * n, 1), sampling, torch.tensor([3, 4] * n), [(3,)] * n, laws)
    assert all(v.accepted == 0 and v.tokens[0] != 3 for v in verdicts)


def test_emitted_token_follows_the_target_for_every_verifier() -> None:
    """One draft from Q, then verification: the first emitted token has law P. Chi-square with 2 degrees of freedom."""
    n = 30000
    sampling, at = rows(n), torch.full((n,), 9)
    both = sampling.repeat(torch.tensor([2] * n))
    positions = torch.tensor([9, 10]).repeat(n)
    for verifier, stream in (("coupled", noise.TARGET), ("rejection", noise.DRAFT)):
        drafts = ops.gumbel_argmax(Q.repeat(n, 1), sampling.seeds, stream, at)
        blocks = [(int(d),) for d in drafts]
        verdicts = verify(verifier, P.repeat(2 * n, 1), both, positions, blocks, Q.repeat(n, 1))
        accepted = sum(v.accepted for v in verdicts)
        assert 0 < accepted < n, f"{verifier}: inconclusive, {accepted} of {n} accepted"
        first = torch.bincount(torch.tensor([v.tokens[0] for v in verdicts]), minlength=4)
        assert first[3] == 0
        chi = (((first[:3] - n * P[:3]) ** 2) / (n * P[:3])).sum().item()
        assert chi < 18.0, f"{verifier}: {first.tolist()}"
        expected = {"rejection": torch.minimum(P, Q).sum().item(), "coupled": coupled_rate(P, Q)}[verifier]
        assert abs(accepted / n - expected) < 0.012, f"{verifier}: {accepted / n} against {expected}"


def test_candidates_cut_the_draft_law_and_leave_the_emitted_one_alone() -> None:
    """One draft from the 2 best of Q's 4 tokens: nothing off them is ever drafted, and the first emitted token still
    has law P, of which 0.2 lies where the draft law is exactly 0."""
    n = 30000
    sampling, at = rows(n), torch.full((n,), 9)
    both, positions = sampling.repeat(torch.tensor([2] * n)), torch.tensor([9, 10]).repeat(n)
    logits = keep_candidates(torch.tensor([0.6, 0.3, 0.0, -0.4]), 2).repeat(n, 1)
    laws = sampling.shape(logits)
    assert bool((laws[:, 2:] == 0.0).all())
    assert abs(float(laws[0].sum()) - 1.0) < 1e-6
    for verifier, stream in (("coupled", noise.TARGET), ("rejection", noise.DRAFT)):
        drafts = ops.gumbel_argmax(laws, sampling.seeds, stream, at)
        drawn = torch.bincount(drafts, minlength=4)
        assert int(drawn[2:].sum()) == 0
        assert abs(float(drawn[0] / n - laws[0, 0])) < 0.012
        verdicts = verify(verifier, P.repeat(2 * n, 1), both, positions, [(int(d),) for d in drafts], laws)
        accepted = sum(v.accepted for v in verdicts)
        assert 0 < accepted < n
        first = torch.bincount(torch.tensor([v.tokens[0] for v in verdicts]), minlength=4)
        chi = (((first[:3] - n * P[:3]) ** 2) / (n * P[:3])).sum().item()
        assert chi < 18.0, f"{verifier}: {first.tolist()}"
        expected = torch.minimum(P, laws[0]).sum().item() if verifier == "rejection" else coupled_rate(P, laws[0])
        assert abs(accepted / n - expected) < 0.012, f"{verifier}: {accepted / n} against {expected}"


def test_shared_noise_between_draft_and_residual_is_caught() -> None:
    """The known bias: drawing the residual with the draft's noise. The same chi-square must fail on it."""
    n = 30000
    sampling, at = rows(n), torch.full((n,), 9)
    drafts = ops.gumbel_argmax(Q.repeat(n, 1), sampling.seeds, noise.DRAFT, at)
    u = ops.uniform(sampling.seeds, noise.ACCEPT, at)
    accepted = u * Q[drafts] < P[drafts]
    biased = ops.gumbel_argmax(residual_rows(P.repeat(n, 1), Q.repeat(n, 1)), sampling.seeds, noise.DRAFT, at)
    first = torch.bincount(torch.where(accepted, drafts, biased), minlength=4)
    chi = (((first[:3] - n * P[:3]) ** 2) / (n * P[:3])).sum().item()
    assert chi > 18.0


def coupled_rate(p: torch.Tensor, q: torch.Tensor) -> float:
    both = (p > 0) & (q > 0)
    total = 0.0
    for v in range(len(p)):
        if both[v]:
            total += 1.0 / torch.maximum(p / p[v], q / q[v]).sum().item()
    return total
