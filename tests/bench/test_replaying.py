"""`bench replay`: the control is exact, so is a long suffix, a short one is not, and all rows compare the same."""

from __future__ import annotations

import pytest
import torch

from dspark.bench import replaying
from dspark.bench.replaying import Kept, Setting, as_lines, bench_replay, default_keeps, exact_keep, joined, least_keep
from dspark.contracts import DsparkError, Request, SamplingParams
from dspark.runner import Engine, EngineOptions
from dspark.target.decoder import Target
from dspark.target.families import read_config
from dspark.target.weights import random_weights
from tests.bench.conftest import narrow
from tests.runner.conftest import VOCAB, make_target

WINDOW, CONSUMERS, BACK = 8, 3, 6


def make_yoco(dtype: torch.dtype = torch.float32) -> Target:
    config = read_config(
        {
            "architectures": ["YocoForCausalLM"], "vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 40,
            "num_hidden_layers": 5, "num_consumer_layers": CONSUMERS, "num_attention_heads": 3,
            "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 256, "sliding_window": WINDOW,
        }
    )  # fmt: skip
    return Target(config, random_weights(config, 1, dtype, scale=0.35))


def prompt(count: int) -> list[int]:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(count)).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cut_is_exact_from_the_consumers_windows_on(dtype: torch.dtype) -> None:
    """Three consumers that look back 7 positions each: 22 tokens. One fewer is not enough; nor is the least."""
    target = make_yoco(dtype)
    assert (least_keep(target.config, BACK), exact_keep(target.config)) == (14, 22)
    setting = Setting((14, 21, 22, 30), BACK, max_tokens=9, repeats=1)
    some = [prompt(60), prompt(90), prompt(30), prompt(29)]  # the last two are no longer than the largest keep
    ran: list[int] = []
    found = bench_replay(target, some, setting, lambda: ran.append(1))
    assert len(ran) == 2
    assert [(one.keep, one.exact) for one in found] == [(14, False), (21, False), (22, True), (30, True), (None, True)]
    assert {(one.prompts, one.tokens) for one in found} == {(2, 18)}
    for one in found:
        assert (one.kl == one.worst == 0.0) == one.exact
        assert one.acceptance == pytest.approx(1.0) if one.exact else 0.0 < one.acceptance < 1.0
        assert one.seconds > 0
    assert found[0].kl > found[1].kl
    assert found[0].worst >= found[0].kl
    lines = narrow("\n".join(as_lines(found)))
    assert [line.split()[4] for line in lines[2:]] == ["differ", "differ", "exact", "exact", "exact"]
    assert lines[-1].split()[0] == "full"


def test_the_laws_are_the_runners() -> None:
    """Through the runner, the greedy answer and its log-probabilities; and of a cut prompt, those of the answer's
    tokens as long as the two agree."""
    target, ids = make_yoco(), prompt(60)
    setting = Setting((14,), BACK, max_tokens=12)
    request = Request(tuple(ids), SamplingParams(temperature=0.0, max_tokens=12, seq_seed=0))
    with torch.inference_mode():
        whole = replaying._Prompt(target, ids, None, setting)
        whole.prefill()
        laws, answer = whole.answer()
        (done,) = Engine(target).generate([request])
        assert tuple(answer.tolist()) == done.token_ids
        own = laws.gather(1, answer[:, None]).flatten()
        torch.testing.assert_close(own.float(), torch.tensor(done.raw_logprobs), rtol=0, atol=1e-5)
        whole.prefill()
        assert torch.equal(whole.laws(answer), laws)
        cut = replaying._Prompt(target, ids, 14, setting)
        cut.prefill()
        first = cut.laws(answer)[0]
        (other,) = Engine(target, None, EngineOptions(truncation="compact", keep_tokens=14)).generate([request])
        assert float(first[other.token_ids[0]]) == pytest.approx(other.raw_logprobs[0], abs=1e-5)
        assert cut.cache.entries == {WINDOW: WINDOW + BACK}  # rings, as the runner's


def test_distances_by_hand() -> None:
    p, q = torch.tensor([[0.5, 0.5], [1.0, 0.0]]).double(), torch.tensor([[0.25, 0.75], [1.0, 0.0]]).double()
    kl, acceptance = replaying._distance(p.clamp_min(1e-300).log(), q.clamp_min(1e-300).log())
    assert float(kl[0]) == pytest.approx(0.5 * 0.6931471806 + 0.5 * -0.4054651081)
    assert acceptance.tolist() == pytest.approx([0.75, 1.0])
    assert float(kl[1]) == 0.0


def test_short_prompts_are_joined() -> None:
    assert joined([[1], [2, 3], [4], [5, 6]], longer_than=2, limit=9) == [[1, 2, 3], [4, 5, 6]]
    assert joined([[1], [2, 3], [4], [5, 6]], longer_than=2, limit=1) == [[1, 2, 3]]
    assert joined([[1], [2, 3], [4]], longer_than=2, limit=9) == [[1, 2, 3]]
    assert joined([[1]], longer_than=2, limit=9) == []


def test_defaults_hold_the_exact_one() -> None:
    assert default_keeps(make_yoco().config, BACK) == [14, 22, 28, 56, 112]
    with pytest.raises(DsparkError, match="keep >= 14"):
        bench_replay(make_yoco(), [prompt(60)], Setting((20, 13), BACK))
    with pytest.raises(DsparkError, match="decoder-decoder"):
        bench_replay(make_target(torch.float32), [prompt(60)], Setting((20,), BACK))
    assert bench_replay(make_yoco(), [prompt(20)], Setting((20,), BACK)) == []
    wide = Kept(100000, 12.34567, 123.4567, 0.9999, False, 12.34, 3, 48)
    narrow("\n".join(as_lines([wide])))
