"""All layers in one call give the bits of the operations one by one, for every family that has such layers."""

from __future__ import annotations

import copy
import io
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from dspark import ops
from dspark.contracts import DsparkError
from dspark.ops.cpu import layers
from dspark.target.cache import KVCache
from dspark.target.decoder import Target
from dspark.target.families import read_config
from tests.target.conftest import SIZES
from tests.target.test_invariance import poisoned, tokens

FAMILIES = [
    ("Qwen3ForCausalLM", {}),
    ("Qwen2ForCausalLM", {}),
    ("LlamaForCausalLM", {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}),
    ("MistralForCausalLM", {"sliding_window": 5}),
]
TAPS = (-1, 0, 2)
every = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each call of the stack, whose buffers hold NaN at first."""
    seen: list[int] = []
    run, empty = layers.Stack.run, torch.empty

    def counted(self: layers.Stack, normed: Tensor, *args: Any) -> Any:
        seen.append(len(normed))
        return run(self, normed, *args)

    class Poisoned:
        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        def empty(self, *size: Any, **kind: Any) -> Tensor:
            return empty(*size, **kind).fill_(float("nan"))

        def empty_like(self, other: Tensor) -> Tensor:
            return torch.full_like(other, float("nan"))

    monkeypatch.setattr(layers, "torch", Poisoned())
    monkeypatch.setattr(layers.Stack, "run", counted)
    return seen


def passes(target: Target, fused: bool) -> tuple[list[Tensor], KVCache]:
    """A prompt in two chunks, then single rows of it beside rows of another sequence; all that comes out."""
    ids, other = tokens(19, 1), tokens(9, 2)
    cache, found = poisoned(target, 60), []
    pieces = [[(ids[:7], 0, 20)], [(ids[7:15], 7, 20), (other[:5], 0, 3)], [(ids[15:16], 15, 20)]]
    pieces += [[(ids[16:18], 16, 20), (other[5:8], 5, 3)], [(ids[18:], 18, 20), (other[8:], 8, 3)]]
    if not fused:
        target.__dict__["_stack"] = None
    with torch.no_grad():
        for pass_ in pieces:
            at = [torch.arange(start, start + len(part)) for part, start, _ in pass_]
            rows = torch.cat([p + base for p, (_, _, base) in zip(at, pass_, strict=True)])
            begin = torch.cat([torch.full_like(p, base) for p, (_, _, base) in zip(at, pass_, strict=True)])
            flat = torch.cat([part for part, _, _ in pass_])
            hidden, features = target.forward(flat, torch.cat(at), rows, begin, rows + 1, cache, TAPS)
            assert features is not None
            found += [hidden, features, target.logits(hidden)]
    target.__dict__.pop("_stack", None)
    return found, cache


@every
@pytest.mark.parametrize(("architecture", "fields"), FAMILIES, ids=[f[0] for f in FAMILIES])
@pytest.mark.usefixtures("threads")
def test_the_bits_of_the_operations_one_by_one(
    tiny_target: Callable[..., Target], calls: list[int], dtype: torch.dtype, architecture: str, fields: dict[str, Any]
) -> None:  # fmt: skip
    target = tiny_target(dtype, architecture, **fields)
    wanted, arena = passes(target, fused=False)
    assert calls == []
    got, same_arena = passes(target, fused=True)
    assert calls == [7, 13, 1, 5, 2]
    for a, b in zip(got, wanted, strict=True):
        assert torch.isfinite(a).all()
        assert torch.equal(a, b)
    for a, b in zip((*same_arena.k, *same_arena.v), (*arena.k, *arena.v), strict=True):
        assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))  # and nothing else was written


def test_a_weight_that_changed_behind_torchs_back_is_packed_anew(tiny_target: Callable[..., Target]) -> None:
    target = tiny_target(torch.float32)
    first, _ = passes(target, fused=True)
    target.layers[1].down.data.mul_(1.5)
    target.layers[2].qkv.data.mul_(0.5)
    changed, _ = passes(target, fused=True)
    wanted, _ = passes(target, fused=False)
    assert all(torch.equal(a, b) for a, b in zip(changed, wanted, strict=True))
    assert not torch.equal(first[0], changed[0])


def test_a_weight_that_no_longer_fits_is_refused(tiny_target: Callable[..., Target]) -> None:
    """Found after the first pass, when the addresses are known already."""
    for change in (lambda t: t.float(), lambda t: t[:2].clone()):
        target = tiny_target(torch.bfloat16)
        passes(target, fused=True)
        stack = target._stack
        assert stack is not None
        norm = target.layers[1].post_norm
        norm.data = change(norm.data)
        with pytest.raises(DsparkError, match=r"layers: expected post_norm \(32,\) of torch.bfloat16"):
            stack._weights()


def test_packed_weights_are_not_kept_by_the_stack(tiny_target: Callable[..., Target]) -> None:
    """An optimizer's step drops them: two generations of packed weights would not fit where one does."""
    target = tiny_target(torch.float32)
    passes(target, fused=True)
    stack = target.__dict__["_stack"] = layers.Stack(target.layers, [target.final_norm] * 3, (4, 2, 8))
    _, held = stack._weights()
    references = [weakref.ref(entry) for entry in held]
    del held
    for layer in target.layers:
        for weight in (layer.qkv, layer.output, layer.gate_up, layer.down):
            ops.forget(weight)
    assert not any(reference() for reference in references)


