"""A random target and draft model, small enough for hundreds of runs, with a vocabulary small enough that drafts are
both accepted and rejected by chance."""

from __future__ import annotations

import pytest
import torch

from dspark.contracts import Completion, Request, SamplingParams
from dspark.drafter.config import DrafterConfig
from dspark.drafter.model import Drafter
from dspark.target.decoder import Target
from dspark.target.families import read_config
from dspark.target.weights import plan, random_weights

VOCAB = 13


def make_target(dtype: torch.dtype, layers: int = 3, seed: int = 1, vocab: int = VOCAB, hidden: int = 24) -> Target:
    config = read_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": vocab,
            "hidden_size": hidden,
            "intermediate_size": 40,
            "num_hidden_layers": layers,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "max_position_embeddings": 256,
        }
    )
    assert plan(config)
    return Target(config, random_weights(config, seed, dtype, scale=0.35))


def make_drafter(target: Target, seed: int = 2, draft_ids: list[int] | None = None, **fields: object) -> Drafter:
    settings: dict = {"block_size": 4, "mask_token_id": 12, "target_layer_ids": (0, 2), "num_layers": 1}
    settings |= {"sample_from_anchor": True, "markov_rank": 4, "confidence_head": True, "confidence_with_markov": True}
    settings |= {"draft_vocab_size": len(draft_ids or [])} | fields
    config = DrafterConfig.for_target(target, **settings)
    ids = torch.tensor(draft_ids) if draft_ids else None
    drafter = Drafter(config, ids, seed=seed)
    drafter.bind(target.embed_weight, target.head_weight)
    return drafter.to(target.dtype).eval()


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def target(request: pytest.FixtureRequest) -> Target:
    return make_target(request.param)


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "fusion"])
def drafter(request: pytest.FixtureRequest, target: Target) -> Drafter:
    return make_drafter(target, input_fusion=request.param)


def make_requests(count: int, **params: object) -> list[Request]:
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(1, 23, (count,), generator=generator).tolist()
    settings: dict = {"temperature": 0.9, "max_tokens": 17} | params
    return [
        Request(
            tuple(torch.randint(0, VOCAB, (n,), generator=generator).tolist()),
            SamplingParams(**settings, seq_seed=1000 + i),
        )
        for i, n in enumerate(lengths)
    ]


def outputs(completions: list[Completion]) -> list[tuple]:
    """What the contract fixes: ids, both log-probabilities (compared as exact floats), finish reason."""
    return [(c.token_ids, c.logprobs, c.raw_logprobs, c.finish_reason) for c in completions]


def counts(completions: list[Completion]) -> tuple[int, int, int]:
    """(drafted, accepted, rejected) over all rounds."""
    rounds = [r for c in completions for r in c.rounds]
    rejected = sum(r.accepted < r.verified for r in rounds)
    return sum(len(r.drafted) for r in rounds), sum(r.accepted for r in rounds), rejected
