"""Rejection verification in Triton: the tokens of dspark's own verifier, whatever else is in the batch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from dspark.contracts import SamplingParams
from dspark.runner.verify import SamplingRows, verify
from dspark_kernels.gpu import verify as gpu


@dataclass
class Batch:
    """Requests with their drafts, laws per flat row, seeds per request and positions per row."""

    drafts: list[tuple[int, ...]]
    target: Tensor
    draft: Tensor
    seeds: list[int]
    positions: Tensor

    @property
    def counts(self) -> Tensor:
        return torch.tensor([len(d) + 1 for d in self.drafts])

    def flat(self) -> tuple[Tensor, ...]:
        """The arguments of the kernel."""
        offsets = torch.cat((torch.zeros(1, dtype=torch.int64), self.counts.cumsum(0)))
        drafts = torch.tensor([x for d in self.drafts for x in d], dtype=torch.int64)
        seeds = torch.tensor(self.seeds).repeat_interleave(self.counts)
        return self.target, self.draft, drafts, offsets, seeds, self.positions

    def take(self, requests: list[int]) -> Batch:
        rows = torch.arange(len(self.positions)).split(self.counts.tolist())
        slots = torch.arange(len(self.draft)).split((self.counts - 1).tolist())
        row, slot = torch.cat([rows[r] for r in requests]), torch.cat([slots[r] for r in requests])
        return Batch(
            [self.drafts[r] for r in requests], self.target[row], self.draft[slot],
            [self.seeds[r] for r in requests], self.positions[row],
        )  # fmt: skip


def batch(lengths: list[int], v: int, sharpness: float = 2.0, closeness: float = 0.7) -> Batch:
    """Drafts drawn from laws near the target's; some tokens have no probability in one of the two."""
    rows, slots = sum(lengths) + len(lengths), sum(lengths)
    target = sharpness * torch.randn(rows, v)
    has_draft = torch.cat([torch.tensor([True] * n + [False]) for n in lengths])
    draft = target[has_draft] + (1 - closeness) * sharpness * torch.randn(slots, v)
    if v > 4:
        target[torch.rand(rows, v) < 0.1] = -torch.inf
        draft[torch.rand(slots, v) < 0.1] = -torch.inf
    target, draft = target.softmax(-1), draft.softmax(-1)
    tokens = iter(torch.multinomial(draft, 1)[:, 0].tolist() if slots else [])
    drafts = [tuple(next(tokens) for _ in range(n)) for n in lengths]
    positions = torch.cat([torch.arange(n + 1) + int(torch.randint(5000, ())) for n in lengths])
    return Batch(drafts, target, draft, torch.randint(2**62, (len(lengths),)).tolist(), positions)


def own(given: Batch) -> tuple[list[int], list[int]]:
    """What dspark's CPU verifier says: accepted drafts and the token after them."""
    sampling = SamplingRows.of([SamplingParams(seq_seed=s) for s in given.seeds]).repeat(given.counts)
    verdicts = verify("rejection", given.target, sampling, given.positions, given.drafts, given.draft)
    return [x.accepted for x in verdicts], [x.tokens[-1] for x in verdicts]


def same_as_own(given: Batch) -> tuple[list[int], list[int]]:
    accepted, tokens = gpu.verify(*given.flat())
    assert (accepted.tolist(), tokens.tolist()) == own(given)
    return accepted.tolist(), tokens.tolist()


@pytest.mark.parametrize("v", [2, 50, 1024, 2500])
def test_the_tokens_of_the_cpu_verifier(v: int) -> None:
    given = batch([5, 0, 1, 3, 7, 40, 2, 5, 0, 4, 6, 33], v)
    accepted, tokens = same_as_own(given)
    drafted = sum(map(len, given.drafts))
    rejected = sum(a < len(d) for a, d in zip(accepted, given.drafts, strict=True))
    assert 0 < sum(accepted) < drafted, "inconclusive"
    assert 0 < rejected < len(given.drafts), "inconclusive"
    reference = gpu.verify_reference(*given.flat())
    assert (reference[0].tolist(), reference[1].tolist()) == (accepted, tokens), "no two scores lie within an ulp"


