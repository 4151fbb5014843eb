"""vLLM as the engine: what it is asked, what is made of its answers, and what is said, with a vLLM of our own making.

One test runs the real one, when DSPARK_VLLM_PYTHON names a Python that has it and what dspark needs (docs/rollouts.md
says how to make such an environment; tests/export/test_vllm.py takes the same variable).
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dspark.cli import main
from dspark.contracts import DsparkError, SamplingParams
from dspark.rollouts.config import RolloutConfig
from dspark.rollouts.manifest import read_manifest
from dspark.rollouts.recompute import Recomputed
from dspark.rollouts.replay import replay
from dspark.rollouts.store import read_aside, read_rounds, read_trajectories, verify_hashes
from dspark.rollouts.vllm_engine import VllmEngine

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("DSPARK_VLLM_PYTHON", "")
NAN, INF = float("nan"), float("inf")


@pytest.fixture
def vllm(fakes: ModuleType, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A module vllm whose LLM answers as the fake runner does. `change` alters an answer, `asked` is what came."""
    kind = SimpleNamespace(FINAL_ONLY="final")
    seen = SimpleNamespace(asked=[], loaded=[], change=lambda index, output: output)

    class LLM:
        def __init__(self, **options: Any):
            print("vLLM talks on stdout")
            seen.loaded.append(options)

        def generate(self, prompts: Any, params: Any, use_tqdm: bool) -> list[Any]:
            seen.asked += zip(prompts, params, strict=True)
            return [SimpleNamespace(outputs=[self.answer(*one)]) for one in zip(prompts, params, strict=True)]

        def answer(self, prompt: Any, given: Any) -> Any:
            ours = SamplingParams(
                given["temperature"], given["top_k"], given["top_p"], given["min_p"], given["max_tokens"],
                tuple(given["stop_token_ids"]), given["seed"],
            )  # fmt: skip
            done = fakes.complete(fakes.Request(tuple(prompt["prompt_token_ids"]), ours))
            rows = [
                {token: SimpleNamespace(logprob=value), -1: SimpleNamespace(logprob=-9.0)}
                for token, value in zip(done.token_ids, done.logprobs, strict=True)
            ]
            output = SimpleNamespace(token_ids=list(done.token_ids), logprobs=rows, finish_reason=done.finish_reason)
            return seen.change(len(seen.asked), output)

    module = ModuleType("vllm")
    module.__dict__.update(__version__="0.0.fake", LLM=LLM, SamplingParams=dict)
    parts = ModuleType("vllm.sampling_params")
    parts.__dict__.update(RequestOutputKind=kind)
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", parts)
    return seen


def collected(fakes: ModuleType, out: Path, recompute: bool = False, score: Any = None, **config: Any) -> Any:
    engine = VllmEngine(Path("folder"), "float32", batch=2)
    facts = {**fakes.facts(drafter=None), **engine.facts(recompute)}
    generator = Recomputed(engine, score or fakes.FakeEngine().score) if recompute else engine
    settings = fakes.with_config(engine="vllm", recompute=recompute, **config)
    return fakes.run(out, generator, settings, base=facts), generator


def test_what_vllm_is_asked(fakes, vllm, tmp_path, capsys):
    collected(fakes, tmp_path / "run")
    (options,) = vllm.loaded
    assert options["model"] == "folder"
    assert (options["dtype"], options["max_num_seqs"], options["max_model_len"]) == ("float32", 2, 12)
    assert options["logprobs_mode"] == "processed_logprobs"
    assert options["generation_config"] == "vllm"
    stored = {t.seq_seed: t for t in read_trajectories(tmp_path / "run")}
    assert len(vllm.asked) == len(stored) == 18
    for prompt, params in vllm.asked:
        t = stored[params["seed"]]
        assert prompt == {"prompt_token_ids": list(t.prompt_ids)}
        assert (params["stop_token_ids"], params["ignore_eos"], params["logprobs"]) == ([fakes.STOP], True, 0)
        assert (params["temperature"], params["max_tokens"], params["detokenize"]) == (1.0, 9, False)
    assert capsys.readouterr().out == ""


