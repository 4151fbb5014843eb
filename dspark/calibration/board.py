"""The report in TensorBoard: scalars per slot (the step is the slot) and per domain, and the report's pictures."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.image import imread
from torch.utils.tensorboard import SummaryWriter

from dspark.calibration.events import ALL
from dspark.calibration.scores import METRICS
from dspark.contracts import DsparkError

_LAWS = {"cumulative": "survival", "conditional": "conditional"}


def write_board(data: dict[str, Any], pictures: Sequence[tuple[str, bytes]], directory: str | Path) -> None:
    """Writes one event file into `directory`: `calibration_survival_by_slot/ece_head_calibrated` and the like.

    data: report.json's content. pictures: (name, PNG bytes). Raises DsparkError when the place cannot be written.
    """
    try:
        _write(data, pictures, directory)
    except (OSError, ValueError) as error:
        raise DsparkError(
            f"{directory}: expected a place for TensorBoard's files, but got: {error}. Give another, or none."
        ) from error


def _write(data: dict[str, Any], pictures: Sequence[tuple[str, bytes]], directory: str | Path) -> None:
    with SummaryWriter(str(directory)) as writer:
        for row in data["rows"]:
            where = f"calibration_{_LAWS[row['law']]}"
            known = [m for m in METRICS if row[m] is not None]
            for metric in known:
                name = f"{metric}_{row['estimator']}"
                if row["domain"] == ALL and isinstance(row["slot"], int):
                    writer.add_scalar(f"{where}_by_slot/{name}", row[metric], row["slot"])
                elif row["slot"] == "mean":
                    writer.add_scalar(f"{where}_mean_{row['domain']}/{name}", row[metric], 0)
        for name, picture in pictures:
            writer.add_image(f"calibration/{name}", imread(io.BytesIO(picture)), dataformats="HWC")
