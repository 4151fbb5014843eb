"""What a draft model is, as plain fields: all that is saved beside its weights.

The shapes are the draft model's own and allow-listed. A target's config carries fields (partial rotary, sliding
windows) that the draft layers do not follow, so a copy of it would describe another model than the trained one.
Fields that silently break acceptance when guessed (block_size, mask_token_id, target_layer_ids, sample_from_anchor)
have no default.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any

from dspark.contracts import DsparkError
from dspark.drafter.rope import check_rope, rope_parameters_of
from dspark.rotary import is_number

MARKOV_HEADS = ("vanilla", "gated", "rnn", "pair")
CHANNEL_GROUP = 16  # channels that share the taps of a convolution
ARCHITECTURES = ("dspark", "mtp")
# Far above any model, and small enough that no product of two is too large for a tensor's size, no loop for a second.
_MOST = {
    **dict.fromkeys(
        ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "markov_rank"), 2**20
    ),
    **dict.fromkeys(("block_size", "num_layers", "num_target_layers"), 1024),
    **dict.fromkeys(("vocab_size", "sliding_window"), 2**31 - 1),
}


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """One draft model. Raises DsparkError on a value out of range or a combination that means nothing.

    block_size: slots K fed at once: the anchor, then K-1 mask tokens.
    sample_from_anchor: True (DSpark): slot k stands at position anchor+k and predicts the token *after* itself, so the
        anchor's slot predicts too and a block proposes K tokens. False (DFlash's own): slot k predicts the token *at*
        its own position; slot 0 would repeat the anchor and is dropped, so a block proposes K-1 tokens.
        In both, prediction j (0-based) is the token at anchor+j+1. See ``num_predictions``.
    target_layer_ids: layer i = output of the target's decoder layer i before the final norm, -1 = embedding output;
        strictly increasing.
    architecture: "dspark", all slots of a block at once; "mtp", one draft layer per predicted token, in sequence
        (mtp.py): num_layers = block_size, sample_from_anchor true, neither input_fusion
        nor convolution (its slots are different layers); mask_token_id is not read.
    markov_rank 0 switches the sequential head off. confidence_with_markov gives the confidence head the previous
        token's Markov embedding beside the hidden state; stop_gradient detaches both. confidence_with_law gives it the
        log-odds of the draft's own law; a head that reads them is trained on rounds, apart from the draft layers.
    sliding_window: how many context tokens before the anchor a block sees (0 = all).
    input_fusion: block inputs are projections of the last context feature and the anchor's embedding (fusion.py), not
        the anchor's and the mask token's embeddings.
    layer_fusion: each of at least two draft layers mixes the tapped target layers with a map and a norm of its own
        (features.py).
    convolution: two-tap convolutions along the block around each sublayer (convolution.py).
    candidates: when drafting, a slot's law lives on this many tokens of the largest base logits (candidates.py; 0 =
        all). No part of the weights: training is the same with every value, its confidence label that of the whole law
        (recipes/confidence.yaml trains the head on what a verifier really did).
    draft_vocab_size: columns of the draft logits (0 = the whole vocabulary). qk_norm: per-head norm of queries and
        keys as in Qwen3; off for draft layers copied from a target without it.
    target_fingerprint: of the target it was trained for ("" = unknown).
    """

    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    sample_from_anchor: bool
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_target_layers: int
    architecture: str = "dspark"
    rms_norm_eps: float = 1e-6
    rope_parameters: dict[str, Any] = field(
        default_factory=lambda: {"rope_theta": 10000.0, "rope_type": "default"}, hash=False
    )
    qk_norm: bool = True
    attention_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    markov_head: str = "vanilla"
    markov_rank: int = 0
    confidence_head: bool = False
    confidence_with_markov: bool = False
    confidence_with_law: bool = False
    stop_gradient: bool = False
    sliding_window: int = 0
    input_fusion: bool = False
    layer_fusion: bool = False
    convolution: bool = False
    candidates: int = 0
    draft_vocab_size: int = 0
    target_fingerprint: str = ""

    def __post_init__(self) -> None:
        _refuse(_wrong_types(self))  # before anything compares or multiplies them
        object.__setattr__(self, "target_layer_ids", tuple(self.target_layer_ids))
        _refuse(_wrong_shapes(self))
        _refuse(_wrong_sizes(self))
        _refuse(_wrong_combinations(self))  # all of them in one message
        check_rope(self.rope_parameters)

    @property
    def num_predictions(self) -> int:
        """Tokens one block proposes: the largest gamma."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @property
    def num_columns(self) -> int:
        """Width of the draft logits."""
        return self.draft_vocab_size or self.vocab_size

    @property
    def reads_features(self) -> bool:
        """Whether a block starts from the last context feature itself, beside the keys and values made of it."""
        return self.input_fusion or self.architecture == "mtp"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; ``from_dict`` gives the same config back."""
        return {**asdict(self), "target_layer_ids": list(self.target_layer_ids)}

    def identity(self) -> dict[str, Any]:
        """The fields that are not at their default: what a hash is taken over, so that a field added later, with a
        default that keeps the old behaviour, changes no earlier model's hash."""
        made = {f.name: f.default_factory() for f in fields(self) if f.default_factory is not MISSING}
        defaults = {f.name: f.default for f in fields(self) if f.default is not MISSING} | made
        return {k: v for k, v in self.to_dict().items() if k not in defaults or v != defaults[k]}

    @classmethod
    def from_dict(cls, values: dict[str, Any], where: str = "drafter config") -> DrafterConfig:
        """Raises DsparkError, opening with `where`, on an unknown or a missing key and what the class refuses."""
        if not isinstance(values, dict):
            raise DsparkError(f"{where}: expected a mapping of fields, but got {type(values).__name__}.")
        known = {f.name: f for f in fields(cls)}
        unknown = sorted(map(str, values.keys() - known.keys()))
        if unknown:
            raise DsparkError(
                f"{where}: expected only known fields, but got {', '.join(unknown)}. Known are: {', '.join(known)}."
            )
        required = [n for n, f in known.items() if f.default is MISSING and f.default_factory is MISSING]
        missing = [name for name in required if name not in values]
        if missing:
            raise DsparkError(f"{where}: expected the required fields {', '.join(missing)}, but they are absent.")
        try:
            return cls(**values)
        except DsparkError as error:
            raise DsparkError(f"{where}: {str(error).removeprefix('drafter config: ')}") from error

    @classmethod
    def for_target(cls, target: Any, **choices: Any) -> DrafterConfig:
        """A config whose shapes follow a target (dspark.target.decoder.Target), field by field; ``choices`` are the
        fields that only the user can decide (block_size, num_layers, heads, ...) and win over the target's."""
        shape = target.config
        taken = {
            "vocab_size": target.vocab_size,
            "hidden_size": target.hidden_size,
            "num_target_layers": target.num_layers,
            "target_fingerprint": target.fingerprint,
            "intermediate_size": shape.intermediate_size,
            "num_heads": shape.num_heads,
            "num_kv_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            "rms_norm_eps": shape.rms_norm_eps,
            "rope_parameters": rope_parameters_of(shape.rope),
        }
        return cls.from_dict({**taken, **choices}, "drafter config for this target")


