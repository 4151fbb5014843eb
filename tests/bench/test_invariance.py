"""The sweep counts what it says: nothing of ours differs, and an operation that looks at the batch is found out."""

from __future__ import annotations

import json
import sys
from types import ModuleType

import pytest
import torch

from dspark import cli, ops
from dspark.bench import plain
from dspark.bench.invariance import WIDTHS, Counted, _tally, sweep
from dspark.bench.tax import tax
from dspark.contracts import DsparkError
from dspark.target.decoder import Target
from dspark.target.families import read_config
from dspark.target.weights import random_weights

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 301,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}


def make(dtype: torch.dtype) -> Target:
    config = read_config(CONFIG)
    return Target(config, random_weights(config, 1, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_none_of_ours_differ(dtype: torch.dtype) -> None:
    found = sweep(make(dtype))
    assert {"attention", "whole target", "rms_norm", "log_softmax"} < set(found)
    for name, both in found.items():
        assert both["ours"].compared == both["plain"].compared >= 2 * sum(WIDTHS) or name in (
            "attention",
            "whole target",
        )
        assert both["ours"].differing == 0, name


def test_an_operation_that_looks_at_the_batch_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [name for name in dir(plain) if not name.startswith("_")]
    mixing = ModuleType("mixing")
    vars(mixing).update({name: getattr(plain, name) for name in names})
    mixing.silu_mul = lambda x: ops.silu_mul(x) + len(x) * 1e-3
    monkeypatch.setitem(sys.modules, "mixing", mixing)
    monkeypatch.setattr("dspark.bench.invariance.plain", mixing)
    counted = sweep(make(torch.float32))["silu_mul"]["plain"]
    assert counted.differing == 2 * sum(w for w in WIDTHS), "every width but the permutation and the thread counts"


def test_every_bit_counts() -> None:
    zero, one = torch.zeros(3, 2), torch.ones(3, 2)
    assert _tally([(zero, -zero), (one, one.clone())]) == Counted(6, 3), "-0 is not 0"
    assert _tally([(one.bfloat16(), torch.nextafter(one, 2 * one).bfloat16())]) == Counted(3, 0)


def test_tax_refuses_to_time_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "silu_mul", lambda x: ops.silu_mul(x) * torch.nan)
    with pytest.raises(DsparkError, match="decode with 1 rows to agree"):
        tax(make(torch.float32), rows=(1,), repeats=1)


def ranges(*pairs: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([a for a, _ in pairs]), torch.tensor([b for _, b in pairs])


@pytest.mark.parametrize(
    "pairs",
    [
        [(0, 9)],
        [(2, 9), (12, 19), (22, 29)],  # a decode batch, evenly placed
        [(0, 3), (3, 9), (20, 30)],
        [(4, i) for i in range(5, 12)],  # a whole prompt
        [(4, 9), (4, 10), (20, 21), (20, 22)],  # chunks of two sequences
    ],
)
def test_plain_attention_agrees_with_ours(pairs: list[tuple[int, int]]) -> None:
    begin, end = ranges(*pairs)
    q, k, v = torch.randn(len(pairs), 4, 8), torch.randn(40, 2, 8), torch.randn(40, 2, 8)
    torch.testing.assert_close(plain.attention(q, k, v, begin, end, 0.3), ops.attention(q, k, v, begin, end, 0.3))


def test_plain_target_agrees_with_ours() -> None:
    target = make(torch.float32)
    ids = torch.arange(20)
    ours, _, _ = target.forward_sequences([ids])
    theirs, _, _ = target.remade(operations=plain).forward_sequences([ids])
    torch.testing.assert_close(theirs, ours, atol=1e-4, rtol=1e-4)


def test_tax_compares_both_sides() -> None:
    found = tax(make(torch.float32), rows=(1, 3), repeats=2)
    assert [(one.kind, one.rows) for one in found] == [(k, n) for k in ("decode", "prefill") for n in (1, 3)]
    for one in found:
        assert one.difference < 1e-4 and 0 < one.ratio[0] <= one.ratio[1] <= one.ratio[2]


@pytest.fixture
def checkpoint(tmp_path) -> str:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**{k: v for k, v in CONFIG.items() if k != "architectures"})
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "tiny")
    return str(tmp_path / "tiny")


def test_commands(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main(["bench", "invariance", "--target", checkpoint, "--quiet", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert told["ours"]["differing"] == 0 and told["ours"]["compared"] > 10000
    assert code == (0 if told["plain"]["differing"] else 1)
    args = ["bench", "tax", "--target", checkpoint, "--rows", "1", "2", "--repeats", "1", "--quiet"]
    assert cli.main(args) == 0
    page = capsys.readouterr().out
    assert "bfloat16 prefill" in page and max(map(len, page.splitlines())) <= 80


def test_doctor(checkpoint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli.main(["doctor", "--target", checkpoint]) == 0
    page = capsys.readouterr().out
    assert "0 differ" in " ".join(page.split()) and "FAILED" not in page and max(map(len, page.splitlines())) <= 80
    selftest = sys.modules["dspark.ops.selftest"]
    honest = selftest.linear
    monkeypatch.setattr(selftest, "linear", lambda x, *rest: honest(x, *rest) + len(x))
    assert cli.main(["doctor", "--target", checkpoint, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["bfloat16"][0] is False and "linear" in told["bfloat16"][1]
