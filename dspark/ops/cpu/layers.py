"""Call of cpu/layers.c: all layers of a pass over a slotted cache at once, with the bits of the operations one by one.

What is constant is checked when a Stack is made. Every pass looks whether a weight has changed or moved: those in
training do.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dspark.ops.cpu.linear import Packed, current, forget, packed
from dspark.ops.cpu.native import STALE, check, dtype_code, lib, raise_status, refuse, threads

Pair = tuple[Tensor, Tensor]


class Stack:
    """Decoder layers one after the other: attention over a cache and a gated feed-forward, each behind a norm.

    layers: each with qkv, output, gate_up, down ([out, in]) and post_norm, and with their biases, q_norm and k_norm,
    None where the family has none. following[i]: weight of the norm behind layer i. heads: query heads, key heads,
    their size. Raises DsparkError for weights whose shapes do not fit.
    """

    def __init__(self, layers: Sequence[Any], following: Sequence[Tensor], heads: tuple[int, int, int]):
        hq, hkv, d = self.heads = heads
        h, inner = layers[0].down.shape
        self.layers, self.following, self.h, self.inner = list(layers), list(following), h, inner
        shapes = {"qkv": ((hq + 2 * hkv) * d, h), "output": (h, hq * d), "gate_up": (2 * inner, h), "down": (h, inner),
                  "post_norm": (h,), "q_norm": (d,), "k_norm": (d,), "qkv_bias": ((hq + 2 * hkv) * d,),
                  "output_bias": (h,), "gate_up_bias": (2 * inner,), "down_bias": (h,)}  # fmt: skip
        self.dtype = layers[0].qkv.dtype
        self._matrices = [weight for layer in layers for weight in _matrices(layer)]
        self._others = [t for layer in layers for t in _vectors(layer)] + list(following)
        self._kept: tuple[list[int], Tensor, list[weakref.ref[Packed]]] | None = None  # an optimizer step frees them
        self.shapes = shapes
        self._check_weights()

    def __getstate__(self) -> dict[str, Any]:
        """A copy has weights of its own, and packs them itself."""
        return {**self.__dict__, "_kept": None}

    def _check_weights(self) -> None:
        for layer, norm in zip(self.layers, self.following, strict=True):
            self._check("next_norm", norm, (self.h,))
            for name, shape in self.shapes.items():
                self._check(name, getattr(layer, name), shape)

    def _check(self, name: str, tensor: Tensor | None, shape: tuple[int, ...]) -> None:
        fits = tensor is None or (tensor.is_cpu and tensor.is_contiguous())
        if tensor is not None and not (fits and tensor.shape == shape and tensor.dtype == self.dtype):
            refuse("layers", f"{name} {shape} of {self.dtype}", f"{tuple(tensor.shape)} of {tensor.dtype}")

    def run(
        self, normed: Tensor, residual: Tensor, cache: Sequence[Pair], angles: Pair, rows: Tensor,
        begins: Sequence[Tensor], end: Tensor, eps: float, taps: Sequence[int] = (),
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        """(normed, residual, both [N, H], what was tapped [N, len(taps) * H] or None): the residual behind those layers
        side by side, that of -1 is the one given. cache: keys and values [T, Hkv, D] of each
        layer. angles: cos and sin [N, D / 2]; rows, end [N] int64: the cache row of each one's key and value, and one
        past the last it sees; begins: for each layer the first it sees."""
        hq, hkv, d = self.heads
        n, capacity, code = len(normed), len(cache[0][0]), dtype_code("layers", normed)
        check("layers", normed, residual, *angles, rows, end, *begins, *(t for pair in cache for t in pair))
        self._check_pass(normed, residual, cache, angles, (rows, end, *begins))
        tapped = torch.empty((n, len(taps) * self.h), dtype=normed.dtype)
        sizes = torch.tensor([n, self.h, hq, hkv, d, self.inner, capacity, tapped.shape[1]])
        places = dict(zip(taps, tapped.split(self.h, dim=1), strict=True)) if taps else {}
        scratch = torch.empty(lib().dspark_layers_scratch(sizes.data_ptr()), dtype=normed.dtype)
        for _ in range(2):
            out, total = normed.clone(), residual.clone()
            table, held = self._table(cache, begins, places)
            status = lib().dspark_layers(
                table.data_ptr(), len(self.layers), sizes.data_ptr(), out.data_ptr(), total.data_ptr(),
                angles[0].data_ptr(), angles[1].data_ptr(), rows.data_ptr(), end.data_ptr(), scratch.data_ptr(), eps,
                d**-0.5, code, threads(),
            )  # fmt: skip
            del held  # the packed weights had to live until here
            if status != STALE:
                break
            self._forget()
        if status:
            raise_status("layers", status)
        if -1 in places:
            places[-1].copy_(residual)
        return out, total, tapped if taps else None

    def _check_pass(
        self, normed: Tensor, residual: Tensor, cache: Sequence[Pair], angles: Pair, indices: Sequence[Tensor]
    ) -> None:
        (n, h), (_, hkv, d) = normed.shape, self.heads
        whole = (len(cache[0][0]), hkv, d)
        if h != self.h or residual.shape != normed.shape or not normed.dtype == residual.dtype == self.dtype:
            refuse("layers", f"[N, {self.h}] of {self.dtype}", f"{tuple(normed.shape)} of {normed.dtype}")
        if len(cache) != len(self.layers) or any(t.shape != whole or t.dtype != self.dtype for p in cache for t in p):
            refuse("layers", f"{len(self.layers)} pairs of keys and values {whole} of {self.dtype}", "others")
        if any(t.shape != (n, d // 2) or t.dtype != torch.float32 for t in angles):
            refuse("layers", f"cos and sin [{n}, {d // 2}] of float32", f"{tuple(angles[0].shape)}")
        if len(indices) != len(cache) + 2 or any(t.shape != (n,) or t.dtype != torch.int64 for t in indices):
            refuse("layers", f"rows, end and begins [{n}] of int64", "others")

    def _table(
        self, cache: Sequence[Pair], begins: Sequence[Tensor], places: dict[int, Tensor]
    ) -> tuple[Tensor, Sequence[object]]:
        """[L, words] int64 as layers.c reads it, and what must outlive the call."""
        table, entries = self._weights()
        moving = [
            (keys.data_ptr(), values.data_ptr(), begin.data_ptr(), _at(places.get(i)))
            for i, ((keys, values), begin) in enumerate(zip(cache, begins, strict=True))
        ]
        table = torch.cat([table, torch.tensor(moving)], dim=1)
        assert table.shape[1] == _words_in_c(), "layers.c and layers.py lay a layer out alike"
        return table, entries

    def _weights(self) -> tuple[Tensor, Sequence[Packed | None]]:
        """The words of what a layer is made of, and the packed weights among it. To look through all of them afresh
        takes a twentieth of a pass with one row, so they are kept until one is packed anew, or moves."""
        addresses = [t.data_ptr() for t in self._others]
        if self._kept is not None and self._kept[0] == addresses:
            held = [reference() for reference in self._kept[2]]
            if current(self._matrices, held):
                return self._kept[1], held
        self._check_weights()
        entries = [packed(weight) for weight in self._matrices]
        each = enumerate(zip(self.layers, self.following, strict=True))
        words = [self._words(layer, norm, entries[4 * i : 4 * i + 4]) for i, (layer, norm) in each]
        self._kept = addresses, torch.tensor(words), [weakref.ref(entry) for entry in entries]
        return self._kept[1], entries

    @staticmethod
    def _words(layer: Any, norm: Tensor, entries: Sequence[Packed]) -> list[int]:
        words: list[int] = []
        biases = (layer.qkv_bias, layer.output_bias, layer.gate_up_bias, layer.down_bias)
        for weight, entry, bias in zip(_matrices(layer), entries, biases, strict=True):
            words += (weight.data_ptr(), entry.address, _at(bias))
        return [*words, _at(layer.q_norm), _at(layer.k_norm), layer.post_norm.data_ptr(), norm.data_ptr()]

    def _forget(self) -> None:
        for weight in self._matrices:
            forget(weight)


def _matrices(layer: Any) -> tuple[Tensor, ...]:
    return layer.qkv, layer.output, layer.gate_up, layer.down


def _vectors(layer: Any) -> list[Tensor]:
    found = (layer.post_norm, layer.q_norm, layer.k_norm, layer.qkv_bias, layer.output_bias, layer.gate_up_bias,
             layer.down_bias)  # fmt: skip
    return [t for t in found if t is not None]


@functools.cache
def _words_in_c() -> int:
    return int(lib().dspark_layers_words())


def _at(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
