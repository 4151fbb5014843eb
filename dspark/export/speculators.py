"""Draft checkpoints in the nested layout of the speculators project, with vLLM 0.32 as the reader aimed at, both ways.

config.json says how to propose and for which target, and carries the draft layers as a Qwen3 config inside it. The
conversions, each undone by the reader:

    aux_hidden_state_layer_ids  our target_layer_ids + 1 (0 = embedding output)
    d2t [Vd] int64              draft id i means target id i + d2t[i]: our draft_ids minus 0..Vd-1
    t2d [V] bool                which target ids the draft vocabulary holds; derived from the draft ids
    lm_head.weight [Vd,H]       the target's LM head at the draft ids, only with a reduced vocabulary: an engine cannot
                                share a head of V columns with a draft of Vd
Otherwise embedding and LM head are left out, to be shared from the target; a file that holds copies is read too.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dspark.contracts import DsparkError
from dspark.drafter.config import DrafterConfig
from dspark.drafter.model import Drafter
from dspark.export.bundle import drafter_hash
from dspark.export.folder import CONFIG, WEIGHTS, dtype_name, read_config, read_weights, write_folder
from dspark.export.qwen3 import layer_keys, only, read_layers, take, unsayable
from dspark.export.tensors import check_depth, check_shapes, expected_shapes, finite_state
from dspark.target.decoder import Target

KIND = "speculators"
ALGORITHM = "dspark"
EMBED, HEAD, OFFSETS, HELD = "embed_tokens.weight", "lm_head.weight", "d2t", "t2d"


def refusals(config: DrafterConfig) -> list[str]:
    """What of this draft model the layout cannot say, or says of another computation."""
    steps = config.markov_rank and config.markov_head == "rnn" and not config.sample_from_anchor
    text = "markov_head rnn with sample_from_anchor false (there its state also steps over the anchor's slot)"
    return [*unsayable(config), *([text] if steps else [])]


def speculators_keys(config: DrafterConfig, dtype: str, target: Mapping[str, Any], verifier: str) -> dict[str, Any]:
    """config.json, every key. dtype: of the tensors. target: the target's own config.json; verifier: its name."""
    return {
        "architectures": ["DSparkDraftModel"],
        "speculators_model_type": ALGORITHM,
        "speculators_config": {
            "algorithm": ALGORITHM,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.num_predictions}],
            "verifier": {"architectures": list(target.get("architectures") or []), "name_or_path": verifier},
        },
        "transformer_layer_config": layer_keys(config, target),
        "aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
        "block_size": config.block_size,
        "confidence_head_with_markov": config.confidence_with_markov,
        "draft_vocab_size": config.num_columns,
        "dtype": dtype,
        "enable_confidence_head": config.confidence_head,
        "markov_head_type": config.markov_head,
        "markov_rank": config.markov_rank,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.sample_from_anchor,
        "target_hidden_size": config.hidden_size,
        "tie_word_embeddings": False,
    }


def write_speculators(
    directory: str | Path, drafter: Drafter, target: Target, raw: Mapping[str, Any], verifier: str
) -> str:
    """Writes `drafter`, which must have no refusals, and returns its hash. raw: the target's own config.json;
    verifier: the name an engine finds the target by."""
    state, identity = finite_state(drafter), drafter_hash(drafter)
    if drafter.draft_ids is not None:
        ids = state.pop("draft_ids")
        state[OFFSETS], state[HELD] = ids - torch.arange(len(ids)), _held(ids, drafter.config.vocab_size)
        state[HEAD] = target.head_weight.detach().cpu()[ids].to(drafter.dtype)
    keys = speculators_keys(drafter.config, dtype_name(drafter), raw, verifier)
    write_folder(Path(directory), KIND, keys, state, identity)
    return identity


def read_speculators(
    directory: str | Path, num_target_layers: int
) -> tuple[DrafterConfig, dict[str, Tensor], dict[str, Tensor]]:
    """Returns (config, the draft model's state dict, the copies of the target's tensors by name, often none).

    num_target_layers: the target's depth, which the layout does not hold. Raises DsparkError when a file or field is
    missing, the checkpoint is of another kind, or a tensor is missing, unexpected or of another shape.
    """
    directory = Path(directory)
    config = speculators_config(read_config(directory), num_target_layers, str(directory / CONFIG))
    tensors = read_weights(directory)
    check_depth(directory / WEIGHTS, config, tensors)
    check_shapes(directory / WEIGHTS, _layout(config, tensors), tensors)
    lent = {name: tensors.pop(name) for name in (EMBED, HEAD) if name in tensors}
    if config.draft_vocab_size:
        tensors["draft_ids"] = _draft_ids(tensors.pop(OFFSETS), tensors.pop(HELD), directory / WEIGHTS)
    return config, tensors, lent


