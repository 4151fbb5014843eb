"""Progress bars of ours beside Lightning's: on stderr, gone when they are done, and plain text where that is a file."""

from __future__ import annotations

import sys
from typing import Any

from lightning.pytorch import Trainer
from tqdm import tqdm


def bar(title: str, total: int, quiet: bool) -> Any:
    """A bar over sequences, a context manager with ``update``. Below a bar that is open already a terminal moves the
    cursor; a file gets no such codes."""
    return tqdm(
        total=total, desc=title, unit="seq", disable=quiet, file=sys.stderr, dynamic_ncols=True, leave=False,
        position=None if sys.stderr.isatty() else 0,
    )  # fmt: skip


class HiddenBar:
    """Lightning's own bar, out of sight for a run whose steps do nothing and seen again afterwards; a bar that was off
    stays off."""

    def __init__(self) -> None:
        self._hidden: Any = None

    def hide(self, trainer: Trainer) -> None:
        found = trainer.progress_bar_callback
        if found is not None and getattr(found, "is_enabled", True):
            found.disable()
            self._hidden = found

    def show(self) -> None:
        if self._hidden is not None:
            self._hidden.enable()
        self._hidden = None
