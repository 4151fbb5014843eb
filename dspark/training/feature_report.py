"""What a run with a cache of features tells: its size before anything is written, its hits at the end.

A cache that never hits is an error and no slow run: in its second epoch a run must find what it kept in its first.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from dspark.contracts import DsparkError
from dspark.training.features import FeatureCache, Tally, size_text

_SPLITS: dict[str, tuple[str, ...]] = {"fit": ("train", "val"), "validate": ("val",)}


def announce(cache: FeatureCache, data: Any, trainer: Trainer, stage: str) -> None:
    """Says on stderr what the cache will take in `stage` (fit, validate). Raises DsparkError, on every rank, when
    the disk has no room for it."""
    refusal = ""
    if trainer.is_global_zero:
        splits = [split for split in _SPLITS.get(stage, ()) if data.paths[split]]
        line, refusal = cache.plan([sample.ids for split in splits for sample in data.samples(split)])
        print(line, file=sys.stderr)
    refusal = trainer.strategy.broadcast(refusal)
    if refusal:
        raise DsparkError(refusal)


def summary(tally: Tally, folder: Path) -> str:
    """The run's last word."""
    return (
        f"feature cache {folder}: {tally.hits} of {tally.seen} look-ups were hits "
        f"({100 * tally.hits / max(1, tally.seen):.1f}%), {tally.made} made ({size_text(tally.written)} written), "
        f"{tally.damaged} damaged files made again, {tally.broken} not finite and not kept"
    )


class FeatureReport(Callback):
    """Watches the cache of a module that has one (`module.cache`): per epoch, and over the whole fit."""

    def __init__(self) -> None:
        self._before = Tally().tensor()
        self._whole_epoch = False  # one is behind us, so every sequence has been kept

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._before = _cache(pl_module).tallies[True].tensor()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raises DsparkError when an epoch after the first had no hit at all."""
        cache = _cache(pl_module)
        epoch = Tally(*_everywhere(trainer, cache.tallies[True].tensor() - self._before))
        if self._whole_epoch and epoch.made and not epoch.hits:
            raise DsparkError(
                f"feature cache {cache.store.folder}: expected hits in an epoch after the first, but none of "
                f"{epoch.seen} sequences was found. Is the folder emptied, or another one on every machine?"
            )
        self._whole_epoch |= epoch.seen >= len(trainer.datamodule.samples("train"))  # type: ignore[attr-defined]

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        cache = _cache(pl_module)
        counts = _everywhere(trainer, torch.stack([t.tensor() for t in cache.tallies.values()]).sum(0))
        if trainer.is_global_zero:
            print(summary(Tally(*counts), cache.store.folder), file=sys.stderr)


def _cache(module: LightningModule) -> FeatureCache:
    cache = module.cache
    assert isinstance(cache, FeatureCache), "the module that asks for a report opens a cache in setup"
    return cache


def _everywhere(trainer: Trainer, counts: Tensor) -> list[int]:
    """counts summed over all ranks."""
    return trainer.strategy.reduce(counts.clone(), reduce_op="sum").tolist()
