"""The target's forward pass: one body for prefill, decode and verify.

A call takes N tokens in a flat batch, of any number of sequences. Each token writes its key and value to its arena row
and attends its sequence's rows up to itself; a prompt chunk, a decoded token and a block under verification are the
same thing here. Every operation comes from dspark.ops and gives a row the same bits whatever the other rows are, so a
token's hidden state is a function of its sequence alone: the reproducibility contract rests on that.

The same body is the trainer's forward: without a cache the keys and values of the call itself are attended, and where
the weights want gradients, gradients are recorded.

Left out on purpose: padding, attention masks, per-request work inside the layer loop.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from types import ModuleType

import torch
from torch import Tensor

from dspark import ops
from dspark.contracts import DsparkError
from dspark.ops import Stack
from dspark.target.branching import branching
from dspark.target.cache import KVCache
from dspark.target.families import DecoderConfig
from dspark.target.place import Place, Ranges
from dspark.target.replay import Replay
from dspark.target.rings import RingPass, Span
from dspark.target.rope import RopeTable
from dspark.target.weights import Layer, fingerprint, layer_of

Keys = tuple[Tensor, Tensor]


class Target:
    """A frozen causal decoder. A plain object, not a module: it must never end up in somebody's checkpoint.

    tensors: fused weights by name (weights.plan), all of one dtype, which is the dtype of the hidden states and of the
    cache. name: what to call it in manifests. eos_ids: tokens that end a sequence, as its files say. operations: where
    linear, attention and the rest come from; only a bench that measures what invariance costs gives another module.
    """

    def __init__(
        self,
        config: DecoderConfig,
        tensors: Mapping[str, Tensor],
        name: str = "target",
        eos_ids: Sequence[int] = (),
        operations: ModuleType = ops,
    ):
        self.config, self.name, self.eos_ids = config, name, tuple(eos_ids)
        self._operations = operations.__name__  # a name, so that a target can be copied
        self._tensors = dict(tensors)
        self.embed_weight = self._tensors["embed"]
        self.head_weight = self._tensors.get("head", self.embed_weight)
        self.layers = [layer_of(self._tensors, i) for i in range(config.num_layers)]
        self.final_norm = self._tensors["norm"]
        self._rope = RopeTable(config.rope, config.head_dim)

    def remade(
        self, change: Callable[[str, Tensor], Tensor] | None = None, operations: ModuleType | None = None
    ) -> Target:
        """This target with every tensor passed through change(name, tensor), or with other operations."""
        tensors = {name: change(name, tensor) if change else tensor for name, tensor in self._tensors.items()}
        return Target(self.config, tensors, self.name, self.eos_ids, operations or self.ops)

    @property
    def ops(self) -> ModuleType:
        return sys.modules[self._operations]

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_weight.dtype

    @property
    def num_layers(self) -> int:
        return self.config.num_layers

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def fingerprint(self) -> str:
        """sha256 hex over config and weights as used: two targets with the same one compute the same bits here. Weights
        that are trained are hashed at every call."""
        if any(isinstance(tensor, torch.nn.Parameter) for tensor in self._tensors.values()):
            return fingerprint(self.config, self._tensors)
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        return fingerprint(self.config, self._tensors)

    def told_apart(self, wanted: str, dtype: str = "") -> str:
        """Why the target of fingerprint `wanted` is another, for an error. dtype: the wanted one's, where it is known.

        The other dtype's fingerprint is that of these weights rounded or widened, so a checkpoint that stores more than
        bfloat16 and was loaded so is recognised by `dtype` alone."""
        mine, other = str(self.dtype).removeprefix("torch."), torch.bfloat16
        other = torch.float32 if self.dtype == other else other
        name = str(other).removeprefix("torch.")
        recast = {key: tensor.to(other) for key, tensor in self._tensors.items()}
        if fingerprint(self.config, recast) == wanted:
            return f"the same target in {name}, not {mine}: give --dtype {name} (in a recipe: dtype or target_dtype)"
        if dtype and dtype != mine:
            return f"one in {dtype}, not {mine}: give --dtype {dtype} (in a recipe: dtype or target_dtype) first"
        return "another one, or these weights from another file: give the one that was named in training"

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every fused weight with its name."""
        return iter(self._tensors.items())

    @cached_property
    def _stack(self) -> Stack | None:
        """All layers in one call, where the CPU's kernels compute and the layers are of one kind."""
        here = self.embed_weight.is_cpu and self.dtype != torch.float64
        if self.ops is not ops or self.config.consumers or not here:
            return None
        following = [*(layer.input_norm for layer in self.layers[1:]), self.final_norm]
        return Stack(self.layers, following, (self.config.num_heads, self.config.num_kv_heads, self.config.head_dim))

    def refresh(self) -> None:
        """Drops the packed copies of trained weights. Called before every generation and every scoring: an optimizer of
        one's own may have written them in a way that nothing else notices (``weight.data``), or their module may have
        been moved to another dtype."""
        trained = [t for t in self._tensors.values() if isinstance(t, torch.nn.Parameter)]
        for tensor in trained:
            ops.forget(tensor)
        if trained:
            self.__dict__.pop("_stack", None)

    @cached_property
    def self_tested(self) -> int:
        """Rows compared in the operations' self-test at this target's own weights, run once. Raises DsparkError when
        they are not invariant here."""
        layer, config = self.layers[0], self.config
        weights = {"qkv": layer.qkv, "output": layer.output, "gate_up": layer.gate_up, "down": layer.down}
        if config.consumers:
            name = f"layers.{self.num_layers - 1}."
            of = {"shared_kv": "shared_kv", "cross_q": name + "cross_q", "cross_output": name + "cross_output"}
            weights |= {short: self._tensors[full] for short, full in of.items()}
        heads = (config.num_heads, config.num_kv_heads, config.head_dim)
        return ops.self_test({**weights, "head": self.head_weight}, heads)

    def embed(self, ids: Tensor) -> Tensor:
        """Embedding rows [N, H] of ids [N] int64."""
        return self.embed_weight.index_select(0, ids)

    def logits(self, hidden: Tensor, head: Tensor | None = None) -> Tensor:
        """[M, V] fp32 from hidden [M, H] after the final norm; a bf16 target's logits are not rounded to bf16. head
        [V', H]: rows of the LM head, for those columns alone, with the same bits."""
        weight = self.head_weight if head is None else head
        return self.ops.linear(hidden, weight, out_dtype=torch.promote_types(self.dtype, torch.float32))

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        rows: Tensor,
        begin: Tensor,
        end: Tensor,
        cache: KVCache | None,
        taps: tuple[int, ...] = (),
        spans: Sequence[Span] = (),
        replay: Replay | None = None,
        stem: Ranges | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Runs N tokens; all index tensors are [N] int64.

        Token n is ids[n] at absolute position positions[n]; its key and value go to arena row rows[n] of every layer,
        and it attends rows begin[n]:end[n] (begin: its sequence's first row, end: its own row + 1; a layer's sliding
        window is applied here). Without a cache the call is the arena: row n is token n, and ``rows`` is not looked at.
        spans: the same tokens sequence by sequence, for a cache in which windowed layers keep rings. replay: which of
        them go through the consumer layers; the others' hidden states are zeros. stem: rows of this call that a token
        attends before begin:end, a beginning that its sequence shares with others (without a cache only).
        Returns the hidden states [N, H] after the final norm, for logits(), and the tapped states
        [N, len(taps) * H] in the order of ``taps`` (None without taps): tap i is the output of decoder layer i before
        the final norm, -1 the embedding. Raises DsparkError for a tap the model does not have.
        """
        self._check_taps(taps)
        config, kept = self.config, {}
        place = Place.of(self._rope.at(positions), rows, begin, end, config.windows, spans, cache, stem)
        residual = kept[-1] = self.embed(ids)
        normed = self.ops.rms_norm(residual, self.layers[0].input_norm, config.rms_norm_eps)
        once = len(set(taps)) == len(taps)
        if once and cache and self._stack and not (cache.entries or replay or torch.is_grad_enabled()):
            normed, _, tapped = self._stack.run(
                normed, residual, cache.pairs, (place.cos, place.sin), rows, [place.begins[w] for w in config.windows],
                end, config.rms_norm_eps, taps,
            )  # fmt: skip
            return normed, tapped
        shared: Keys | None = None
        for i, layer in enumerate(self.layers):
            if i == self.num_layers - config.consumers:
                shared = self._share(residual, place, cache)
                if replay and cache:
                    normed, residual, place = normed[replay.rows], residual[replay.rows], place.cut(replay, cache)
            normed, residual = self._layer(i, layer, normed, residual, place, cache, shared)
            if i in taps:
                kept[i] = residual
        if replay:
            normed = normed.new_zeros(len(ids), normed.shape[1]).index_copy_(0, replay.rows, normed)
        return normed, torch.cat([kept[i] for i in taps], dim=1) if taps else None

    def _layer(
        self, i: int, layer: Layer, normed: Tensor, residual: Tensor, place: Place, cache: KVCache | None,
        shared: Keys | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """(normed for what follows, residual) behind layer i."""
        eps, window = self.config.rms_norm_eps, self.config.windows[i]
        arena = (place.rings.get(window, place.rows), cache.k[i], cache.v[i]) if cache else None
        mixed = self._attend(layer, normed, place, window, arena)
        if shared is not None and layer.cross_norm is not None:
            normed, residual = self.ops.add_rms_norm(mixed, residual, layer.cross_norm, eps)
            mixed = self._attend_shared(layer, normed, place, shared)
        normed, residual = self.ops.add_rms_norm(mixed, residual, layer.post_norm, eps)
        inner = self.ops.silu_mul(self.ops.linear(normed, layer.gate_up, layer.gate_up_bias))
        following = self.final_norm if i + 1 == self.num_layers else self.layers[i + 1].input_norm
        return self.ops.add_rms_norm(self.ops.linear(inner, layer.down, layer.down_bias), residual, following, eps)

    def _share(self, residual: Tensor, place: Place, cache: KVCache | None) -> Keys:
        """The keys and values of all consumer layers, from what the layers before them put out."""
        config = self.config
        normed = self.ops.rms_norm(residual, self._tensors["shared_norm"], config.rms_norm_eps)
        both = self.ops.linear(normed, self._tensors["shared_kv"]).view(len(normed), -1, config.head_dim)
        key, value = both.split(config.num_kv_heads, dim=1)
        key, value = self.ops.rotary(key, place.cos, place.sin), value.contiguous()
        if cache is None:
            return key, value
        return cache.k[-1].index_copy_(0, place.rows, key), cache.v[-1].index_copy_(0, place.rows, value)

    def _attend_shared(self, layer: Layer, normed: Tensor, place: Place, shared: Keys) -> Tensor:
        """A consumer layer's look at all of the past: [N, H] -> [N, H]."""
        config = self.config
        assert layer.cross_q is not None, "a consumer layer has all three"
        assert layer.cross_output is not None, "a consumer layer has all three"
        query = self.ops.linear(normed, layer.cross_q).view(len(normed), config.num_heads, config.head_dim)
        query = self.ops.rotary(query, place.cos, place.sin)
        return self.ops.linear(self._look(query, *shared, place, 0).flatten(1), layer.cross_output)

    def _look(self, query: Tensor, keys: Tensor, values: Tensor, place: Place, window: int) -> Tensor:
        """[N, Hq, D] over each row's past: the shared beginning, then its own rows. Where keys lie changes no bit."""
        own, scale = (place.begins[window], place.end), self.config.head_dim**-0.5
        if not place.stems:
            return self.ops.attention(query, keys, values, *own, scale)
        return self.ops.attention(query, keys, values, *place.stems[window], scale, keys, values, *own)

    def forward_sequences(
        self, sequences: Sequence[Tensor], taps: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Whole sequences (each [S] int64, S >= 1) in one call, packed one after the other.

        Returns (hidden [N, H], features [N, len(taps) * H] or None, offsets [R + 1] int64): sequence r is rows
        offsets[r]:offsets[r + 1]. The same bits as forward() gives token by token.
        """
        lengths = torch.tensor([len(s) for s in sequences])
        assert sum(lengths > 0) == len(sequences) > 0, f"expected sequences of at least one token, got {lengths}"
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        rows = torch.arange(int(offsets[-1]))
        begin = offsets[:-1].repeat_interleave(lengths)
        hidden, features = self.forward(torch.cat(list(sequences)), rows - begin, rows, begin, rows + 1, None, taps)
        return hidden, features, offsets

    def forward_branching(
        self, stems: Sequence[Tensor], branches: Sequence[Sequence[Tensor]]
    ) -> tuple[Tensor, list[list[Tensor]]]:
        """Sequences of which several begin alike, each beginning run once (branching.py). Returns hidden [N, H] and for
        every branch of every stem its rows [1 + S'], the stem's last first: the bits of the whole sequences."""
        laid = branching(stems, branches)
        rows = torch.arange(len(laid.ids))
        hidden, _ = self.forward(laid.ids, laid.positions, rows, laid.begin, rows + 1, None, stem=laid.stem)
        return hidden, laid.ends

    def _attend(
        self,
        layer: Layer,
        normed: Tensor,
        place: Place,
        window: int,
        arena: tuple[Tensor | RingPass, Tensor, Tensor] | None,
    ) -> Tensor:
        """The attention sublayer: [N, H] -> [N, H]. arena: (rows to write, keys, values), written, then read."""
        config = self.config
        heads, kv_heads = config.num_heads, config.num_kv_heads
        qkv = self.ops.linear(normed, layer.qkv, layer.qkv_bias).view(
            len(normed), heads + 2 * kv_heads, config.head_dim
        )
        query, key, value = qkv.split((heads, kv_heads, kv_heads), dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            query = self.ops.rms_norm(query, layer.q_norm, config.rms_norm_eps)
            key = self.ops.rms_norm(key, layer.k_norm, config.rms_norm_eps)
        key = self.ops.rotary(key, place.cos, place.sin)
        query = self.ops.rotary(query, place.cos, place.sin)
        value = value.contiguous()
        where, keys, values = arena or (None, key, value)
        if isinstance(where, RingPass):
            mixed = self._attend_rings(query, key, value, where, keys, values)
        else:
            if where is not None:
                keys.index_copy_(0, where, key)
                values.index_copy_(0, where, value)
            mixed = self._look(query, keys, values, place, window)
        return self.ops.linear(mixed.flatten(1), layer.output, layer.output_bias)

    def _attend_rings(
        self, query: Tensor, key: Tensor, value: Tensor, ring: RingPass, keys: Tensor, values: Tensor
    ) -> Tensor:
        """[N, Hq, D] over rings: prompt chunks read the past before it is overwritten, decoding rows after that."""
        n, scale = ring.decoding, self.config.head_dim**-0.5
        mixed = torch.empty_like(query)
        if n < len(query):
            past, at = (keys[ring.tail], values[ring.tail]), ring.chunk
            mixed[n:] = self.ops.attention(
                query[n:], *past, at.begin, at.end, scale, key[n:], value[n:], at.begin2, at.end2
            )
        keys.index_copy_(0, ring.rows, key[ring.kept])
        values.index_copy_(0, ring.rows, value[ring.kept])
        if n:
            at = ring.ring
            mixed[:n] = self.ops.attention(
                query[:n], keys, values, at.begin, at.end, scale, keys, values, at.begin2, at.end2
            )
        return mixed

    def _check_taps(self, taps: tuple[int, ...]) -> None:
        wrong = [tap for tap in taps if not -1 <= tap < self.num_layers]
        if wrong:
            raise DsparkError(
                f"target: expected target layer ids from -1 (embedding) to {self.num_layers - 1}, but got {wrong}. "
                "The draft model was made for another target, or the ids are wrong."
            )
