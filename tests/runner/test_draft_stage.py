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


def tokens(drafter: Drafter, spans: list[tuple[int, range]], seed: int) -> tuple[torch.Tensor, ...]:
    """Features, positions and rows of sequences at their first rows."""
    positions = torch.tensor([p for _, span in spans for p in span], dtype=torch.int64)
    rows = torch.tensor([base + p for base, span in spans for p in span], dtype=torch.int64)
    width = len(drafter.config.target_layer_ids) * drafter.config.hidden_size
    features = torch.randn(len(rows), width, generator=torch.Generator().manual_seed(seed)).to(drafter.dtype)
    return features, positions, rows


def propose(stage: DraftStage) -> Drafts:
    params = SamplingParams(temperature=0.9, seq_seed=3, max_tokens=8)
    sequences = [Sequence(i, Request((1, 2, 3, 4, 5, 6), params), base) for i, base in enumerate((0, 20))]
    return stage.propose(sequences, SamplingRows.of([params] * 2))


def commits(drafter: Drafter) -> list[tuple[torch.Tensor, ...]]:
    """Prompts of two requests, one with a part of its own, a commit of nobody, and two rounds of both."""
    parts = ([(0, range(4))], [(20, range(3))], [(20, range(3, 5)), (12, range(2))], [],
             [(0, range(4, 5)), (20, range(5, 6))], [(0, range(5, 6))])  # fmt: skip
    return [tokens(drafter, spans, seed) for seed, spans in enumerate(parts)]


def filled(drafter: Drafter) -> tuple[DraftStage, DraftStage]:
    """One that computes what was committed at once, and one that waits until somebody asks."""
    early, late = made(drafter), made(drafter)
    for features, positions, rows in commits(drafter):
        early.context.write(rows, drafter.encode(features, positions))
        late.commit(features, positions, rows)
    return early, late


@torch.inference_mode()
def test_late_is_the_same_as_at_once(drafter: Drafter) -> None:
    early, late = filled(drafter)
    assert all(bool((t == 9.0).all()) for t in _tensors(late))  # nothing was computed: nobody asked
    assert propose(late).predictions == propose(early).predictions
    for a, b in zip(_tensors(late), _tensors(early), strict=True):
        assert torch.equal(a[:6], b[:6])
        assert torch.equal(a[20:26], b[20:26])
        assert bool((a[12:14] == 9.0).all())  # of a request that did not ask
        assert not bool((b[12:14] == 9.0).all())
    late.commit(*tokens(drafter, [(20, range(6, 7))], 9))
    early.commit(*tokens(drafter, [(20, range(6, 7))], 9))
    assert propose(late).predictions == propose(early).predictions


@torch.inference_mode()
def test_a_prompt_that_is_taken_over_is_whole(drafter: Drafter) -> None:
    early, late = filled(drafter)
    for stage in (early, late):
        stage.copy(0, 30, 5)
    for a, b in zip(_tensors(late), _tensors(early), strict=True):
        assert torch.equal(a[30:35], b[0:5])
        assert torch.equal(a[:6], b[:6])


@torch.inference_mode()
def test_rows_of_one_that_is_gone_are_never_written(drafter: Drafter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its region belongs to another request now, which begins elsewhere in it: old rows would land among new ones."""
    stage = made(drafter)
    stage.commit(*tokens(drafter, [(18, range(12))], 1))
    stage.forget(18)
    new = tokens(drafter, [(20, range(6))], 2)
    stage.commit(*new)
    propose(stage)
    monkeypatch.setattr(draft, "_MOST_LATE", 0)
    stage.commit(*tokens(drafter, [(0, range(1))], 3))
    for kept, fresh in zip(stage.context.layers[0], drafter.encode(*new[:2]).layers[0], strict=True):
        assert torch.equal(kept[20:26], fresh)
        assert bool((kept[18:20] == 9.0).all())


@torch.inference_mode()
def test_what_waits_is_bounded(drafter: Drafter, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that rests for hours does not fill the memory."""
    monkeypatch.setattr(draft, "_MOST_LATE", 6)
    stage = made(drafter)
    for i in range(18):
        stage.commit(*tokens(drafter, [(0, range(i, i + 1)), (20, range(i, i + 1))], i))
        waiting = sum(len(positions) for late in stage._late.values() for _, positions in late.parts)
        assert waiting == stage._late_rows <= 6


@torch.inference_mode()
def test_a_row_that_waits_does_not_keep_its_pass(drafter: Drafter) -> None:
    stage = made(drafter)
    features, *rest = tokens(drafter, [(0, range(1)), (20, range(12))], 1)
    stage.commit(features, *rest)
    stage.forget(20)
    (left, _), *more = stage._late[0].parts
    assert not more
    assert left.untyped_storage().nbytes() == left.nbytes == features.nbytes // 13


@torch.inference_mode()
def test_a_long_prompt_is_looked_at_as_it_is_read(drafter: Drafter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft, "_MOST_OF_ONE", 6)
    stage, seen, encode = made(drafter), [], drafter.encode
    monkeypatch.setattr(drafter, "encode", lambda f, p: seen.append(len(p)) or encode(f, p))
    for start in range(0, 16, 4):
        stage.commit(*tokens(drafter, [(20, range(start, start + 4))], start))
    assert seen == [8, 8]
