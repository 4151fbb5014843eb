"""What `lightning test recipes/confidence.yaml` does: calibrate on one split, report on another.

Ranks share the rounds and the first one writes. A confidence's bits depend neither on the batch nor on the rank, and
rounds are put in one order, so one process and many write the same report, byte for byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as distributed
from lightning.pytorch import Trainer

from dspark.calibration.drift import refuse_other_slots
from dspark.calibration.events import Events
from dspark.calibration.fitting import fit
from dspark.calibration.report import Report, build_report, load_report
from dspark.contracts import DsparkError
from dspark.training.options import ReportOptions

CALIBRATION = "calibration.json"
TENSORS = ("confidence_logits", "accepted", "verified", "draft_max_prob")
NAMES = ("domain", "conversation")


def events_of(parts: Iterable[dict[str, Any]]) -> Events | None:
    """Events from the parts that ConfidenceModule.record gives, in an order of their own: by domain, conversation,
    sequence and anchor, whoever judged them and in which batch. None without a round."""
    parts = [part for part in parts if len(part["accepted"])]
    if not parts:
        return None
    tensors = {key: torch.cat([part[key].cpu() for part in parts]) for key in TENSORS}
    names = {key: [name for part in parts for name in part[key]] for key in (*NAMES, "sequence")}
    anchors = torch.cat([part["anchor"].cpu() for part in parts]).tolist()
    rows = list(zip(names["domain"], names["conversation"], names["sequence"], anchors,
                    tensors["confidence_logits"].tolist(), tensors["accepted"].tolist(), strict=True))  # fmt: skip
    order = sorted(range(len(rows)), key=rows.__getitem__)
    logits, accepted, verified, maximum = (tensors[key][order] for key in TENSORS)
    domain, conversation = ([names[key][i] for i in order] for key in NAMES)
    return Events(logits, accepted, verified, domain, conversation, maximum)


def gathered(parts: list[dict[str, Any]], world_size: int) -> list[dict[str, Any]]:
    """Every rank's parts, on every rank."""
    if world_size == 1:
        return parts
    everyone: list[list[dict[str, Any]] | None] = [None] * world_size
    distributed.all_gather_object(everyone, parts)
    return [part for mine in everyone for part in mine or []]


def on_first_rank(trainer: Trainer, work: Callable[[], None]) -> None:
    """Work of the first rank. When it fails every rank does: nobody waits for one that has stopped."""
    failed: Exception | None = None
    if trainer.is_global_zero:
        try:
            work()
        except Exception as error:  # whatever it is, the others must know
            failed = error
    told = [str(failed) if failed else ""]
    if trainer.world_size > 1:
        distributed.broadcast_object_list(told)
    if failed:
        raise failed
    if told[0]:
        raise DsparkError(f"the first process failed: {told[0]}")


def older_report(options: ReportOptions, slots: int) -> dict[str, Any] | None:
    """What to tell drift from, read before the work begins. Raises DsparkError when it cannot serve."""
    if not options.against:
        return None
    older = load_report(options.against).data
    refuse_other_slots(older, slots)
    return older


def splits(test: Sequence[dict[str, Any]], calibration: Sequence[dict[str, Any]]) -> tuple[Events, Events]:
    """(events to report on, events to calibrate on). Raises DsparkError when one has no rounds: on every rank, so that
    none waits for another."""
    tested, fitted_on = events_of(test), events_of(calibration)
    if fitted_on is None or tested is None:
        missing = "data.predict, to calibrate on" if fitted_on is None else "data.test, to report on"
        raise DsparkError(f"test: expected rounds with drafts in {missing}, but got none. Roll out with a draft model.")
    return tested, fitted_on


def confidence_report(
    tested: Events, fitted_on: Events, options: ReportOptions, drafter_hash: str, folder: Path,
    older: dict[str, Any] | None, extra: dict[str, Any], board: Path | None,
) -> Report:  # fmt: skip
    """Fits, writes calibration.json and the report into the folder."""
    fitted = fit(fitted_on, drafter_hash, options.method)
    report = build_report(
        tested, fitted, folder, extra=extra, events_calibration=fitted_on, against=older, tensorboard_dir=board,
        replicates=options.replicates,
    )  # fmt: skip
    fitted.save(folder / CALIBRATION)
    return report