def test_what_is_stored_and_said_of_it(fakes, vllm, finished, tmp_path):
    collected(fakes, tmp_path / "run")
    ours = read_trajectories(finished)
    for t, own in zip(read_trajectories(tmp_path / "run"), ours, strict=True):
        assert (t.response_ids, t.logprobs, t.finish_reason) == (own.response_ids, own.logprobs, own.finish_reason)
        assert t.raw_logprobs == t.logprobs  # one law at temperature 1
        assert t.rng_scheme == "vllm-0.0.fake/request-seed" != own.rng_scheme
    run = read_manifest(tmp_path / "run")["run"]
    assert run["rng_scheme"] == "vllm-0.0.fake/request-seed"
    assert (run["engine"]["name"], run["engine"]["version"], run["engine"]["logprobs"]) == ("vllm", "0.0.fake", "vllm")
    assert "this release of vLLM" in run["engine"]["promises"]
    assert "may differ with the batch" in run["engine"]["does_not_promise"]
    assert read_rounds(tmp_path / "run") == {}


def test_another_release_does_not_continue_a_run(fakes, vllm, tmp_path):
    def change(index, output):
        if index > 6:
            raise RuntimeError("out of memory\nand much more")
        return output

    vllm.change = change
    with pytest.raises(DsparkError, match=r"vllm: expected it to finish a piece, but got RuntimeError: out of memory"):
        collected(fakes, tmp_path / "run")
    # nothing is lost of an earlier piece
    vllm.change = lambda index, output: output
    engine = VllmEngine(Path("folder"), "float32", batch=2)
    base = {**fakes.facts(drafter=None), **engine.facts(False)}
    fakes.run(tmp_path / "run", engine, fakes.with_config(engine="vllm", limit=2), base=base)
    sys.modules["vllm"].__dict__["__version__"] = "0.1"
    with pytest.raises(DsparkError, match=r"engine.version was '0\.0\.fake', now '0\.1'"):
        fakes.run(
            tmp_path / "run", config=fakes.with_config(engine="vllm", limit=2), base={**base, **engine.facts(False)}
        )


def test_no_logprobs_at_all_is_an_error(fakes, vllm, tmp_path):
    for values in (lambda o: None, lambda o: o.logprobs[1:]):
        vllm.asked.clear()
        vllm.change = lambda index, output, values=values: replace_logprobs(output, values)
        with pytest.raises(DsparkError, match="expected a log-probability for each of"):
            collected(fakes, tmp_path / "run")
        assert fakes.contents(tmp_path / "run") == {}


def replace_logprobs(output: Any, values: Any) -> Any:
    output.logprobs = values(output)
    return output


def missing(output: Any, place: int) -> Any:
    return [{} if i == place else row for i, row in enumerate(output.logprobs)]


def set_to(output: Any, place: int, value: Any) -> Any:
    row = {output.token_ids[place]: SimpleNamespace(logprob=value)}
    return [row if i == place else old for i, old in enumerate(output.logprobs)]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda o: missing(o, len(o.token_ids) - 1),
        lambda o: set_to(o, len(o.token_ids) - 1, None),
        lambda o: set_to(o, len(o.token_ids) - 1, NAN),
        lambda o: set_to(o, len(o.token_ids) - 1, -INF),
        lambda o: set_to(o, len(o.token_ids) - 1, 0.5),
    ],
    ids=["missing", "none", "nan", "-inf", "above 0"],
)
def test_a_missing_or_broken_logprob_sets_the_trajectory_aside(fakes, vllm, tmp_path, spoil):
    vllm.change = lambda index, output: replace_logprobs(output, spoil) if output.token_ids[0] % 3 == 0 else output
    summary, _ = collected(fakes, tmp_path / "run")
    aside, stored = read_aside(tmp_path / "run"), read_trajectories(tmp_path / "run")
    assert 0 < summary["set_aside"] == len(aside) < 18
    assert len(stored) == summary["trajectories"] == 18 - len(aside)
    assert {a.trajectory_id for a in aside}.isdisjoint(t.trajectory_id for t in stored)
    for one in aside:
        place = len(one.response_ids) - 1
        assert one.reason.startswith(f"response token {place} ({one.response_ids[place]}): its logprob is ")
        assert one.logprobs[place] in (None, 0.5)
        assert 0.0 not in one.logprobs
    assert verify_hashes(tmp_path / "run")["counts"]["set_aside"] == len(aside)
    again = fakes.contents(tmp_path / "run")
    collected(fakes, tmp_path / "run")  # complete: nothing to do
    assert fakes.contents(tmp_path / "run") == again