def _wrong_types(config: DrafterConfig) -> list[str]:
    """Types are the annotations' own words."""
    checks = [
        (entry.name, holds(getattr(config, entry.name)), wanted)
        for entry in fields(config)
        for holds, wanted in [_TYPES.get(str(entry.type), (lambda _: True, ""))]
    ]
    ids = config.target_layer_ids
    whole = isinstance(ids, list | tuple) and all(_is_int(i, -1) for i in ids)
    return _wrong(config, [*checks, ("target_layer_ids", whole, "a list of layer ids, whole numbers from -1 on")])


def _wrong_shapes(config: DrafterConfig) -> list[str]:
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "num_target_layers")
    least = [(name, getattr(config, name) >= 1, "a positive integer") for name in names]
    most = [(name, getattr(config, name) <= limit, f"at most {limit}") for name, limit in _MOST.items()]
    return _wrong(config, [*least, *most])


def _wrong_sizes(config: DrafterConfig) -> list[str]:
    least = 1 if config.sample_from_anchor else 2
    checks = (
        ("block_size", config.block_size >= least, f"an integer >= {least} (with this sample_from_anchor)"),
        ("num_layers", config.num_layers >= 1, "a positive integer"),
        ("head_dim", config.head_dim >= 2 and config.head_dim % 2 == 0, "a positive even integer"),
        ("num_heads", config.num_heads % config.num_kv_heads == 0, f"a multiple of num_kv_heads {config.num_kv_heads}"),
        ("mask_token_id", 0 <= config.mask_token_id < config.vocab_size,
         f"a row of the embedding, 0 <= id < vocab_size {config.vocab_size}"),
        ("rms_norm_eps", 1e-30 <= config.rms_norm_eps <= 1, "a number from 1e-30 to 1"),
        ("sliding_window", config.sliding_window >= 0, "an integer >= 0 (0 = off)"),
        ("draft_vocab_size", 0 <= config.draft_vocab_size < config.vocab_size,
         f"0 (the whole vocabulary) or below vocab_size {config.vocab_size}"),
        ("candidates", config.candidates >= 0, "an integer >= 0 (0 = all tokens)"),
        ("markov_head", config.markov_head in MARKOV_HEADS, f"one of {', '.join(MARKOV_HEADS)}"),
        ("markov_rank", config.markov_rank >= 0, "an integer >= 0 (0 = no Markov head)"),
        ("architecture", config.architecture in ARCHITECTURES, f"one of {', '.join(ARCHITECTURES)}"),
    )  # fmt: skip
    return _wrong(config, checks)


