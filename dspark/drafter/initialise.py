"""Good starts for a draft model: from its target's own weights, and from bigrams of the training text.

A default start costs tens of nats, because the target's LM head meets hidden states it was never made for. Every part
here can be had alone, and changes nothing but the parameters it names:
    layers       draft layer j becomes a copy of a target layer (its convolutions stay as they are, and so do norms of
                 queries and keys that the target has not: their weights are 1); the context norm
                 takes their mean input-norm weight, a layer's own context norm that layer's, so a context feature
                 enters their key and value maps as the target's own hidden states do
    fuse         fc (every layer's, with layer_fusion) passes the last tapped layer through and starts from zero on the
                 others
    final_norm   the target's final norm times a factor: 1 keeps its logits' scale (a bad start), 0.03 to 0.1 near flat
    residual     out-projections (attention, MLP) times a factor: 0 makes each layer the identity
    bigrams      the Markov head as a smoothed bigram model of the given text, truncated to its rank
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from dspark.contracts import DsparkError
from dspark.drafter.bigram import Bigrams, factorise
from dspark.drafter.model import Drafter
from dspark.drafter.sequential import set_markov_weights

_OWN = (".taps.", ".q_norm.", ".k_norm.")  # parts of a draft layer that a target layer may lack


@torch.no_grad()
def initialise_from_target(
    drafter: Drafter,
    target: Any,
    *,
    layers: Sequence[int] | None = None,
    fuse: bool = True,
    final_norm: float | None = 0.1,
    residual_scale: float | None = None,
    bigrams: tuple[Tensor, Tensor] | None = None,
    seed: int = 0,
) -> None:
    """Changes `drafter` in place. target: a dspark.target Target.

    layers: target layer ids to copy, one per draft layer (None = the last ones, () = copy none). bigrams: see
    `bigram_counts`; needs a Markov head. Raises DsparkError when shapes, norms or biases do not fit the target's.
    """
    config = drafter.config
    ids = range(target.num_layers - config.num_layers, target.num_layers) if layers is None else layers
    if len(ids):
        _copy_layers(drafter, target, list(ids))
    if fuse:
        _fuse_last(drafter)
    if final_norm is not None:
        drafter.norm.weight.copy_(target.final_norm.to(drafter.dtype) * final_norm)
    if residual_scale is not None:
        for layer in drafter.draft_layers:
            layer.self_attn.o_proj.weight.mul_(residual_scale)
            layer.mlp.down_proj.weight.mul_(residual_scale)
    if bigrams is not None:
        initialise_markov(drafter, *bigrams, seed=seed)


def bigram_counts(sequences: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """Token sequences [S] -> (pairs [M,2] int64 (previous, next) ascending, counts [M] int64)."""
    pairs = [torch.stack([s[:-1], s[1:]], dim=1) for s in sequences]
    stacked = torch.cat(pairs) if pairs else torch.empty(0, 2, dtype=torch.int64)
    if not len(stacked):
        return stacked, torch.empty(0, dtype=torch.int64)
    width = int(stacked.max()) + 1
    keys, counts = torch.unique(stacked[:, 0] * width + stacked[:, 1], return_counts=True)
    return torch.stack([keys // width, keys % width], dim=1), counts


@torch.no_grad()
def initialise_markov(drafter: Drafter, pairs: Tensor, counts: Tensor, smoothing: float = 8.0, seed: int = 0) -> None:
    """Sets the Markov head so that its bias is a smoothed bigram model of (pairs [M,2], counts [M]) at its rank: the
    first dimension holds the next token's log frequency, the others a truncated factorisation of log ratios.

    Raises DsparkError without a Markov head or without a usable pair.
    """
    head = drafter.markov_head
    if head is None:
        raise DsparkError("initialise: expected a Markov head for bigrams, but got markov_rank 0. Drop the bigrams.")
    columns = drafter.to_columns(pairs[:, 1])
    known = columns >= 0
    if not bool(known.any()):
        raise DsparkError("initialise: expected bigrams whose next token is in the draft vocabulary, but got none.")
    config = drafter.config
    table = Bigrams(pairs[known, 0], columns[known], counts[known], config.vocab_size, config.num_columns)
    w1, w2 = factorise(table, head.rank, smoothing, seed)
    set_markov_weights(head, w1, w2)


def _copy_layers(drafter: Drafter, target: Any, ids: list[int]) -> None:
    config = drafter.config
    _check_fit(drafter, target, ids)
    for layer, index in zip(drafter.draft_layers, ids, strict=True):
        own = {name: tensor for name, tensor in layer.state_dict().items() if any(part in name for part in _OWN)}
        layer.load_state_dict(own | _layer_state(target, index), strict=True)
    norms = torch.stack([layer.input_layernorm.weight for layer in drafter.draft_layers]).float()
    weights = norms if config.layer_fusion else norms.mean(dim=0, keepdim=True)
    for (_, norm), weight in zip(drafter.feature_maps, weights, strict=True):
        norm.weight.copy_(weight)


def _check_fit(drafter: Drafter, target: Any, ids: list[int]) -> None:
    ours, theirs = drafter.config, target.config
    if len(ids) != ours.num_layers or not all(0 <= i < target.num_layers for i in ids):
        raise DsparkError(
            f"initialise: expected {ours.num_layers} target layer ids from 0 to {target.num_layers - 1} to copy, but "
            f"got {ids}."
        )
    pairs = {name: name for name in ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim")}
    pairs |= {"mlp_bias": "mlp_bias", "attention_bias": "qkv_bias", "attention_out_bias": "output_bias"}
    pairs |= {"qk_norm": "qk_norm"} if theirs.qk_norm else {}  # norms that the target lacks can be added
    for mine, other in pairs.items():
        if getattr(ours, mine) != getattr(theirs, other):
            raise DsparkError(
                f"initialise: expected {mine} {getattr(theirs, other)!r} as in the target to copy its layers, but got "
                f"{getattr(ours, mine)!r}. Change the draft config, or copy no layers."
            )


def _layer_state(target: Any, index: int) -> dict[str, Tensor]:
    """One target layer's fused weights under the draft layer's names."""
    layer, shape = target.layers[index], target.config
    cuts = [shape.num_heads * shape.head_dim, *[shape.num_kv_heads * shape.head_dim] * 2]
    state = {
        "input_layernorm.weight": layer.input_norm,
        "post_attention_layernorm.weight": layer.post_norm,
        "self_attn.o_proj.weight": layer.output,
        "self_attn.o_proj.bias": layer.output_bias,
        "self_attn.q_norm.weight": layer.q_norm,
        "self_attn.k_norm.weight": layer.k_norm,
        "mlp.down_proj.weight": layer.down,
        "mlp.down_proj.bias": layer.down_bias,
    }
    attention, mlp = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")
    for kind, qkv, gate_up in (("weight", layer.qkv, layer.gate_up), ("bias", layer.qkv_bias, layer.gate_up_bias)):
        if qkv is not None:
            state |= {f"{n}.{kind}": t for n, t in zip(attention, qkv.split(cuts), strict=True)}
        if gate_up is not None:
            state |= {f"{n}.{kind}": t for n, t in zip(mlp, gate_up.chunk(2), strict=True)}
    return {name: tensor for name, tensor in state.items() if tensor is not None}


def _fuse_last(drafter: Drafter) -> None:
    hidden = drafter.config.hidden_size
    for fc, _ in drafter.feature_maps:
        fc.weight.zero_()
        fc.weight[:, -hidden:] = torch.eye(hidden)
