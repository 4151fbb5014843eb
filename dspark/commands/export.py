"""Write a trained draft model as a folder, after proving that it drafts as it was trained.

The gate: every tensor of the reloaded folder must be the one that was written, and its draft loop's logits must equal
the training module's on whole blocks, bit for bit. If one bit differs the export fails, says by how much and where, and
leaves nothing behind.

--format says what to write. The last two follow what vLLM reads; no export was run in an engine. docs/formats.md lists
every key.

  bundle       the runner's own: hashes, calibration, the target's fingerprint
  deepspec     the DeepSpec reference's flat layout, with the target's embedding
               and LM head copied in
  speculators  the nested layout of the speculators project; embedding and LM
               head are the target's

--checkpoint takes any of the three as well as a .ckpt, so a folder of another project becomes a bundle, and back. What
a format cannot hold is refused by name before anything is written; what it leaves out is printed as a note.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dspark.calibration.record import Calibration
from dspark.contracts import DsparkError
from dspark.drafter.blocks import Blocks, blocks_at
from dspark.drafter.model import Drafter
from dspark.export.bundle import drafter_hash, write_calibration
from dspark.export.formats import FORMATS, check_sayable, is_ours, load_draft, notes, write_draft
from dspark.export.gate import check_parity, check_same
from dspark.export.speculators import KIND as NESTED
from dspark.files import atomic_dir
from dspark.sealed import SEAL
from dspark.slot_maps import read_maps
from dspark.target.checkpoint import read_config_dict
from dspark.target.decoder import Target
from dspark.target.load import EMBEDDED, checkpoint_dir, load_target

EXAMPLES = """
examples:
  dspark export --checkpoint runs/demo/confidence/last.ckpt \\
      --calibration runs/demo/calibration.json --out runs/demo/bundle
  dspark export --checkpoint runs/mine/bundle --target Qwen/Qwen3-4B \\
      --format speculators --out runs/mine/speculators
  dspark export --checkpoint downloads/dspark_qwen3_4b_block7 \\
      --target Qwen/Qwen3-4B --out runs/theirs/bundle
"""
GATE_SEQUENCES, GATE_LENGTH, _ROOM = 4, 48, 32
_MOVED = ("maps", "data_hash", "drafter_hash", "format", SEAL)  # what write_calibration puts down itself


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `dspark export`."""
    parser.add_argument(
        "--checkpoint", required=True, help="what `lightning fit` wrote (.ckpt), or a folder in one of the formats"
    )
    parser.add_argument("--format", default="bundle", choices=FORMATS, help="what to write")
    parser.add_argument("--calibration", default="", help="what `dspark calibrate` wrote for these weights")
    parser.add_argument("--target", default="smollm2-135m-instruct", help="the target it was trained for")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="dtype of the target")
    parser.add_argument("--out", required=True, help="the folder to write")


def run(args: argparse.Namespace) -> int:
    """Export; 0. Raises DsparkError when the gate fails, on a calibration of other weights, or when the format cannot
    hold the draft model."""
    result = export(args.checkpoint, args.target, args.dtype, args.out, args.calibration, args.format)
    for note in result["notes"]:
        print(f"note: {note}.")
    print(f"{result['compared']} logits of the reloaded draft loop equal the training module's; written to {args.out}")
    return 0


def export(
    checkpoint: str, target_source: str, dtype: str, out: str, calibration: str = "", kind: str = "bundle"
) -> dict[str, Any]:
    """Writes the export and returns its hash, how many logits the gate compared, and the notes. An earlier export of
    that format in `out` is replaced; a folder with anything else in it is refused."""
    _refuse_foreign(Path(out), kind)
    target = load_target(target_source, dtype)
    draft = load_draft(checkpoint, target)
    drafter = draft.drafter
    check_sayable(kind, drafter.config)
    if calibration:
        draft = replace(draft, calibration=Calibration.load(calibration, drafter_hash(drafter)).to_dict())
    meta = {"checkpoint": str(checkpoint), "target": target_source, "dtype": dtype}
    raw = {} if kind == "bundle" else read_config_dict(checkpoint_dir(target_source))
    with atomic_dir(out) as temporary:
        folder = temporary / "export"
        identity = write_draft(kind, folder, drafter, target, raw, meta)
        compared = gate(drafter, folder, target)
        if kind == "bundle" and draft.calibration:
            _write_calibration(folder, draft.calibration)
        for path in folder.iterdir():
            path.rename(temporary / path.name)
        folder.rmdir()
    told = notes(kind, draft)
    if kind == NESTED and (target_source == EMBEDDED or target_source.endswith(".gguf")):
        told.append(
            f"the file names its target {target_source!r}, which other engines take for a hub id: give --target the "
            "folder or hub id that they shall load"
        )
    return {"drafter_hash": identity, "compared": compared, "out": out, "notes": told}


def _write_calibration(folder: Path, fitted: dict[str, Any]) -> None:
    rest = {key: value for key, value in fitted.items() if key not in _MOVED}
    write_calibration(folder, read_maps(fitted["maps"]), fitted["data_hash"], **rest)


def _refuse_foreign(folder: Path, kind: str) -> None:
    """An export replaces a folder whole: only one that an export of the same format made, and nobody put anything
    into."""
    if folder.resolve() == Path.cwd():
        raise DsparkError(f"{folder}: expected a folder of its own for the {kind}, but this is the current one.")
    if folder.is_dir() and any(folder.iterdir()) and not is_ours(kind, folder):
        raise DsparkError(
            f"{folder}: expected an empty place or an earlier {kind} export to replace, but the folder holds other "
            "files. Give --out a folder of its own."
        )
    if folder.exists() and not folder.is_dir():
        raise DsparkError(f"{folder}: expected a folder to write, but there is a file. Give --out another name.")


def gate(drafter: Drafter, folder: Path, target: Target) -> int:
    """The tensors' hashes, then the parity gate on keyed random text: how many logits were compared. Raises DsparkError
    when one differs."""
    reloaded = load_draft(folder, target).drafter
    check_same(drafter, reloaded)
    generator = torch.Generator().manual_seed(0)
    length = GATE_LENGTH + _ROOM * (drafter.config.num_predictions // _ROOM)  # longer texts for longer blocks alone
    text = [torch.randint(target.vocab_size, (length,), generator=generator) for _ in range(GATE_SEQUENCES)]
    _, features, offsets = target.forward_sequences(text, tuple(drafter.config.target_layer_ids))
    if features is None:
        raise DsparkError("export gate: expected a draft model that reads target layers, but it reads none.")
    positions = torch.cat([torch.arange(len(t)) for t in text])
    blocks = _blocks(torch.cat(text), offsets, drafter)
    return check_parity(drafter, reloaded.to(target.dtype), blocks, features, positions)


def _blocks(ids: torch.Tensor, offsets: torch.Tensor, drafter: Drafter) -> Blocks:
    """Blocks at every fifth position of every sequence, those without a full block behind them left out."""
    slots = drafter.config.num_predictions
    length = len(ids) // GATE_SEQUENCES
    anchors = torch.arange(0, length - slots - 1, 5)
    sequence = torch.arange(GATE_SEQUENCES).repeat_interleave(len(anchors))
    return blocks_at(ids, offsets, sequence, anchors.repeat(GATE_SEQUENCES), num_predictions=slots)
