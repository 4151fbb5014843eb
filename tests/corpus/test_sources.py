"""Parquet files and Hugging Face datasets: the same rows, whatever holds them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from dspark.contracts import DsparkError
from dspark.corpus.prompts import load_prompts

ROWS = [
    {"messages": [{"role": "user", "content": "one", "name": None}], "domain": "math", "split": "train"},
    {"messages": [{"role": "user", "content": "two", "name": "ann"}], "domain": None, "split": "test"},
    {"messages": [{"role": "robot", "content": "three", "name": None}], "domain": "chat", "split": "train"},
]


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    return path


@pytest.fixture
def hf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The datasets library with its cache in the test's folder and the network declared absent."""
    import datasets
    import huggingface_hub.constants

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()
    yield datasets
    datasets.enable_progress_bars()


def test_parquet_reads_like_jsonl(chat_tokenizer: Any, write_rows: Any, parquet: Path) -> None:
    loaded = load_prompts(parquet, chat_tokenizer("chatml"))
    lines = load_prompts(write_rows(*ROWS), chat_tokenizer("chatml"))
    assert loaded.prompts == lines.prompts
    assert loaded.dropped == lines.dropped
    assert [p.domain for p in loaded.prompts] == ["math", "default"]
    assert len(load_prompts(parquet, chat_tokenizer("chatml"), split="train").prompts) == 1


def test_broken_parquet(chat_tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"not a parquet file")
    with pytest.raises(DsparkError, match="expected a Parquet file"):
        load_prompts(path, chat_tokenizer("chatml"))


def test_local_dataset_directory(chat_tokenizer: Any, write_rows: Any, hf: Any, tmp_path: Path) -> None:
    """A directory laid out as on the hub: datasets finds the splits by the files' names."""
    (tmp_path / "set").mkdir()
    for name in ("train", "test"):
        write_rows({"turns": [f"a {name} row"]}, {"turns": [""]}, name=f"set/{name}-00000-of-00001.jsonl")
    loaded = load_prompts(str(tmp_path / "set"), chat_tokenizer("chatml"), split="test")
    assert [p.messages[0]["content"] for p in loaded.prompts] == ["a test row"]
    assert [line for line, _ in loaded.dropped] == [2]
    with pytest.raises(DsparkError, match="validation"):
        load_prompts(str(tmp_path / "set"), chat_tokenizer("chatml"), split="validation")


def test_dataset_saved_to_disk(chat_tokenizer: Any, hf: Any, tmp_path: Path) -> None:
    table = hf.Dataset.from_list(ROWS)
    hf.DatasetDict({"train": table, "rest": table.select([1])}).save_to_disk(str(tmp_path / "dict"))
    table.save_to_disk(str(tmp_path / "single"))
    tokenizer = chat_tokenizer("chatml")
    assert len(load_prompts(tmp_path / "dict", tokenizer, split="train").prompts) == 1
    assert len(load_prompts(tmp_path / "single", tokenizer).prompts) == 2
    assert len(load_prompts(tmp_path / "single", tokenizer, split="test").prompts) == 1
    with pytest.raises(DsparkError, match=r"one of \['rest', 'train'\].*None"):
        load_prompts(tmp_path / "dict", tokenizer)


def test_hub_name_without_a_network_is_one_clear_error(chat_tokenizer: Any, hf: Any) -> None:
    with pytest.raises(DsparkError, match=r"'some-owner/some-set' cannot be loaded.*give a local file") as caught:
        load_prompts("some-owner/some-set:main", chat_tokenizer("chatml"), split="train")
    assert len(str(caught.value).splitlines()) == 1