def test_our_own_runner_sets_nothing_aside(fakes, tmp_path):
    broken = fakes.FakeEngine(alter=lambda _, c: replace(c, logprobs=(NAN,) * len(c.logprobs)))
    with pytest.raises(DsparkError, match=r"logprobs\[0\]: expected a finite"):
        fakes.run(tmp_path / "run", broken)


@pytest.mark.parametrize("after", [3, 9])
def test_what_was_set_aside_survives_a_crash(fakes, vllm, tmp_path, after):
    vllm.change = lambda i, o: replace_logprobs(o, lambda o: missing(o, 0)) if o.token_ids[0] % 3 == 0 else o
    collected(fakes, tmp_path / "whole")

    def crash(done: int, total: int, tokens: int) -> None:
        if done == after:
            raise RuntimeError("crash")

    engine = VllmEngine(Path("folder"), "float32", batch=2)
    base, config = {**fakes.facts(drafter=None), **engine.facts(False)}, fakes.with_config(engine="vllm")
    with pytest.raises(RuntimeError):
        fakes.run(tmp_path / "cut", engine, config, base=base, on_progress=crash)
    summary = fakes.run(tmp_path / "cut", engine, config, base=base)
    assert summary["resumed"] == after
    assert fakes.contents(tmp_path / "cut") == fakes.contents(tmp_path / "whole")


@pytest.mark.parametrize("flip", ["aside", "missing"])
def test_a_damaged_file_of_those_set_aside_is_found(fakes, vllm, tmp_path, flip):
    vllm.change = lambda i, o: replace_logprobs(o, lambda o: missing(o, 0))
    collected(fakes, tmp_path / "run")
    path = tmp_path / "run" / "aside-00001.jsonl"
    if flip == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes().replace(b"logprob", b"logprop", 1))
    with pytest.raises(DsparkError, match=r"aside-00001\.jsonl: expected shard 1"):
        verify_hashes(tmp_path / "run")


def test_recomputed_logprobs_are_ours_and_are_rescored(fakes, vllm, tmp_path):
    vllm.change = lambda i, o: replace_logprobs(o, lambda o: [shifted(row) for row in o.logprobs])
    summary, generator = collected(fakes, tmp_path / "run", recompute=True, temperature=0.5, top_p=0.9)
    compared = generator.compared
    assert compared.tokens == compared.differing == summary["tokens"]
    assert compared.largest == pytest.approx(0.25, abs=1e-6)
    own = {t.seq_seed: fakes.complete(t.request) for t in read_trajectories(tmp_path / "run")}
    for t in read_trajectories(tmp_path / "run"):
        assert (t.logprobs, t.raw_logprobs) == (own[t.seq_seed].logprobs, own[t.seq_seed].raw_logprobs)
    assert read_manifest(tmp_path / "run")["run"]["engine"]["logprobs"] == "dspark"
    engine = fakes.FakeEngine()
    result = replay(tmp_path / "run", engine, None, 0, fakes.facts(), rescore=True)
    assert (result.ok, result.checked, result.regenerated, engine.generated) == (True, 18, False, 0)
    engine = fakes.FakeEngine(alter=lambda _, c: replace(c, raw_logprobs=(-1.0, *c.raw_logprobs[1:])))
    result = replay(tmp_path / "run", engine, None, 0, fakes.facts(), rescore=True)
    assert result.first_difference[:3] == ("p00-0", 0, "rescored raw_logprob")


def shifted(row: Any) -> Any:
    return {token: SimpleNamespace(logprob=one.logprob - 0.25) for token, one in row.items()}


def test_a_token_outside_our_support_sets_the_trajectory_aside(fakes, vllm, tmp_path):
    def score(prompt_ids, response_ids, params):
        logprobs, raw = fakes.FakeEngine().score(prompt_ids, response_ids, params)
        return np.where(np.array(response_ids) % 5 == 0, np.float32(-INF), logprobs), raw

    summary, generator = collected(fakes, tmp_path / "run", recompute=True, score=score, top_p=0.9)
    aside, stored = read_aside(tmp_path / "run"), read_trajectories(tmp_path / "run")
    assert 0 < len(aside) == summary["set_aside"] < 18
    assert all(any(i % 5 == 0 for i in one.response_ids) for one in aside)
    assert not any(i % 5 == 0 for t in stored for i in t.response_ids)
    assert all("its logprob is -inf" in one.reason for one in aside)
    assert generator.compared.tokens > 0


