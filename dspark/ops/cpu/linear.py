"""Checks and call of cpu/linear.c, and the packed copies of weights it works on.

A weight is packed on first use; the packed copy is kept beside the tensor *object* (not in its ``__dict__``, which
would travel into checkpoints) and made anew when the tensor changed: when its version counter or address moved, when
any torch optimizer stepped on it (fused ones write without counting), or when one of 16 sampled elements did
(``weight.data`` and numpy write without counting). An edit behind torch's back that misses the samples goes unseen:
call ``forget(weight)`` after one. Keep the same tensor object between calls; a fresh view packs again.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from dspark.ops.cpu.native import DTYPE_CODE, STALE, check, dtype_code, lib, raise_status, refuse, threads


@dataclass(slots=True, weakref_slot=True, eq=False)
class Packed:
    owner: weakref.ref[Tensor]
    version: int
    pointer: int
    data: Tensor  # uint8, owns the memory
    address: int


_packed: dict[int, Packed] = {}
_packing = threading.Lock()


_CHUNK = 32 << 20
_free = torch.empty(0, dtype=torch.uint8)  # the rest of the newest chunk


def _room(size: int) -> Tensor:
    """[size] uint8 at a multiple of 64, uninitialised. Small weights share chunks of memory on huge pages (a chunk
    lives as long as one of them): a step reads every weight once, and with 4 KiB pages that read waits for the TLB."""
    global _free  # noqa: PLW0603  # one allocator a process, like malloc's
    size = (size + 63) // 64 * 64
    if _free.numel() < size:
        chunk = torch.empty(max(size, _CHUNK) + 64, dtype=torch.uint8)
        lib().dspark_huge_pages(chunk.data_ptr(), chunk.numel())
        _free = chunk[-chunk.data_ptr() % 64 :]
    taken, _free = _free[:size], _free[size:]
    return taken


def _version(weight: Tensor) -> int:
    return -1 if weight.is_inference() else weight._version


@functools.cache
def _watch_optimizers() -> None:
    """From the first trainable weight on, a step of a torch optimizer drops the packed copies of what it stepped on."""

    def stepped(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        for group in optimizer.param_groups:
            for weight in group["params"]:
                forget(weight)

    register_optimizer_step_post_hook(stepped)


def _pack(weight: Tensor) -> Packed:
    code = dtype_code("linear", weight)
    if weight.requires_grad:
        _watch_optimizers()
    check("linear", weight.detach())
    if weight.dim() != 2:
        refuse("linear", "a weight [O, I]", tuple(weight.shape))
    o, i = weight.shape
    data = _room(lib().dspark_packed_bytes(o, i, code))
    address = data.data_ptr()
    lib().dspark_pack_weight(address, weight.data_ptr(), o, i, code, threads())
    key = id(weight)
    owner = weakref.ref(weight, lambda _: _packed.pop(key, None))
    entry = Packed(owner, _version(weight), weight.data_ptr(), data, address)
    _packed[key] = entry
    return entry


def packed(weight: Tensor) -> Packed:
    """The weight's packed copy, made when needed. Hold on to it while its address is in use: another thread may drop
    it from the table."""
    entry = _packed.get(id(weight))
    if entry is None or entry.owner() is not weight or not _unchanged(weight, entry):
        with _packing:
            entry = _pack(weight)
    return entry


def _unchanged(weight: Tensor, entry: Packed) -> bool:
    return entry.pointer == weight.data_ptr() and entry.version == _version(weight)


def current(weights: Sequence[Tensor], entries: Sequence[Packed | None]) -> bool:
    """Whether `packed` would give the same entries again, of weights that somebody holds."""
    pairs = zip(weights, entries, strict=True)
    return all(
        entry is not None and _packed.get(id(weight)) is entry and _unchanged(weight, entry) for weight, entry in pairs
    )


def forget(weight: Tensor) -> None:
    """Drops the packed copy of this weight, if any."""
    _packed.pop(id(weight), None)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    code = dtype_code("linear", x)
    if out_dtype not in (None, *DTYPE_CODE):
        refuse("linear", "an out_dtype of float32 or bfloat16", out_dtype, "Convert the result instead.")
    if x.dim() != 2 or weight.dim() != 2 or weight.shape[1] != x.shape[1] or weight.dtype != x.dtype:
        expected = f"x [N, I] and a weight [O, I] of {x.dtype}"
        refuse("linear", expected, f"{tuple(x.shape)} and {tuple(weight.shape)} of {weight.dtype}")
    if bias is None:
        check("linear", x, weight)
    else:
        check("linear", x, weight, bias)
        if bias.shape != weight.shape[:1] or bias.dtype != x.dtype:
            refuse("linear", f"a bias [{weight.shape[0]}] of {x.dtype}", f"{tuple(bias.shape)} of {bias.dtype}")
    n, i = x.shape
    o = weight.shape[0]
    out = torch.empty((n, o), dtype=out_dtype or x.dtype)
    bias_address = None if bias is None else bias.data_ptr()
    for _ in range(2):
        entry = packed(weight)
        status = lib().dspark_linear(
            out.data_ptr(), x.data_ptr(), weight.data_ptr(), entry.address, bias_address, n, i, o, code,
            DTYPE_CODE[out.dtype], threads(),
        )  # fmt: skip
        if status != STALE:
            break
        forget(weight)
    if status:
        raise_status("linear", status)
    return out