def speculators_config(raw: dict[str, Any], num_target_layers: int, where: str) -> DrafterConfig:
    """The layout's config.json -> DrafterConfig. Fields that do not concern the draft layers are not read. An absent
    sample_from_anchor means false here, unlike in the flat layout."""
    if raw.get("speculators_model_type") != ALGORITHM:
        raise DsparkError(
            f'{where}: expected speculators_model_type "{ALGORITHM}", but got {raw.get("speculators_model_type")!r}.'
        )
    layers = read_layers(take(raw, "transformer_layer_config", dict, where), f"{where}: transformer_layer_config")
    only(raw, {"target_hidden_size": layers["hidden_size"], "dspark_draft_topk": None}, where)
    columns = take(raw, "draft_vocab_size", int, where, layers["vocab_size"])
    confidence = take(raw, "enable_confidence_head", bool, where)
    fields = {
        **layers,
        "sample_from_anchor": take(raw, "sample_from_anchor", bool, where, False),
        "block_size": take(raw, "block_size", int, where),
        "mask_token_id": take(raw, "mask_token_id", int, where),
        "target_layer_ids": tuple(i - 1 for i in take(raw, "aux_hidden_state_layer_ids", list, where)),
        "num_target_layers": num_target_layers,
        "markov_rank": take(raw, "markov_rank", int, where),
        "markov_head": take(raw, "markov_head_type", str, where, "vanilla"),
        "confidence_head": confidence,
        "confidence_with_markov": confidence and take(raw, "confidence_head_with_markov", bool, where),
        "draft_vocab_size": 0 if columns == layers["vocab_size"] else columns,
    }
    config = DrafterConfig.from_dict(fields, where)
    _check_proposal(raw, config, where)
    if refused := refusals(config):
        raise DsparkError(f"{where}: expected a draft model that ours can be, but it has {'; '.join(refused)}.")
    return config


def _check_proposal(raw: dict[str, Any], config: DrafterConfig, where: str) -> None:
    """More tokens than a block has is the sign of a sample_from_anchor that was lost on the way."""
    methods = take(raw, "speculators_config", dict, where).get("proposal_methods")
    method = methods[0] if isinstance(methods, list) and methods and isinstance(methods[0], dict) else {}
    tokens = take(method, "speculative_tokens", int, f"{where}: speculators_config.proposal_methods[0]")
    if not 1 <= tokens <= config.num_predictions:
        raise DsparkError(
            f"{where}: expected speculative_tokens from 1 to {config.num_predictions} (block_size {config.block_size}, "
            f"sample_from_anchor {config.sample_from_anchor}), but got {tokens}. An absent sample_from_anchor means "
            "false: if the draft model was trained to predict from the anchor, write sample_from_anchor: true."
        )


def _layout(config: DrafterConfig, got: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Every tensor of such a file by name; copies of the target's only where the file has them or must."""
    wanted = expected_shapes(config)
    lent = {
        EMBED: (config.vocab_size, config.hidden_size),
        HEAD: (config.num_columns, config.hidden_size),
    }
    wanted |= {name: shape for name, shape in lent.items() if name in got}
    if wanted.pop("draft_ids", None):
        wanted |= {OFFSETS: (config.draft_vocab_size,), HELD: (config.vocab_size,), HEAD: lent[HEAD]}
    return wanted


def _draft_ids(offsets: Tensor, held: Tensor, where: Path) -> Tensor:
    """Target ids [Vd] int64, ascending, from both tables. Raises DsparkError when they do not say the same."""
    good = offsets.dtype in (torch.int32, torch.int64) and held.dtype == torch.bool
    ids = offsets.long() + torch.arange(len(offsets))
    if not good or not torch.equal(ids, held.nonzero().flatten()):
        raise DsparkError(
            f"{where}: expected d2t (whole numbers) and t2d (booleans) to name the same {len(ids)} target ids in "
            f"ascending order, but they differ ({offsets.dtype}, {held.dtype}, {int(held.sum())} ids in t2d)."
        )
    return ids


def _held(ids: Tensor, vocab_size: int) -> Tensor:
    return torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
