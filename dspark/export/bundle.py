"""A draft model as a directory: whole or not there, every tensor hashed, read back without guessing.

    config.json        DrafterConfig, field by field
    model.safetensors  the state dict, draft vocabulary included; nothing of the target
    manifest.json      format, sha256 per tensor and file, drafter hash, target fingerprint, the caller's meta
    calibration.json   (written later, sealed) a map per slot, the drafter hash they belong to, data hash
The gate that holds the training module against the reloaded one is export/gate.py; the formats of other engines are
export/deepspec.py and export/speculators.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.contracts import DsparkError
from dspark.drafter.config import DrafterConfig
from dspark.drafter.identity import drafter_hash, identity_hash, layers_hash, tensor_hashes
from dspark.drafter.model import Drafter
from dspark.export.gate import check_parity
from dspark.export.tensors import (
    check_depth,
    check_hashes,
    check_shapes,
    expected_shapes,
    finite_state,
    load_tensors,
    save_tensors,
)
from dspark.files import atomic_dir, atomic_write, canonical_json, read_json, sha256_file
from dspark.sealed import read_sealed, sealed
from dspark.slot_maps import CALIBRATION_FORMAT, SlotMap, read_maps

__all__ = [
    "Bundle", "check_gamma", "check_parity", "check_target", "drafter_hash", "is_bundle", "load_bundle", "save_bundle",
    "write_calibration",
]  # fmt: skip

FORMAT = "dspark-drafter/1"
CONFIG, WEIGHTS, MANIFEST, CALIBRATION = "config.json", "model.safetensors", "manifest.json", "calibration.json"


@dataclass(frozen=True, slots=True)
class Bundle:
    """A loaded draft model, in eval mode, not yet bound to a target. calibration: calibration.json's content, already
    applied to the confidence head. hash: of config and tensors (``drafter_hash``); layers: of those that decide on the
    drafts (``layers_hash``)."""

    path: Path
    config: DrafterConfig
    drafter: Drafter
    calibration: dict[str, Any] | None
    meta: dict[str, Any]
    hash: str
    layers: str


def save_bundle(directory: str | Path, drafter: Drafter, meta: dict[str, Any] | None = None) -> str:
    """Writes `drafter` to `directory`, replacing what is there, and returns its hash. meta: JSON-ready, kept as it is.

    A calibration that was there is gone: it belonged to other weights. Raises DsparkError when the place cannot be
    written or a weight is not finite.
    """
    state = finite_state(drafter)
    hashes = tensor_hashes(state)
    identity = identity_hash(drafter.config, hashes)
    with atomic_dir(directory) as temporary:
        (temporary / CONFIG).write_text(canonical_json(drafter.config.to_dict()) + "\n", encoding="utf-8")
        save_tensors(temporary / WEIGHTS, state)
        manifest = {
            "format": FORMAT,
            "drafter_hash": identity,
            "target_fingerprint": drafter.config.target_fingerprint,
            "tensors": hashes,
            "files": {name: sha256_file(temporary / name) for name in (CONFIG, WEIGHTS)},
            "meta": meta or {},
        }
        (temporary / MANIFEST).write_text(canonical_json(manifest) + "\n", encoding="utf-8")
    return identity


def load_bundle(directory: str | Path) -> Bundle:
    """Reads a bundle back, in the dtype it was saved in.

    Raises DsparkError, naming it, for an absent or foreign directory, a tensor that is missing, unexpected, of another
    shape or changed since it was written, and a calibration that belongs to other weights.
    """
    directory = Path(directory)
    drafter, manifest = _load(directory)
    identity = manifest["drafter_hash"]
    calibration = _read_calibration(directory, drafter, identity)
    layers = layers_hash(drafter.config, manifest["tensors"])
    return Bundle(directory, drafter.config, drafter.eval(), calibration, manifest["meta"], identity, layers)


def write_calibration(directory: str | Path, maps: Sequence[SlotMap], data_hash: str, **extra: Any) -> None:
    """Writes calibration.json beside the weights it was fitted for. maps: one per slot. extra: JSON-ready."""
    directory = Path(directory)
    drafter, manifest = _load(directory)
    if drafter.confidence_head is None:
        raise DsparkError(f"{directory}: expected a draft model with a confidence head to calibrate, but it has none.")
    drafter.confidence_head.set_maps(maps)
    content = {
        **extra,
        "format": CALIBRATION_FORMAT,
        "drafter_hash": manifest["drafter_hash"],
        "maps": [m.to_dict() for m in maps],
        "data_hash": data_hash,
    }
    atomic_write(directory / CALIBRATION, canonical_json(sealed(content)) + "\n")


def is_bundle(directory: Path) -> bool:
    """Whether a folder holds a bundle, whole or damaged, and nothing else."""
    names = {path.name for path in directory.iterdir()}
    return {MANIFEST, WEIGHTS} <= names <= {CONFIG, WEIGHTS, MANIFEST, CALIBRATION}


def check_target(bundle: Bundle, target: Any) -> None:
    """Raises DsparkError unless `target` is the one the draft model was trained for, by fingerprint."""
    wanted = bundle.config.target_fingerprint
    if wanted and wanted != target.fingerprint:
        raise DsparkError(
            f"{bundle.path}: expected the target it was trained for (fingerprint {wanted[:12]}), but got {target.name} "
            f"({target.fingerprint[:12]}). It was {target.told_apart(wanted, str(bundle.meta.get('dtype', '')))}. "
            "Or train a draft model for this one."
        )


def check_gamma(bundle: Bundle, gamma: int) -> None:
    """Raises DsparkError unless 1 <= gamma <= the tokens a trained block proposes."""
    most = bundle.config.num_predictions
    if not 1 <= gamma <= most:
        raise DsparkError(
            f"{bundle.path}: expected gamma from 1 to {most} (the block it was trained with), but got {gamma}. "
            "Lower gamma, or train a draft model with a larger block."
        )


def _load(directory: Path) -> tuple[Drafter, dict[str, Any]]:
    """The checked draft model and its manifest."""
    manifest = _read_manifest(directory)
    config = DrafterConfig.from_dict(read_json(directory / CONFIG, "drafter config"), str(directory / CONFIG))
    if identity_hash(config, manifest["tensors"]) != manifest["drafter_hash"]:
        raise DsparkError(f"{directory}: expected the config it was exported with, but {CONFIG} has been changed.")
    state = load_tensors(directory / WEIGHTS)
    check_depth(directory / WEIGHTS, config, state)
    check_shapes(directory / WEIGHTS, expected_shapes(config), state)
    check_hashes(directory / WEIGHTS, state, manifest["tensors"])
    drafter = Drafter(config)
    drafter.to(state["fc.weight"].dtype).load_state_dict(state, strict=True)
    return drafter, manifest


def _read_manifest(directory: Path) -> dict[str, Any]:
    if not directory.exists():
        raise DsparkError(f"{directory}: expected a draft model's folder, but there is nothing. Check the path.")
    if directory.is_file():
        raise DsparkError(
            f"{directory}: expected a draft model's folder, but got a file. A training checkpoint becomes one with: "
            f"dspark export --checkpoint {directory} --out DIR."
        )
    if not (directory / MANIFEST).is_file():
        raise DsparkError(
            f"{directory}: expected a draft model ({MANIFEST}, {CONFIG}, {WEIGHTS}), but found none. "
            "Train and export one first, or check the path."
        )
    manifest = read_json(directory / MANIFEST, "draft model manifest")
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise DsparkError(f"{directory / MANIFEST}: expected format {FORMAT}. This is no draft model of ours.")
    for key, kind in (("drafter_hash", str), ("tensors", dict), ("meta", dict)):
        if not isinstance(manifest.get(key), kind):
            raise DsparkError(
                f"{directory / MANIFEST}: expected {key} to be {'a text' if kind is str else 'an object'}, but got "
                f"{manifest.get(key)!r}. The file is damaged: export it again."
            )
    if not all(isinstance(text, str) for text in manifest["tensors"].values()):
        raise DsparkError(f"{directory / MANIFEST}: expected a hash per tensor. It is damaged: export again.")
    return manifest


def _read_calibration(directory: Path, drafter: Drafter, identity: str) -> dict[str, Any] | None:
    path = directory / CALIBRATION
    if not path.exists():
        return None
    again = "Calibrate again, or remove the file."
    calibration = read_sealed(path, "calibration", ("format", CALIBRATION_FORMAT), again)
    found = calibration.get("drafter_hash")
    if found != identity:
        raise DsparkError(
            f"{path}: expected a calibration of these weights ({identity[:12]}), but got one of {str(found)[:12]}. "
            f"{again}"
        )
    if drafter.confidence_head is None:
        raise DsparkError(f"{path}: expected no calibration for a draft model without a confidence head. Remove it.")
    if not isinstance(calibration.get("data_hash"), str):
        raise DsparkError(
            f"{path}: expected data_hash to be a text, but got {calibration.get('data_hash')!r}. Calibrate again."
        )
    try:
        drafter.confidence_head.set_maps(read_maps(calibration.get("maps")))
    except DsparkError as error:
        raise DsparkError(f"{path}: {error}") from error
    return calibration
