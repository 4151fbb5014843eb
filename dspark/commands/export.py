"""Write a trained draft model as a folder the runner loads, after proving that it drafts as it was trained.

The gate: the training module's logits on whole blocks must equal, bit for bit, those of the reloaded folder's draft
loop on the same blocks. If one bit differs the export fails, says by how much and where, and leaves nothing behind.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from dspark.calibration.temperature import Calibration
from dspark.contracts import DsparkError
from dspark.drafter.blocks import Blocks, blocks_at
from dspark.drafter.model import Drafter
from dspark.export.bundle import check_parity, drafter_hash, is_bundle, load_bundle, save_bundle, write_calibration
from dspark.files import atomic_dir
from dspark.target.decoder import Target
from dspark.target.load import load_target
from dspark.training.checkpoint import load_drafter

EXAMPLES = """
examples:
  dspark export --checkpoint runs/demo/confidence/last.ckpt \\
      --calibration runs/demo/calibration.json --out runs/demo/bundle
"""
GATE_SEQUENCES, GATE_LENGTH = 4, 48


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `dspark export`."""
    parser.add_argument("--checkpoint", required=True, help="what `lightning fit` wrote (.ckpt)")
    parser.add_argument("--calibration", default="", help="what `dspark calibrate` wrote for these weights")
    parser.add_argument("--target", default="smollm2-135m-instruct", help="the target it was trained for")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="dtype of the target")
    parser.add_argument("--out", required=True, help="the folder to write")


def run(args: argparse.Namespace) -> int:
    """Export; 0. Raises DsparkError when the gate fails, or on a calibration of other weights."""
    result = export(args.checkpoint, args.target, args.dtype, args.out, args.calibration)
    print(f"{result['compared']} logits of the reloaded draft loop equal the training module's; written to {args.out}")
    return 0


def export(checkpoint: str, target_source: str, dtype: str, out: str, calibration: str = "") -> dict[str, Any]:
    """Writes the bundle and returns its hash and how many logits the gate compared. An earlier bundle in `out` is
    replaced; a folder with anything else in it is refused."""
    _refuse_foreign(Path(out))
    target = load_target(target_source, dtype)
    drafter = load_drafter(checkpoint, target)
    fitted = Calibration.load(calibration, drafter_hash(drafter)) if calibration else None
    meta = {"checkpoint": str(checkpoint), "target": target_source, "dtype": dtype}
    with atomic_dir(out) as temporary:
        identity = save_bundle(temporary / "bundle", drafter, meta)
        compared = gate(drafter, temporary / "bundle", target)
        if fitted:
            rest = {k: v for k, v in fitted.to_dict().items() if k not in ("temperatures", "data_hash", "drafter_hash")}
            write_calibration(temporary / "bundle", list(fitted.temperatures), fitted.data_hash, **rest)
        for path in (temporary / "bundle").iterdir():
            path.rename(temporary / path.name)
        (temporary / "bundle").rmdir()
    return {"drafter_hash": identity, "compared": compared, "out": out}


def _refuse_foreign(folder: Path) -> None:
    """An export replaces a folder whole: only one that an export made, and nobody put anything into."""
    if folder.resolve() == Path.cwd():
        raise DsparkError(f"{folder}: expected a folder of its own for the bundle, but this is the current one.")
    if folder.is_dir() and any(folder.iterdir()) and not is_bundle(folder):
        raise DsparkError(
            f"{folder}: expected an empty place or an earlier bundle to replace, but the folder holds other files. "
            "Give --out a folder of its own."
        )
    if folder.exists() and not folder.is_dir():
        raise DsparkError(f"{folder}: expected a folder to write, but there is a file. Give --out another name.")


def gate(drafter: Drafter, folder: Path, target: Target) -> int:
    """The parity gate on keyed random text: how many logits were compared. Raises DsparkError when one differs."""
    reloaded = load_bundle(folder).drafter.to(target.dtype).bind(target.embed_weight, target.head_weight)
    generator = torch.Generator().manual_seed(0)
    text = [torch.randint(target.vocab_size, (GATE_LENGTH,), generator=generator) for _ in range(GATE_SEQUENCES)]
    _, features, offsets = target.forward_sequences(text, tuple(drafter.config.target_layer_ids))
    if features is None:
        raise DsparkError("export gate: expected a draft model that reads target layers, but it reads none.")
    positions = torch.cat([torch.arange(len(t)) for t in text])
    return check_parity(drafter, reloaded, _blocks(torch.cat(text), offsets, drafter), features, positions)


def _blocks(ids: torch.Tensor, offsets: torch.Tensor, drafter: Drafter) -> Blocks:
    """Blocks at every fifth position of every sequence, those without a full block behind them left out."""
    slots = drafter.config.num_predictions
    anchors = torch.arange(0, GATE_LENGTH - slots - 1, 5)
    sequence = torch.arange(GATE_SEQUENCES).repeat_interleave(len(anchors))
    return blocks_at(ids, offsets, sequence, anchors.repeat(GATE_SEQUENCES), num_predictions=slots)
