"""The books of one load: every row read is kept, dropped with a reason, or belongs to another split.

``open_rows`` is the walk that prompts.py and conversations.py share.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dspark.contracts import DsparkError
from dspark.corpus.sources import Row, open_source
from dspark.files import atomic_write


@dataclass(slots=True)
class Ledger:
    """dropped and notes hold (line, words). kept + len(dropped) + other_split == rows_read, always."""

    source: str
    rows_read: int = 0
    kept: int = 0
    other_split: int = 0
    dropped: list[tuple[int, str]] = field(default_factory=list)
    notes: list[tuple[int, str]] = field(default_factory=list)
    _broken: list[dict[str, Any]] = field(default_factory=list)
    _seen: dict[str, Row] = field(default_factory=dict)

    def drop(self, row: Row, reason: str) -> None:
        self.dropped.append((row.line, reason))
        self._broken.append({"file": row.file, "line": row.line, "reason": reason, "row": row.raw})

    def keep(self, row: Row, content_id: str) -> bool:
        """Count the row as kept, or drop it when the same content came before. Returns whether it is kept."""
        first = self._seen.get(content_id)
        if first is not None:
            where = "" if first.file == row.file else f" of {first.file}"
            self.drop(row, f"duplicate of line {first.line}{where} (content {content_id}).")
            return False
        self._seen[content_id] = row
        self.kept += 1
        return True

    def close(self, quarantine: Path | None) -> None:
        """Write the quarantine file, then refuse a load that kept nothing.

        One JSON object a dropped row: file, line, reason, row (the row's text). Without dropped rows there is no file:
        an older run's is removed, so that it never passes for this one's.
        """
        assert self.kept + len(self.dropped) + self.other_split == self.rows_read, f"rows do not add up: {self}"
        if quarantine is not None and not self._broken:
            quarantine.unlink(missing_ok=True)
        elif quarantine is not None:
            lines = (json.dumps(item, ensure_ascii=False) + "\n" for item in self._broken)
            # A lone surrogate decodes from JSON but has no UTF-8 form: the raw text is escaped rather than lost.
            atomic_write(quarantine, "".join(lines).encode("utf-8", errors="backslashreplace"))
        if not self.kept:
            raise DsparkError(f"corpus: expected at least one usable row in {self.source}, but {self._why_none()}")

    def _why_none(self) -> str:
        if not self.rows_read:
            return "it is empty."
        if not self.dropped:
            return f"all {self.rows_read} rows belong to other splits."
        common, count = Counter(reason for _, reason in self.dropped).most_common(1)[0]
        return f"{len(self.dropped)} of {self.rows_read} rows were dropped; most often ({count}): {common}"

    def summary(self) -> str:
        """One line for the user, for example ``300 rows kept of 304 read; 4 dropped: 3 x duplicate, 1 x not JSON``."""
        line = f"{self.kept} rows kept of {self.rows_read} read from {self.source}"
        if self.other_split:
            line += f"; {self.other_split} of other splits"
        if self.dropped:
            kinds = Counter(re.split(r":|, but | of line ", reason)[0] for _, reason in self.dropped)
            line += f"; {len(self.dropped)} dropped: " + ", ".join(f"{n} x {kind}" for kind, n in kinds.most_common())
        return line


def open_rows(source: str | Path, split: str | None, ledger: Ledger) -> Iterator[tuple[Row, dict[str, Any]]]:
    """Yield the readable rows of the split as (row, object); book the others in the ledger.

    With a split asked for, a row counts when its ``split`` field says so; a source that has no such field and is not
    itself a split is refused: reading it whole for every split would put the same rows into training and test.
    """
    opened = open_source(source, split)
    for row in opened.rows:
        ledger.rows_read += 1
        if row.value is None:
            ledger.drop(row, row.error)
            continue
        told = row.value.get("split")
        if split is None or told == split or (told is None and opened.split_done):
            yield row, row.value
        elif told is None:
            ledger.drop(row, f"expected a split field (split {split!r} was asked for), but the row has none.")
        else:
            ledger.other_split += 1
