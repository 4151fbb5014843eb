"""The three switches under which the course promises reproducible rejection sampling, and what each of them guards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dspark import ops
from dspark.commands.running import Loaded, load_curve
from dspark.contracts import Completion, DsparkError, Request, SamplingParams
from dspark.export.switches import resolve_policy
from dspark.runner.curve import CapacityCurve
from dspark.target.decoder import Target
from tests.runner.conftest import counts, make_drafter, make_requests, outputs

CURVE = CapacityCurve((1, 4, 8, 16, 64), (1.0, 1.1, 1.3, 1.8, 8.0))


@pytest.fixture
def loaded(target: Target) -> Loaded:
    drafter = make_drafter(target)
    bundle: Any = SimpleNamespace(drafter=drafter, config=drafter.config)
    return Loaded("none", "float32", target, bundle)


def run(loaded: Loaded, requests: list[Request], verifier: str, batch: int, **options: Any) -> list[Completion]:
    policy = resolve_policy("", verifier)
    return loaded.engine(verifier, None, batch, policy=policy, curve=CURVE, **options).generate(requests)


def switches(monkeypatch: pytest.MonkeyPatch, varlen: int) -> None:
    monkeypatch.setenv("DEEPINFER_BATCH_INVARIANT", "1")
    monkeypatch.setenv("DEEPINFER_ENABLE_MTP_VARLEN", str(varlen))


def test_three_switches_make_rejection_reproducible(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    switches(monkeypatch, varlen=0)
    requests = make_requests(9, temperature=0.9, max_tokens=25)
    reference = run(loaded, requests, "rejection", 9)
    assert min(counts(reference)) > 0
    for batch, chunk in ((1, 256), (3, 256), (9, 5)):
        done = run(loaded, requests, "rejection", batch, prefill_chunk=chunk)
        assert outputs(done) == outputs(reference)
        assert [c.rounds for c in done] == [c.rounds for c in reference]
    turned = run(loaded, requests[::-1], "rejection", 4)[::-1]
    assert outputs(turned) == outputs(reference)


def test_another_seed_is_another_sample(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    switches(monkeypatch, varlen=0)
    requests = make_requests(3, temperature=0.9)
    other = [Request(r.prompt_ids, r.params.with_seed(2000 + i)) for i, r in enumerate(requests)]
    assert outputs(run(loaded, requests, "rejection", 3)) != outputs(run(loaded, other, "rejection", 3))
    free = [Request((1, 2, 3), SamplingParams(temperature=0.9, max_tokens=20))] * 2
    first, second = run(loaded, free, "rejection", 2)
    assert first.seq_seed != second.seq_seed
    again = [Request((1, 2, 3), free[0].params.with_seed(c.seq_seed)) for c in (first, second)]
    assert outputs(run(loaded, again, "rejection", 1)) == outputs([first, second])


def test_variable_lengths_need_the_coupled_verifier(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = make_requests(9, temperature=0.9, max_tokens=25)
    fixed = run(loaded, requests, "coupled", 9)
    switches(monkeypatch, varlen=1)
    with pytest.raises(DsparkError, match=r"DEEPINFER_ENABLE_MTP_VARLEN.*rejection"):
        run(loaded, requests, "rejection", 9)
    for batch in (1, 4, 9):
        done = run(loaded, requests, "coupled", batch)
        assert outputs(done) == outputs(fixed)
        assert len({r.verified for c in done for r in c.rounds}) > 1, "inconclusive: lengths did not vary"
        assert min(counts(done)) > 0
    with pytest.raises(DsparkError, match="expected one value for enable_mtp_varlen"):
        resolve_policy("fixed", "coupled")


def test_a_curve_of_another_machine_is_said(loaded: Loaded, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loaded = replace(loaded, bundle=None)
    here = {"machine": ops.fingerprint(), "target": loaded.target.fingerprint, "dtype": "float32", "drafter": None}
    for facts, words in ((here, ""), ({**here, "machine": {}, "dtype": "bfloat16"}, "another machine and dtype")):
        replace(CURVE, facts=facts).save(tmp_path / "curve.json")
        assert load_curve(str(tmp_path / "curve.json"), loaded) is not None
        told = capsys.readouterr().err
        assert (words in told) if words else not told
    assert load_curve("", loaded) is None