@pytest.mark.parametrize(
    ("recompute", "rescore", "message"),
    [
        (False, True, r"vllm 0\.0\.fake sampled these and gave their log-probabilities"),
        (False, False, r"Roll out with --recompute"),
        (True, False, r"vllm-0\.0\.fake/request-seed\) is no function of keys.*give --rescore"),
    ],
)
def test_what_cannot_be_drawn_again_is_refused(fakes, vllm, tmp_path, recompute, rescore, message):
    collected(fakes, tmp_path / "run", recompute=recompute)
    engine = fakes.FakeEngine()
    with pytest.raises(DsparkError, match=message):
        replay(tmp_path / "run", engine, None, 0, fakes.facts(), rescore=rescore)
    assert engine.generated == 0


def test_rescoring_needs_the_target_alone(fakes, vllm, tmp_path):
    collected(fakes, tmp_path / "run", recompute=True)
    other = fakes.facts(target="ee" * 32)
    with pytest.raises(DsparkError, match="target: recorded"):
        replay(tmp_path / "run", fakes.FakeEngine(), None, 0, other, rescore=True)
    assert replay(tmp_path / "run", fakes.FakeEngine(), None, 0, fakes.facts(verifier="rejection"), rescore=True).ok


def test_an_end_of_another_kind(fakes, vllm, tmp_path):
    def change(index, output):
        output.finish_reason = "abort"
        return output

    vllm.change = change
    with pytest.raises(DsparkError, match="one ended by 'abort'"):
        collected(fakes, tmp_path / "run")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"drafter": "runs/bundle"}, "our draft models run in our runner.*speculative_config"),
        ({"workers": 2}, "workers 1 with engine vllm"),
        ({"temperature": 0.7}, "recompute true with engine vllm at any temperature but 1"),
        ({"top_k": 5}, "recompute true"),
        ({"temperature": 0.0}, "recompute true"),
        ({"truncation": "compact", "keep_tokens": 9, "recompute": True}, "truncation off"),
        ({"engine": "sglang"}, "engine dspark or vllm"),
        ({"engine": "dspark", "recompute": True}, "recompute false with engine dspark"),
    ],
)
def test_settings_that_do_not_go_together(values, message):
    with pytest.raises(DsparkError, match=message):
        RolloutConfig.from_dict({"engine": "vllm", **values})


def test_without_vllm(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(DsparkError, match=r"expected vLLM in this environment.*an environment of their own"):
        VllmEngine(Path("folder"), "float32", 2)


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="DSPARK_VLLM_PYTHON names no Python that has vLLM and what dspark needs")
def test_the_real_one(tmp_path, capsys):
    """The embedded target: vLLM samples, our target gives the log-probabilities, and replay finds their very bits."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1",
                "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": paths}  # fmt: skip
    options = ["--prompts", "data/prompts/test.jsonl", "--limit", "3", "--samples_per_prompt", "2", "--max_tokens", "8"]
    options += ["--temperature", "0.8", "--top_p", "0.9", "--dtype", "float32", "--quiet", "--json"]
    command = [
        PYTHON,
        "-m",
        "dspark",
        "rollout",
        *options,
        "--engine",
        "vllm",
        "--recompute",
        "--out",
        str(tmp_path / "v"),
    ]
    done = subprocess.run(
        command, env=os.environ | settings, capture_output=True, text=True, timeout=590, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads(done.stdout)
    assert summary["trajectories"] + summary["set_aside"] == 6
    assert summary["recomputed"]["tokens"] > 0
    assert summary["recomputed"]["largest"] < 1e-2  # fp32 sums in another order
    assert main(["replay", str(tmp_path / "v"), "--rescore", "--quiet"]) == 0
    assert "every bit equal" in capsys.readouterr().out
    assert main(["replay", str(tmp_path / "v"), "--quiet"]) == 2
    assert "give --rescore" in capsys.readouterr().err
    assert all(math.isfinite(x) for t in read_trajectories(tmp_path / "v") for x in t.logprobs)