def test_many_short_requests() -> None:
    given = batch([3] * 20, 13, sharpness=1.0)
    accepted, _ = same_as_own(given)
    assert set(accepted) == {0, 1, 2, 3}


def test_a_request_ignores_the_others() -> None:
    given = batch([5, 0, 1, 3, 7, 2, 5, 4] * 4, 300)
    accepted, tokens = gpu.verify(*given.flat())
    order = torch.randperm(32).tolist()
    for requests in [[0], [1], [31], *(order[:n] for n in (2, 7, 8, 9))]:
        some = gpu.verify(*given.take(requests).flat())
        assert torch.equal(some[0], accepted[requests])
        assert torch.equal(some[1], tokens[requests])


def test_no_drafts_at_all() -> None:
    given = batch([0, 0, 0], 40)
    assert same_as_own(given)[0] == [0, 0, 0]


def test_the_target_itself_as_draft_is_always_accepted() -> None:
    given = batch([6, 6, 6, 6], 60)
    rows = torch.cat([torch.arange(6) + 7 * r for r in range(4)])
    draft = given.target[rows]
    drafts = torch.multinomial(draft, 1)[:, 0].view(4, 6).tolist()
    same = replace(given, draft=draft, drafts=[tuple(d) for d in drafts])
    assert same_as_own(same)[0] == [6, 6, 6, 6]


def test_laws_of_one_token() -> None:
    one = torch.eye(1500)
    target = torch.stack([one[3], one[1499], one[1024], one[3], one[7], one[8]])
    given = Batch([(3, 1499), (3, 8)], target, one[[3, 1499, 3, 8]], [5, 6], torch.tensor([9, 10, 11, 4, 5, 6]))
    assert same_as_own(given) == ([2, 1], [1024, 7])


def test_nothing_left_after_a_rejection_draws_from_the_target() -> None:
    """p is half of q everywhere, so p - q has no positive entry: p takes over, with the residual's noise."""
    draft = torch.rand(12, 90) + 0.1
    target = torch.zeros(24, 90)
    target[0::2] = draft / 2
    target[1::2] = torch.rand(12, 90)
    given = Batch([(r,) for r in range(12)], target, draft, list(range(12)), torch.arange(24))
    accepted, _ = same_as_own(given)
    assert set(accepted) == {0, 1}


def test_subnormal_probabilities() -> None:
    target = torch.zeros(12, 8)
    target[:, 2:6] = torch.tensor([1e-45, 1e-40, 3e-39, 1.2e-38])
    given = Batch([()] * 12, target, torch.zeros(0, 8), list(range(12)), torch.arange(12))
    assert len(set(same_as_own(given)[1])) > 1


def test_a_token_outside_the_vocabulary_is_rejected_and_an_empty_law_gives_minus_one() -> None:
    given = batch([1, 1], 20)
    given.drafts = [(20,), (-1,)]
    assert gpu.verify(*given.flat())[0].tolist() == [0, 0]
    given.target.zero_()
    assert gpu.verify(*given.flat())[1].tolist() == [-1, -1]


def test_no_requests_and_wrong_arguments() -> None:
    none = torch.empty(0, dtype=torch.int64)
    laws = torch.empty(0, 9)
    accepted, tokens = gpu.verify(laws, laws, none, torch.zeros(1, dtype=torch.int64), none, none)
    assert accepted.shape == tokens.shape == (0,)
    target, draft, drafts, offsets, seeds, positions = batch([2, 1], 9).flat()
    with pytest.raises(ValueError, match=r"draft \[3, 9\]"):
        gpu.verify(target, draft[:2], drafts, offsets, seeds, positions)
    with pytest.raises(ValueError, match=r"positions \[5\]"):
        gpu.verify(target, draft, drafts, offsets, seeds, positions[:4])
