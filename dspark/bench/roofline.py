"""What a pass of the target cannot be faster than: the bytes it has to read and the products it has to make, at the
rates this machine was measured to read and multiply at.

Every pass reads all weights once and, for each request, the keys and values of its context; a row costs two operations
a weight. Activations, sampling and the draft model are left out: what they take is part of the distance.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from dspark.bench.looking_up import count_passes
from dspark.contracts import Completion, Request
from dspark.target.decoder import Target

_BYTES = 1 << 29  # far more than any cache holds
_SIDE = 1536  # of the square matrices


@dataclass(frozen=True, slots=True)
class Rates:
    """read: bytes/s of one big sum. matmul: FLOP/s of torch's own big product, in fp32 or in the weights' dtype,
    whichever is faster here (without instructions for bf16 that is fp32, which our bf16 products then run in)."""

    read: float
    matmul: float


@dataclass(frozen=True, slots=True)
class Work:
    """read: bytes. flops: of the products and of attention."""

    read: float
    flops: float

    def seconds(self, rates: Rates) -> float:
        """The least time, were reading and multiplying to overlap wholly."""
        return max(self.read / rates.read, self.flops / rates.matmul)


def measure_rates(dtype: torch.dtype, repeats: int = 5) -> Rates:
    """The best of a few, on as many threads as torch has."""
    data = torch.ones(_BYTES // 4)
    read = _best(lambda: data.sum(), repeats)
    return Rates(_BYTES / read, max(_product_rate(one, repeats) for one in {torch.float32, dtype}))


def _product_rate(dtype: torch.dtype, repeats: int) -> float:
    square = torch.ones(_SIDE, _SIDE, dtype=dtype)
    return 2 * _SIDE**3 / _best(lambda: square @ square, repeats)


def work(target: Target, requests: Sequence[Request], done: Sequence[Completion], passes: int) -> Work:
    """Of finished requests that took so many passes together."""
    config, size = target.config, target.embed_weight.itemsize
    layers = sum(t.numel() for name, t in target.tensors() if name not in ("embed", "head"))
    head, read, flops = target.head_weight.numel(), 0.0, 0.0
    read += passes * (layers + head) * size
    for request, completion in zip(requests, done, strict=True):
        prompt, new = len(request.prompt_ids), len(completion.token_ids)
        own = count_passes(request, completion)
        decoded = own + sum(r.verified for r in completion.rounds)  # rows
        context = prompt + new / 2
        read += own * context * token_bytes(target)
        flops += 2.0 * (layers * (prompt + decoded) + head * (1 + decoded))
        attended = decoded * context + prompt * prompt / 2
        flops += 4.0 * config.num_heads * config.head_dim * config.num_layers * attended
    return Work(read, flops)


def token_bytes(target: Target) -> int:
    """Exact size of the keys and values of one token."""
    config = target.config
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * target.embed_weight.itemsize


def _best(run: Callable[[], object], repeats: int) -> float:
    run()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return min(times)
