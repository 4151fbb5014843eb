"""Where rows come from: JSONL, Parquet, a directory, a Hugging Face dataset -> numbered rows, broken ones included.

A row that cannot be read is still a row: it arrives with ``error`` set, so that rows in == rows out + itemised drops.
``pyarrow`` and ``datasets`` are imported where they are used: reading JSONL needs neither.
Left out on purpose: streaming from the hub, and dataset scripts (no remote code).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.contracts import DsparkError
from dspark.corpus.messages import parse_json

FILE_SUFFIXES = (".jsonl", ".json", ".parquet")
SAVED_DATASET_FILES = ("dataset_info.json", "dataset_dict.json")


@dataclass(frozen=True, slots=True)
class Row:
    """``line`` is 1-based within ``file``. ``value`` is the row's object, None when ``error`` says why there is none.
    ``raw`` is the row as text, for the quarantine file."""

    file: str
    line: int
    raw: str
    value: dict[str, Any] | None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Source:
    """``rows`` can be walked once. ``split_done``: the source itself picked the split (a file or dataset of that
    name), so rows without a split field belong to it."""

    rows: Iterator[Row]
    split_done: bool


def open_source(source: str | Path, split: str | None) -> Source:
    """Open a JSONL or Parquet file, a directory that holds ``<split>.jsonl`` or ``.parquet``, a dataset saved with
    ``save_to_disk``, any directory ``datasets`` can load, or a dataset's hub name (``owner/name`` or
    ``owner/name:config``). With split None a directory's files are read one after another in name order.

    Raises DsparkError when nothing is there or it cannot be opened.
    """
    path = Path(source)
    if path.is_file():
        return Source(_read_file(path), split_done=False)
    if path.is_dir():
        return _open_directory(path, split)
    if path.suffix in FILE_SUFFIXES or path.is_absolute() or str(source).startswith((".", "~")):
        raise DsparkError(f"corpus: expected a file or directory at {source}, but nothing is there. Check the path.")
    name, _, config = str(source).partition(":")
    return _open_dataset(name, config or None, split)


def _open_directory(path: Path, split: str | None) -> Source:
    found = sorted(p for p in path.iterdir() if p.suffix in (".jsonl", ".parquet"))
    chosen = [p for p in found if p.stem == split]
    if chosen:
        return Source(_read_files(chosen), split_done=True)
    if any((path / name).is_file() for name in SAVED_DATASET_FILES):
        return _open_saved(path, split)
    if split is None and found:
        return Source(_read_files(found), split_done=True)
    return _open_dataset(str(path), None, split)


def _read_files(paths: Iterable[Path]) -> Iterator[Row]:
    for path in paths:
        yield from _read_file(path)


def _read_file(path: Path) -> Iterator[Row]:
    if path.suffix in (".jsonl", ".json"):
        return _read_jsonl(path)
    if path.suffix == ".parquet":
        return _read_parquet(path)
    raise DsparkError(f"corpus: expected a file ending in {', '.join(FILE_SUFFIXES)}, but got {path}.")


def _read_jsonl(path: Path) -> Iterator[Row]:
    # Bytes, not text: one line that is not UTF-8 must not end the whole file.
    with path.open("rb") as handle:
        for line, data in enumerate(handle, start=1):
            if line == 1:
                data = data.removeprefix(b"\xef\xbb\xbf")
            if data.strip():
                yield _parse_line(path.name, line, data.rstrip(b"\r\n"))


def _parse_line(file: str, line: int, data: bytes) -> Row:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raw = data.decode("utf-8", errors="backslashreplace")
        return Row(file, line, raw, None, f"not UTF-8: byte {data[error.start]:#04x} at column {error.start + 1}.")
    try:
        value = parse_json(text)
    except (ValueError, RecursionError) as error:
        return Row(file, line, text, None, f"not JSON: {error}.")
    if not isinstance(value, dict):
        return Row(file, line, text, None, f"expected a JSON object, but got {type(value).__name__}.")
    return Row(file, line, text, value)


def _read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        batches = pyarrow.parquet.ParquetFile(path).iter_batches()
        yield from _rows_of(path.name, (value for batch in batches for value in batch.to_pylist()))
    except (pyarrow.ArrowException, OSError) as error:
        raise DsparkError(f"corpus: expected a Parquet file at {path}, but it cannot be read: {error}.") from None


def _open_saved(path: Path, split: str | None) -> Source:
    import datasets

    try:
        loaded = datasets.load_from_disk(str(path))
    except Exception as error:  # whatever the library raises, the user needs the path and the cause
        raise DsparkError(f"corpus: the dataset saved at {path} cannot be read: {_first_line(error)}.") from None
    # A single saved dataset may be any split or none: only its own word for it counts.
    return _from_loaded(str(path), loaded, split, is_split=str(getattr(loaded, "split", None)) == split)


def _open_dataset(name: str, config: str | None, split: str | None) -> Source:
    import datasets

    try:
        loaded = datasets.load_dataset(name, config, split=split)
    except Exception as error:  # offline, unknown name, gated, wrong config: one clear message for all
        raise DsparkError(
            f"corpus: expected a file, a directory or a Hugging Face dataset, but {name!r} cannot be loaded "
            f"({type(error).__name__}: {_first_line(error)}). Check the name and the network, or give a local file."
        ) from None
    return _from_loaded(name, loaded, split, is_split=True)


def _from_loaded(name: str, loaded: Any, split: str | None, is_split: bool) -> Source:
    if not isinstance(loaded, dict):
        return Source(_rows_of(name, loaded), split_done=is_split)
    if split is None and len(loaded) == 1:
        split = next(iter(loaded))
    if split not in loaded:
        raise DsparkError(f"corpus: expected split to be one of {sorted(loaded)} of {name}, but got {split!r}.")
    return Source(_rows_of(name, loaded[split]), split_done=True)


def _rows_of(file: str, values: Iterable[Any]) -> Iterator[Row]:
    for line, value in enumerate(values, start=1):
        yield Row(file, line, json.dumps(value, ensure_ascii=False, default=str), dict(value))


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
