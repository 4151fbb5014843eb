"""Draft checkpoints in the flat layout of the DeepSpec reference (DSpark / DFlash with Qwen3 layers), both ways.

One config.json (a Qwen3 config with the draft fields in it) and one model.safetensors: the draft model's own tensors
under our names, and copies of the target's embedding and LM head, which the layout demands even where the target ties
them. Such drafts always predict from the anchor's slot, over the whole vocabulary. The layout was read from the
public repository's checkpoints; docs/formats.md says which keys are written and what was left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from dspark.contracts import DsparkError
from dspark.drafter.config import DrafterConfig
from dspark.drafter.model import Drafter
from dspark.export.bundle import drafter_hash
from dspark.export.folder import CONFIG, WEIGHTS, dtype_name, read_config, read_weights, write_folder
from dspark.export.qwen3 import layer_keys, only, read_layers, take, unsayable
from dspark.export.tensors import check_depth, check_shapes, expected_shapes, finite_state
from dspark.target.decoder import Target

KIND = "deepspec"
ARCHITECTURE = "Qwen3DSparkModel"
EMBED, HEAD = "embed_tokens.weight", "lm_head.weight"
_NUM_ANCHORS = 512  # a setting of training that the reference asks for at load and never uses; its own default


def refusals(config: DrafterConfig) -> list[str]:
    """What of this draft model the layout cannot say."""
    checks = (
        (not config.sample_from_anchor, "sample_from_anchor false (slots always predict the token after them)"),
        (config.draft_vocab_size > 0, f"draft_vocab_size {config.draft_vocab_size} (always the whole vocabulary)"),
    )
    return [*unsayable(config), *(text for holds, text in checks if holds)]


def deepspec_keys(config: DrafterConfig, dtype: str, target: Mapping[str, Any]) -> dict[str, Any]:
    """config.json, every key. dtype: of the tensors. target: the target's own config.json."""
    keys = {
        **layer_keys(config, target),
        "architectures": [ARCHITECTURE],
        "block_size": config.block_size,
        "dtype": dtype,
        "enable_confidence_head": config.confidence_head,
        "markov_rank": config.markov_rank,
        "mask_token_id": config.mask_token_id,
        "num_anchors": _NUM_ANCHORS,
        "num_target_layers": config.num_target_layers,
        "target_layer_ids": list(config.target_layer_ids),
    }
    if config.markov_rank:
        keys["markov_head_type"] = config.markov_head
    if config.confidence_head:
        keys["confidence_head_with_markov"] = config.confidence_with_markov
    return keys


def write_deepspec(directory: str | Path, drafter: Drafter, target: Target, raw: Mapping[str, Any]) -> str:
    """Writes `drafter`, which must have no refusals, and returns its hash. raw: the target's own config.json.

    The target's embedding and LM head are stored in the draft model's dtype, in which it uses them.
    """
    state, identity = finite_state(drafter), drafter_hash(drafter)
    for name, weight in ((EMBED, target.embed_weight), (HEAD, target.head_weight)):
        state[name] = weight.detach().cpu().to(drafter.dtype, copy=True).contiguous()
    keys = deepspec_keys(drafter.config, dtype_name(drafter), raw)
    write_folder(Path(directory), KIND, keys, state, identity)
    return identity


def read_deepspec(directory: str | Path) -> tuple[DrafterConfig, dict[str, Tensor], Tensor, Tensor]:
    """Returns (config, the draft model's state dict, embedding [V,H], LM head [V,H]).

    Raises DsparkError when a file or field is missing, the checkpoint is of another kind, or a tensor is missing,
    unexpected or of another shape.
    """
    directory = Path(directory)
    config = deepspec_config(read_config(directory), str(directory / CONFIG))
    tensors = read_weights(directory)
    check_depth(directory / WEIGHTS, config, tensors)
    lent = dict.fromkeys((EMBED, HEAD), (config.vocab_size, config.hidden_size))
    check_shapes(directory / WEIGHTS, {**expected_shapes(config), **lent}, tensors)
    embed, head = tensors.pop(EMBED), tensors.pop(HEAD)
    return config, tensors, embed, head


def deepspec_config(raw: dict[str, Any], where: str) -> DrafterConfig:
    """The layout's config.json -> DrafterConfig. Fields that do not concern the draft layers are not read."""
    if raw.get("architectures") != [ARCHITECTURE]:
        raise DsparkError(
            f'{where}: expected architectures ["{ARCHITECTURE}"], but got {raw.get("architectures")}. '
            "Is this the target's own folder?"
        )
    layers = read_layers(raw, where)
    # Keys of vLLM's that the reference does not know; other values than these would be another draft model.
    known = {"draft_vocab_size": layers["vocab_size"], "target_hidden_size": layers["hidden_size"]}
    only(raw, {"sample_from_anchor": True, "dspark_draft_topk": None, **known}, where)
    fields = {
        **layers,
        "sample_from_anchor": True,
        "block_size": take(raw, "block_size", int, where),
        "mask_token_id": take(raw, "mask_token_id", int, where),
        "target_layer_ids": tuple(take(raw, "target_layer_ids", list, where)),
        "num_target_layers": take(raw, "num_target_layers", int, where),
        "markov_rank": take(raw, "markov_rank", int, where),
        "markov_head": take(raw, "markov_head_type", str, where, "vanilla"),
        "confidence_head": take(raw, "enable_confidence_head", bool, where, False),
        "confidence_with_markov": take(raw, "confidence_head_with_markov", bool, where, False),
    }
    config = DrafterConfig.from_dict(fields, where)
    if refused := refusals(config):
        raise DsparkError(f"{where}: expected a draft model that the layout knows, but it has {'; '.join(refused)}.")
    return config