def _wrong_combinations(config: DrafterConfig) -> list[str]:
    checks = (
        ("num_layers", not config.layer_fusion or config.num_layers > 1, "at least 2 with layer_fusion: true"),
        ("candidates", config.candidates <= config.num_columns,
         f"0 (all tokens) or an integer up to the {config.num_columns} columns of the draft logits"),
        ("hidden_size", not config.convolution or config.hidden_size % CHANNEL_GROUP == 0,
         f"a multiple of {CHANNEL_GROUP} with convolution: true (taps are shared by {CHANNEL_GROUP} channels)"),
    )  # fmt: skip
    return [*_wrong(config, checks), *_wrong_layer_ids(config), *_wrong_heads(config), *_wrong_for_mtp(config)]


def _wrong_layer_ids(config: DrafterConfig) -> list[str]:
    ids, count = config.target_layer_ids, config.num_target_layers
    increasing = all(a < b for a, b in itertools.pairwise(ids))
    in_range = bool(ids) and ids[0] >= -1 and ids[-1] < count
    wanted = f"strictly increasing layer ids from -1 (embedding output) to {count - 1}, at least one"
    return _wrong(config, [("target_layer_ids", increasing and in_range, wanted)])


def _wrong_heads(config: DrafterConfig) -> list[str]:
    markov, law = (bool(value) for value in (config.confidence_with_markov, config.confidence_with_law))
    names = " and ".join(n for n, on in (("confidence_with_markov", markov), ("confidence_with_law", law)) if on)
    checks = (
        ("confidence_head", not names or bool(config.confidence_head), f"true with {names}: true, or {names} false"),
        ("markov_rank", not markov or config.markov_rank > 0, ">= 1 with confidence_with_markov: true, or "
         "confidence_with_markov false: without a Markov head it has no embedding to read"),
        ("candidates", not law or config.candidates != 1, "0 or at least 2 with confidence_with_law: true, or "
         "confidence_with_law false: a law on one token has no odds"),
    )  # fmt: skip
    return _wrong(config, checks)


def _wrong_for_mtp(config: DrafterConfig) -> list[str]:
    if config.architecture != "mtp":
        return []
    slots, wanted = config.num_predictions, "with architecture mtp"
    checks = (
        ("sample_from_anchor", config.sample_from_anchor, f"true {wanted}"),
        ("input_fusion", not config.input_fusion, f"false {wanted}, which has a fusion per slot"),
        ("convolution", not config.convolution, f"false {wanted}"),
        ("num_layers", config.num_layers == slots, f"block_size {slots} {wanted} (one layer per predicted token)"),
    )
    return _wrong(config, checks)


def _is_int(value: Any, least: float) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _wrong(config: DrafterConfig, checks: Iterable[tuple[str, bool, str]]) -> list[str]:
    """checks: (field, whether it holds, what it should be) -> a phrase for each that does not hold."""
    return [
        f"{name} to be {wanted}, but got {_plain(getattr(config, name))!r}" for name, ok, wanted in checks if not ok
    ]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _refuse(wrong: list[str]) -> None:
    if wrong:
        raise DsparkError(f"drafter config: expected {'; '.join(wrong)}.")


_TYPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "int": (lambda value: _is_int(value, -math.inf), "a whole number"),
    "bool": (lambda value: isinstance(value, bool), "true or false"),
    "str": (lambda value: isinstance(value, str), "a text"),
    "float": (is_number, "a finite number"),
}
