"""What a run leaves for others: its policy as an ordinary checkpoint folder, its draft model as a bundle for it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from dspark.contracts import DsparkError
from dspark.drafter.model import Drafter
from dspark.export.bundle import Bundle, save_bundle, write_calibration
from dspark.files import atomic_dir, share
from dspark.target.checkpoint import CONFIG, SINGLE, read_config_dict
from dspark.target.decoder import Target
from dspark.target.load import checkpoint_dir
from dspark.target.weights import plan

_COPIED = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json",
           "chat_template.jinja", "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model")  # fmt: skip


def save_policy(folder: Path, policy: Target, source: str) -> None:
    """The policy as a checkpoint of `source`'s kind, which every command takes for --target: same fingerprint."""
    origin = checkpoint_dir(source)
    dtype = str(policy.dtype).removeprefix("torch.")
    raw = {k: v for k, v in read_config_dict(origin).items() if k != "dtype"} | {"torch_dtype": dtype}
    save_target(folder, policy, raw, origin)


def save_drafter(folder: Path, drafter: Drafter, policy: Target, origin: Bundle) -> None:
    """The draft model as a bundle made for the policy as it is now. A calibration of the bundle that it comes from goes
    along, marked as carried: its maps were fitted before the policy moved."""
    made_for = Drafter(replace(drafter.config, target_fingerprint=policy.fingerprint), drafter.draft_ids)
    made_for.load_state_dict(drafter.state_dict())
    save_bundle(folder, made_for.to(policy.dtype), {"dtype": str(policy.dtype).removeprefix("torch.")})
    if origin.calibration is not None and drafter.confidence_head is not None:
        data_hash = origin.calibration["data_hash"]
        write_calibration(folder, drafter.confidence_head.maps, data_hash, carried_from=origin.hash)


def save_target(folder: Path, target: Target, raw: dict[str, Any], tokenizer: Path) -> None:
    """An ordinary checkpoint folder: config.json (raw), model.safetensors under the names of the family's plan, and the
    tokenizer's files of another folder. Raises DsparkError when the place cannot be written."""
    tensors: dict[str, Tensor] = {}
    held = dict(target.tensors())
    for name, parts in plan(target.config).items():
        pieces = held[name].detach().split([shape[0] for _, shape in parts])
        tensors |= {part: piece.contiguous().clone() for (part, _), piece in zip(parts, pieces, strict=True)}
    with atomic_dir(folder) as temporary:
        try:
            save_file(tensors, temporary / SINGLE)
            share(temporary / SINGLE)
            (temporary / CONFIG).write_text(json.dumps(raw, indent=1) + "\n")
            for name in _COPIED:
                if (tokenizer / name).exists():
                    shutil.copy(tokenizer / name, temporary / name)
        except (OSError, SafetensorError) as error:
            raise DsparkError(
                f"{folder}: expected room for a checkpoint, but got: {' '.join(str(error).split())}. What was there is "
                "as it was; make room and give the same command again."
            ) from error
