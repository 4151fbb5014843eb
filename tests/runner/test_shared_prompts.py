"""Samples of one prompt scored in one pass that runs the prompt once: the bits of each sequence scored alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dspark.contracts import SamplingParams
from dspark.rl.policy import Policy
from dspark.runner.score import Finished, score
from dspark.target.decoder import Target
from dspark.target.families import read_config
from dspark.target.weights import random_weights

SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {},
    "Mistral": {"sliding_window": 5},
    "Yoco": {"num_consumer_layers": 2, "sliding_window": 6},
}


def tiny(family: str, dtype: torch.dtype) -> Target:
    config = read_config({**SIZES, "architectures": [f"{family}ForCausalLM"], **FAMILIES[family]})
    return Target(config, random_weights(config, 3, dtype, scale=0.2))


def groups() -> list[Finished]:
    """Prompts of 1, 3 and 300 tokens (more than a pass of attention over the keys takes at once), answers of 1 to 40,
    the groups' members apart from each other."""
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 61, (n,), generator=draw).tolist() for n in (1, 3, 300)]
    law = SamplingParams(temperature=0.8, top_p=0.95)
    sizes = [(0, 7), (1, 1), (2, 40), (0, 1), (1, 12), (2, 2), (1, 5), (0, 20), (2, 9)]
    return [Finished(prompts[p], torch.randint(0, 61, (n,), generator=draw).tolist(), law) for p, n in sizes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_equal_bits(family: str, dtype: torch.dtype) -> None:
    target, sequences = tiny(family, dtype), groups()
    together = score(target, sequences)
    alone = [torch.cat(parts) for parts in zip(*(score(target, [s]) for s in sequences), strict=True)]
    for ours, theirs in zip(together, alone, strict=True):
        assert torch.equal(ours, theirs)
    whole = [torch.tensor([*s.prompt_ids, *s.response_ids][:-1]) for s in sequences]
    hidden, _, offsets = target.forward_sequences(whole)
    rows = [torch.arange(int(e) - len(s.response_ids), int(e)) for e, s in zip(offsets[1:], sequences, strict=True)]
    logits = target.logits(hidden[torch.cat(rows)])
    tokens = torch.tensor([t for s in sequences for t in s.response_ids])
    assert torch.equal(together[1], torch.log_softmax(logits, -1).gather(1, tokens[:, None])[:, 0]) or torch.allclose(
        together[1], torch.log_softmax(logits, -1).gather(1, tokens[:, None])[:, 0], atol=1e-5
    ), "and they are the log-probabilities of the plain forward pass"


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_gradients(family: str) -> None:
    """The gradient adds the same terms in another order: equal to rounding, in fp64 to 1e-10."""
    policy, sequences = Policy(tiny(family, torch.float64)), groups()
    law = SamplingParams(temperature=1.0)
    sequences = [Finished(s.prompt_ids[-20:], s.response_ids, law) for s in sequences]
    policy.logprobs(sequences)[1].sum().backward()
    together = {name: p.grad.clone() for name, p in policy.named_parameters()}
    policy.zero_grad()
    for one in sequences:
        policy.logprobs([one])[1].sum().backward()
    for name, parameter in policy.named_parameters():
        assert torch.allclose(together[name], parameter.grad, rtol=1e-10, atol=1e-10), name
        assert together[name].abs().max() > 0
