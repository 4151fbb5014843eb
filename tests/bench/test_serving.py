"""`dspark bench runner`: sides that do the same work, checks that can fail, limits that are counted right."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark import cli
from dspark.bench import arriving, peers, roofline, serving
from dspark.bench.peers import Answered, Transformers, Vllm
from dspark.commands import bench_serving
from dspark.contracts import DsparkError, Request
from dspark.rl.save import save_policy
from dspark.runner import Engine, EngineOptions
from dspark.runner.curve import CapacityCurve
from dspark.target.decoder import Target
from dspark.target.load import load_target, random_target
from tests.bench.conftest import World, models
from tests.runner.conftest import make_drafter, make_requests, make_target, outputs

CURVE = CapacityCurve((1, 64), (1.0, 1.2), (1, 64), (0.01, 0.01))
TASK = Path(__file__).resolve().parents[2] / "data" / "rl" / "digits"


class Same:
    """A peer that is our own runner: at temperature 0 it says what we say, but for `wrong` tokens at the end."""

    name = "same"

    def __init__(self, target: Target, wrong: int = 0):
        self.target, self.wrong, self.batches = target, wrong, set[int]()

    def answer(self, requests: Sequence[Request], batch: int) -> Answered:
        self.batches.add(batch)
        done = Engine(self.target, None, EngineOptions(max_batch=batch)).generate(list(requests))
        tokens = [c.token_ids[: len(c.token_ids) - self.wrong] + (-1,) * self.wrong for c in done]
        return Answered(tokens, 1.0)

    def close(self) -> None: ...


@pytest.fixture(scope="module")
def small() -> Target:
    return make_target(torch.float32)


def requests() -> list[Request]:
    return make_requests(6, max_tokens=16)


def test_every_way_is_compared_with_the_peer_of_its_law_and_with_plain(small: Target) -> None:
    peer = Same(small, wrong=4)
    parts = serving.Parts(small, make_drafter(small), CURVE, (peer,))
    rows = serving.speeds(parts, requests(), 3, 2, roofline.Rates(1e9, 1e9))
    ours = {row.side: row for row in rows if row.roof}
    assert list(ours) == [way.name for way in parts.ways()]
    assert peer.batches == {3}
    for name, row in ours.items():
        assert set(row.ratios) == ({"same"} if name.startswith("plain") else {"same", "plain"}), name
        assert row.wrong == 0
        assert (row.tau > 1) != name.startswith("plain")
        assert row.rate[0] <= row.rate[1] <= row.rate[2]
        assert row.ratios["same"][1] == pytest.approx(row.rate[1] / 96, rel=0.5)  # 6 x 16 tokens in a second
    theirs = {row.side: row for row in rows if not row.roof}
    assert list(theirs) == ["same", "same, greedy"]
    assert theirs["same, greedy"].ratios["agrees"][0] == 12 / 16


def test_an_output_that_is_not_plain_decodings_is_counted(small: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = serving.Parts.engine

    def other(self: serving.Parts, way: serving.Way, *sizes: object) -> Engine:
        engine = whole(self, way, *sizes)
        if way.drafts:
            begin = engine.begin
            engine.begin = lambda some: begin([replace(r, params=r.params.with_seed(7)) for r in some])  # type: ignore[method-assign]
        return engine

    monkeypatch.setattr(serving.Parts, "engine", other)
    parts = serving.Parts(small, make_drafter(small))
    rows = {row.side: row for row in serving.speeds(parts, requests(), 3, 1, roofline.Rates(1e9, 1e9))}
    assert rows["coupled"].wrong > 0 == rows["plain"].wrong
    found = {"rates": {"read": 1e9, "matmul": 1e9}, "dtype": "float32",
             "speed": [bench_serving.asdict(row) for row in rows.values()]}  # fmt: skip
    assert f"{rows['coupled'].wrong} differ from plain" in "\n".join(bench_serving._text(found))
    found["speed"] = [bench_serving.asdict(replace(rows["coupled"], tau=1.0, wrong=2))]  # nothing was ever accepted
    assert "2 differ from plain" in "\n".join(bench_serving._text(found))


def test_what_a_pass_reads_and_multiplies(small: Target) -> None:
    """Counted by hand: plain decoding, one request alone."""
    request = make_requests(1, max_tokens=5)[0]
    done = Engine(small).generate([request])
    new, prompt = len(done[0].token_ids), len(request.prompt_ids)
    config, passes = small.config, new  # the prompt's, and one for each token after the first
    layer = 24 * 5 * 8 + 3 * 8 * 24 + 2 * 40 * 24 + 40 * 24  # qkv, output, gate and up, down
    norms = 3 * 2 * 24 + 24
    got = roofline.work(small, [request], done, passes)
    weights = 3 * layer + norms
    cached = (new - 1) * (prompt + new / 2) * 2 * 3 * 1 * 8 * 4
    assert got.read == passes * (weights + 13 * 24) * 4 + cached
    products = 2 * (weights * (prompt + new - 1) + 13 * 24 * new)
    attended = (new - 1) * (prompt + new / 2) + prompt**2 / 2
    assert got.flops == products + 4 * 3 * 8 * 3 * attended
    assert roofline.token_bytes(small) == 2 * 3 * 1 * 8 * 4
    assert got.seconds(roofline.Rates(got.read, got.flops / 3)) == 3.0
    assert config.num_layers == 3


def test_requests_over_time_are_checked_against_each_alone(small: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    some = requests()
    at = arriving.arrivals(len(some), 200.0)
    assert at == sorted(at) == arriving.arrivals(len(some), 200.0)
    engine = Engine(small, make_drafter(small), EngineOptions(max_batch=3))
    found = arriving.serve("ours", engine, some, at, check=3)
    assert (found.wrong, found.checked) == (0, 3)
    assert found.first is not None
    assert 0 < found.first[0] <= found.last[0] <= found.last[1]
    theirs = arriving.serve_by_batches(Same(small), some, at, 3)
    assert theirs.first is None
    assert theirs.rate > 0
    assert theirs.checked == 0

    generate = engine.generate
    monkeypatch.setattr(
        engine, "generate", lambda some: generate([replace(r, params=r.params.with_seed(1)) for r in some])
    )
    assert arriving.serve("ours", engine, some, at, check=3).wrong == 3


def test_memory_and_contexts(small: Target) -> None:
    prompts = [[1 + (i * j) % 11 for j in range(200)] for i in range(1, 4)]
    held = serving.memory(small, prompts)
    assert 300 < held.cached < 600
    assert held.exact == held.cached * roofline.token_bytes(small)
    found = serving.contexts(serving.Parts(small, peers=(Same(small),)), prompts, 2, 4, 1)
    assert (found.tokens, found.batch) == (200, 2)
    assert set(found.first) == set(found.rate) == {"ours", "same"}


def test_transformers_says_what_we_say(tmp_path: Path) -> None:
    """Prompts of several lengths at once: the padding does not count. fp32, so that both round alike."""
    save_policy(tmp_path / "tiny", random_target(TASK, "float32", 0, 0.3), str(TASK))
    target, peer = load_target(tmp_path / "tiny", "float32"), Transformers(tmp_path / "tiny", "float32")
    some = [Request((3, 6, 7, 8, 4)[: 2 + i], r.params) for i, r in enumerate(make_requests(4, temperature=0.0))]
    ours = Engine(target).generate(some)
    assert peer.answer(some, 4).tokens == [c.token_ids for c in ours]
    assert peer.answer(some, 1).tokens == [c.token_ids for c in ours]
    sampled = peer.answer([Request(r.prompt_ids, replace(r.params, temperature=0.8, top_p=0.9)) for r in some], 4)
    assert {len(ids) for ids in sampled.tokens} == {17}
    assert outputs(ours)


def test_the_faster_of_two_stays(small: Target) -> None:
    class Slow(Same):
        closed = False

        def answer(self, requests: Sequence[Request], batch: int) -> Answered:
            return replace(super().answer(requests, batch), seconds=9.0)

        def close(self) -> None:
            self.closed = True

    slow, quick = Slow(small), Same(small)
    assert peers.faster([slow, quick], requests()) is quick
    assert slow.closed


def test_without_vllm_it_is_said_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(peers.PYTHON, raising=False)
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DsparkError, match=r"expected vLLM, but it is not installed here. Make an environment"):
        Vllm(tmp_path, "bfloat16", 128, 1)
    monkeypatch.setenv(peers.PYTHON, str(tmp_path / "python"))
    with pytest.raises(DsparkError, match="DSPARK_VLLM_PYTHON: expected a Python with vLLM"):
        Vllm(tmp_path, "bfloat16", 128, 1)
    monkeypatch.setenv(peers.PYTHON, "/bin/false")
    with pytest.raises(DsparkError, match="its process ended with 1"):
        Vllm(tmp_path, "bfloat16", 128, 1)


def test_vllm_is_asked_line_by_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a process that answers as vllm_peer.py does, with other lines in between."""
    fake = tmp_path / "fake.py"
    fake.write_text(
        "import json, sys\nprint('INFO loading')\nprint('{\"dspark\": 1}', flush=True)\n"
        "for line in sys.stdin:\n    asked = json.loads(line)\n    print('warning')\n"
        "    tokens = [ids[:1] * asked['max_tokens'] for ids in asked['prompts']]\n"
        "    print(json.dumps({'dspark': 1, 'seconds': 0.5, 'tokens': tokens}), flush=True)\n"
    )
    monkeypatch.setattr(peers, "_SCRIPT", fake)
    monkeypatch.setenv(peers.PYTHON, peers.sys.executable)
    peer = Vllm(tmp_path, "bfloat16", 128, 1)
    some = make_requests(2, max_tokens=3)
    found = peer.answer(some, 1)
    assert found.seconds == 0.5
    assert found.tokens == [r.prompt_ids[:1] * 3 for r in some]
    peer.close()


@pytest.mark.slow
def test_the_verb(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "runner.json"
    base = ["bench", "runner", *models(world), "--prompts", world.prompts, "--curve", world.curve]
    base += ["--batches", "1", "2"]
    base += ["--limit", "2", "--max_tokens", "12", "--repeats", "1", "--contexts", "40", "--arrivals", "6", "--quiet"]
    assert cli.main([*base, "--out", str(out)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert max(map(len, said)) <= 80, said
    found: dict[str, Any] = json.loads(out.read_text())
    assert {row["batch"] for row in found["speed"]} == {1, 2}
    assert all(row["wrong"] == 0 for row in found["speed"])
    assert [row["requests"] for row in found["arrivals"]] == [6] * len(found["arrivals"])
    assert found["contexts"][0]["tokens"] == 40
    assert cli.main([*base, "--contexts", "9000"]) == 2
    assert "expected --contexts that fit" in capsys.readouterr().err
