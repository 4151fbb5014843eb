"""Does a row's value change with the company it is computed in? Counted, for ours and for plain torch.

Every operation of the target at the target's own weight shapes, and the whole target: the same rows are computed in a
large batch and again in batches of other widths, permuted, in prompt chunks, and on one thread and on one more than
there are; a row counts as differing when one of its bits does. Where plain torch differs nowhere, the sweep says
little: the total tells apart the comparisons of operations for which it does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import ModuleType

import torch
from torch import Tensor

from dspark import ops
from dspark.bench import plain
from dspark.ops.selftest import bits
from dspark.target.cache import KVCache
from dspark.target.decoder import Target

WIDTHS = (1, 2, 5, 6, 7, 8, 9, 16, 32, 33, 64)
ROWS = 128  # of the batch that everything is compared with
QUERIES = 512  # of the prompt in the attention sweep
CHUNKS = (1, 5, 16, 64)
LENGTHS = (40, 3, 17, 64, 200)  # of the sequences that go through the whole target

Rowwise = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Counted:
    """Rows compared, and how many of them differ in any bit."""

    compared: int
    differing: int

    @property
    def share(self) -> float:
        return self.differing / self.compared


def sweep(target: Target, on_step: Callable[[str], None] = lambda _: None) -> dict[str, dict[str, Counted]]:
    """{operation: {"ours": ..., "plain": ...}} for this target's shapes and dtype; on_step(name) before each."""
    found: dict[str, dict[str, Counted]] = {}
    for name in (*_operations(target, ops), "attention", "whole target"):
        on_step(name)
        found[name] = {"ours": _count(name, target, ops), "plain": _count(name, target, plain)}
    return found


def _count(name: str, target: Target, module: ModuleType) -> Counted:
    if name == "whole target":
        return _whole(target.remade(operations=module))
    if name == "attention":
        return _attention(target, module)
    width, compute = _operations(target, module)[name]
    x = torch.randn(ROWS, width, generator=torch.Generator().manual_seed(1))
    return _rowwise(compute, x if name == "log_softmax" else x.to(target.dtype))


def discriminating(found: Mapping[str, Mapping[str, Counted]]) -> int:
    """Comparisons of operations whose rows differ somewhere in plain torch: those that could have failed."""
    return sum(both["ours"].compared for both in found.values() if both["plain"].differing)


def _operations(target: Target, module: ModuleType) -> dict[str, tuple[int, Rowwise]]:
    """Row-wise operations: width of an input row, and what to do with [N, width]."""
    layer, config = target.layers[0], target.config
    half = config.head_dim // 2
    angle = torch.linspace(0, 3, half)[None]
    weights = {
        "linear q, k, v": layer.qkv, "linear output": layer.output, "linear gate, up": layer.gate_up,
        "linear down": layer.down, "linear head": target.head_weight,
    }  # fmt: skip
    found: dict[str, tuple[int, Rowwise]] = {
        f"{name} {w.shape[0]}x{w.shape[1]}": (w.shape[1], partial(_linear, module, w, name == "linear head"))
        for name, w in weights.items()
    }

    def rotated(x: Tensor) -> Tensor:
        cos, sin = (f(angle).expand(len(x), half).contiguous() for f in (torch.cos, torch.sin))
        return module.rotary(x.view(len(x), -1, 2 * half), cos, sin).flatten(1)

    found |= {
        "rms_norm": (config.hidden_size, lambda x: module.rms_norm(x, layer.input_norm, config.rms_norm_eps)),
        "rotary": (config.num_heads * config.head_dim, rotated),
        "silu_mul": (2 * config.intermediate_size, lambda x: module.silu_mul(x)),
        "log_softmax": (target.vocab_size, lambda x: module.log_softmax(x)),
    }
    return found


def _linear(module: ModuleType, weight: Tensor, to_fp32: bool, x: Tensor) -> Tensor:
    return module.linear(x, weight, out_dtype=torch.float32 if to_fp32 else None)


def _rowwise(compute: Rowwise, x: Tensor) -> Counted:
    """Other widths (from the front and from the back), a permutation, and other thread counts, against the whole."""
    whole = compute(x)
    pairs = [(compute(x[:w]), whole[:w]) for w in WIDTHS] + [(compute(x[-w:].contiguous()), whole[-w:]) for w in WIDTHS]
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(2))
    pairs.append((compute(x[order].contiguous()), whole[order]))
    for count in (1, torch.get_num_threads() + 1):
        with threads(count):
            pairs.append((compute(x), whole))
    return _tally(pairs)


def _attention(target: Target, module: ModuleType) -> Counted:
    """A prompt's queries in one call, against chunks of them and against each alone."""
    config, generator = target.config, torch.Generator().manual_seed(3)
    heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    q, k, v = (torch.randn(QUERIES, h, config.head_dim, generator=generator).to(target.dtype) for h in heads)
    begin, end = torch.zeros(QUERIES, dtype=torch.int64), torch.arange(1, QUERIES + 1)

    def compute(size: int) -> Tensor:
        cuts = [slice(i, i + size) for i in range(0, QUERIES, size)]
        return torch.cat([module.attention(q[c], k, v, begin[c], end[c], 0.125) for c in cuts]).flatten(1)

    whole = compute(QUERIES)
    return _tally([(compute(size), whole) for size in CHUNKS])


def _whole(target: Target) -> Counted:
    """Logits of whole sequences in one call, against prompt chunks and against a batch with strangers."""
    generator = torch.Generator().manual_seed(4)
    sequences = [torch.randint(target.vocab_size, (n,), generator=generator) for n in LENGTHS]
    pairs = []
    for ids in sequences:
        whole = _through(target, [ids], len(ids))[0]
        pairs += [(_through(target, [ids], size)[0], whole) for size in CHUNKS]
        place = next(i for i, other in enumerate(sequences) if other is ids)
        pairs.append((_through(target, sequences, 16)[place], whole))
    return _tally(pairs)


@torch.inference_mode()
def _through(target: Target, sequences: list[Tensor], size: int) -> list[Tensor]:
    """Logits of every token: all sequences side by side, ``size`` tokens of each per call."""
    config, longest = target.config, max(map(len, sequences))
    cache = KVCache(
        target.config.cached_windows, len(sequences) * longest, config.num_kv_heads, config.head_dim, target.dtype
    )
    parts: list[list[Tensor]] = [[] for _ in sequences]
    for start in range(0, longest, size):
        live = [(i, ids[start : start + size]) for i, ids in enumerate(sequences) if start < len(ids)]
        positions = [torch.arange(start, start + len(ids)) for _, ids in live]
        begin = torch.cat([torch.full_like(p, i * longest) for p, (i, _) in zip(positions, live, strict=True)])
        flat = torch.cat(positions)
        rows = begin + flat
        hidden, _ = target.forward(torch.cat([ids for _, ids in live]), flat, rows, begin, rows + 1, cache)
        for (i, _), piece in zip(live, target.logits(hidden).split([len(p) for p in positions]), strict=True):
            parts[i].append(piece)
    return [torch.cat(pieces) for pieces in parts]


def _tally(pairs: list[tuple[Tensor, Tensor]]) -> Counted:
    differing = sum(int((bits(a) != bits(b)).any(-1).sum()) for a, b in pairs)
    return Counted(sum(len(a) for a, _ in pairs), differing)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """torch's thread count inside, put back whatever happens."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
