"""What the draft model makes of confirmed tokens is computed late; nobody can tell."""

from __future__ import annotations

import pytest
import torch

from dspark.contracts import Request, SamplingParams
from dspark.drafter.model import Drafter
from dspark.runner import draft
from dspark.runner.draft import Drafts, DraftStage
from dspark.runner.sequence import Sequence
from dspark.runner.verify import SamplingRows

ROWS = 40


def made(drafter: Drafter) -> DraftStage:
    stage = DraftStage(drafter, ROWS, "coupled", drafter.config.num_predictions)
    for tensor in _tensors(stage):
        tensor.fill_(9.0)
    return stage


def _tensors(stage: DraftStage) -> list[torch.Tensor]:
    context = stage.context
    return [t for pair in context.layers for t in pair] + ([] if context.features is None else [context.features])


def tokens(drafter: Drafter, rows: list[int], seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    width = len(drafter.config.target_layer_ids) * drafter.config.hidden_size
    features = torch.randn(len(rows), width, generator=torch.Generator().manual_seed(seed)).to(drafter.dtype)
    at = torch.tensor(rows, dtype=torch.int64)
    return features, at % 20, at


def propose(stage: DraftStage) -> Drafts:
    params = SamplingParams(temperature=0.9, seq_seed=3, max_tokens=8)
    sequences = [Sequence(i, Request((1, 2, 3, 4, 5, 6), params), base) for i, base in enumerate((0, 20))]
    return stage.propose(sequences, SamplingRows.of([params] * 2))


def commits(drafter: Drafter) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Among them an empty one, and rows 2 and 3 twice: the request that had them is gone, another has come."""
    parts = ([0, 1, 2, 3], [20, 21, 22, 23, 24], [], [2, 3, 4], [5, 25])
    return [tokens(drafter, rows, seed) for seed, rows in enumerate(parts)]


@torch.inference_mode()
def test_late_is_the_same_as_at_once(drafter: Drafter) -> None:
    early, late = made(drafter), made(drafter)
    untouched = _tensors(late)[0].clone()
    for part in commits(drafter):
        early.commit(*part)
        early._settle()
        late.commit(*part)
    assert torch.equal(_tensors(late)[0], untouched)  # nothing was computed: nobody asked
    assert propose(late).predictions == propose(early).predictions
    for a, b in zip(_tensors(late), _tensors(early), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(_tensors(late)[0], untouched)


@torch.inference_mode()
def test_a_prompt_that_is_taken_over_is_whole(drafter: Drafter) -> None:
    early, late = made(drafter), made(drafter)
    for part in commits(drafter):
        early.commit(*part)
        early._settle()
        late.commit(*part)
    for stage in (early, late):
        stage.copy(0, 30, 5)
    for a, b in zip(_tensors(late), _tensors(early), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a[30:35], a[0:5])


@torch.inference_mode()
def test_what_waits_is_bounded(drafter: Drafter, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that rests for hours does not fill the memory."""
    monkeypatch.setattr(draft, "_MOST_LATE", 6)
    stage = made(drafter)
    for i in range(50):
        stage.commit(*tokens(drafter, [i % ROWS, (i + 1) % ROWS], i))
        assert sum(len(rows) for _, _, rows in stage._late) < 6