def test_a_target_that_has_run_can_be_copied(tiny_target: Callable[..., Target]) -> None:
    target = tiny_target(torch.float32)
    before = len(io_bytes(target))
    wanted, _ = passes(target, fused=True)
    stack = target.__dict__["_stack"] = target._stack
    assert stack is not None
    stack._weights()
    copied = copy.deepcopy(target)
    assert len(io_bytes(target)) < before + 1_000_000  # and not chunks of packed weights
    got, _ = passes(copied, fused=True)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def io_bytes(target: Target) -> bytes:
    buffer = io.BytesIO()
    torch.save(target, buffer)
    return buffer.getvalue()


def test_gradients_rings_and_consumers_go_the_long_way(tiny_target: Callable[..., Target], calls: list[int]) -> None:
    target = tiny_target(torch.float32, "MistralForCausalLM", sliding_window=5)
    ids = tokens(3, 1)
    at = torch.arange(3)
    target.forward(ids, at, at, torch.zeros(3, dtype=torch.int64), at + 1, poisoned(target, 8))  # gradients recorded
    target.forward_sequences([ids])
    assert calls == []
    assert Target(read_config({**SIZES, "architectures": ["LlamaForCausalLM"]}), dict(target.tensors()))._stack


def test_rows_outside_the_cache_are_refused_before_anything_is_written(tiny_target: Callable[..., Target]) -> None:
    target = tiny_target(torch.float32)
    cache, at = poisoned(target, 4), torch.arange(2)
    with torch.no_grad(), pytest.raises(DsparkError, match="expected indices inside their tables"):
        target.forward(tokens(2, 1), at, torch.tensor([0, 4]), at * 0, at + 1, cache)
    assert all(t.isnan().all() for t in (*cache.k, *cache.v))


def test_what_does_not_fit_is_refused(tiny_target: Callable[..., Target]) -> None:
    target = tiny_target(torch.float32)
    stack, config = target._stack, target.config
    assert stack is not None
    heads = (config.num_heads, config.num_kv_heads, config.head_dim)
    with pytest.raises(DsparkError, match="layers: expected qkv"):
        layers.Stack(target.layers, stack.following, (heads[0] + 1, *heads[1:]))
    with pytest.raises(DsparkError, match="layers: expected next_norm"):
        layers.Stack(target.layers, [norm[:-1] for norm in stack.following], heads)
    cache, x, index = poisoned(target, 4), torch.zeros(2, 32), torch.tensor([0, 1])
    angles = (torch.zeros(2, 4), torch.zeros(2, 4))
    good: list[Any] = [x, x, cache.pairs, angles, index, [index] * 3, index + 1, 1e-6]
    stack.run(*good)
    wrong = {
        0: x.bfloat16(),
        1: x[:1],
        2: cache.pairs[:2],
        3: (angles[0].double(),) * 2,
        4: index.int(),
        5: [index],
        6: index[:1],
    }
    for place, value in wrong.items():
        with pytest.raises(DsparkError, match="layers: expected"):
            stack.run(*good[:place], value, *good[place + 1 :])
