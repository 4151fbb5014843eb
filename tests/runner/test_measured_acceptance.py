"""Acceptance in running batches is what the formulas say of the laws that met there, within its own interval."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
from torch import Tensor

from dspark import probability
from dspark.contracts import SamplingParams
from dspark.runner import Engine, EngineOptions, engine
from dspark.runner.verify import SamplingRows, Verdict
from tests.runner.conftest import counts, make_drafter, make_requests, make_target

PARAMS = {"temperature": 0.9, "top_p": 0.95}
FORMULAS = {
    "coupled": probability.coupled_acceptance,  # sum over v of 1 / sum_u max(p_u / p_v, q_u / q_v)
    "rejection": lambda p, q: torch.minimum(p, q).sum(-1),
}


@pytest.mark.parametrize("verifier", FORMULAS)
@pytest.mark.parametrize("ids", [None, [0, 2, 3, 7, 8, 11]])
def test_the_first_slot(verifier: str, ids: list[int] | None) -> None:
    target = make_target(torch.float32)
    drafter = make_drafter(target, draft_ids=ids)
    laws: list[Tensor] = []  # of the first slot, a block's [R, V] at a time
    found: list[tuple[float, bool]] = []  # what the formula says, what happened
    propose, verify = drafter.propose, engine.verify

    def drafting(*args):
        *rest, choose, width = args

        def seen(slot: int, logits: Tensor) -> Tensor:
            if slot == 0:
                rows = SamplingRows.of([SamplingParams(**PARAMS)] * len(logits))
                whole = torch.zeros(len(logits), target.vocab_size)
                whole[:, drafter.draft_ids if ids else slice(None)] = rows.shape(logits)
                laws.append(whole)
            return choose(slot, logits)

        return propose(*rest, seen, width)

    def verifying(name, probs, sampling, positions, drafts, draft_probs) -> list[Verdict]:
        verdicts = verify(name, probs, sampling, positions, drafts, draft_probs)
        row = 0
        for i, (draft, verdict) in enumerate(zip(drafts, verdicts, strict=True)):
            if draft:
                said = FORMULAS[verifier](probs[row].double(), laws[-1][i].double())
                found.append((float(said), verdict.accepted > 0))
            row += len(draft) + 1
        return verdicts

    with mock.patch.object(drafter, "propose", drafting), mock.patch.object(engine, "verify", verifying):
        done = Engine(target, drafter, EngineOptions(verifier, max_batch=8)).generate(make_requests(120, **PARAMS))
    assert min(counts(done)) > 0
    assert len(found) > 800
    wanted, happened = sum(a for a, _ in found), sum(b for _, b in found)
    spread = math.sqrt(sum(a * (1 - a) for a, _ in found))
    assert 0.05 * len(found) < wanted < 0.95 * len(found), "inconclusive: nearly always or nearly never accepted"
    assert abs(happened - wanted) < 3.5 * spread, (happened, wanted, spread)
