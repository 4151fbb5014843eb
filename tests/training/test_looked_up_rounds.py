"""Rounds that a lookup drafted are no labels of a draft model: they are passed over, and counted."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from dspark.contracts import DsparkError
from dspark.training.data import RoundsDataModule
from dspark.training.sources import LOOKED_UP, read_samples


def with_sources(folder: Path, every: int) -> int:
    """Marks each round whose number in the file `every` divides as a lookup's. Returns how many there are."""
    file = folder / "rounds-00000.parquet"
    table = pq.read_table(file)
    sources = ["drafter" if i % every else "lookup" for i in range(table.num_rows)]
    pq.write_table(table.append_column("source", [sources]), file)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["shards"][0]["rounds"]["sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return sources.count("lookup")


def test_the_draft_models_rounds_alone_are_read(tiny: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny.write_directory(tmp_path / "mixed", count=8)
    before = read_samples([str(folder)], rounds=True)
    assert before.dropped == {}  # a folder without the column: an earlier release's
    looked_up = with_sources(folder, 3)
    read = read_samples([str(folder)], rounds=True)
    assert read.dropped == {LOOKED_UP: looked_up}
    kept = [r for s in read.samples for r in s.rounds]
    every = [r for s in before.samples for r in s.rounds]
    assert kept == [r for i, r in enumerate(every) if i % 3]
    RoundsDataModule(predict=[str(folder)]).samples("predict")
    assert f"left out {looked_up} rows: {LOOKED_UP}" in capsys.readouterr().err
    assert read_samples([str(folder)]).dropped == {}  # whoever does not ask for rounds is told nothing


def test_nothing_but_a_lookup_is_nothing_to_learn_from(tiny: Any, tmp_path: Path) -> None:
    folder = tiny.write_directory(tmp_path / "looked_up", count=4)
    with_sources(folder, 1)
    with pytest.raises(DsparkError, match="expected untruncated rounds"):
        RoundsDataModule(train=[str(folder)]).samples("train")
