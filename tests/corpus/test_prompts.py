"""load_prompts: row forms, splits, quarantine, and books that add up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dspark.contracts import DsparkError
from dspark.corpus.dialogue import NoChatTemplate, prompt_ids
from dspark.corpus.prompts import PromptSet, load_prompts

BROKEN = (
    (b'{"prompt": "caf\xe9"}', "not UTF-8: byte 0xe9 at column 16"),
    (b'{"prompt": "cut off', "not JSON"),
    (b'{"prompt": NaN}', "NaN is not a JSON value"),
    (b"[" * 100_000, "not JSON"),
    (b'["a list"]', "expected a JSON object, but got list"),
    (b'{"text": "no known key"}', "expected one of the keys"),
    (b'{"messages": []}', "at least one turn"),
    (b'{"messages": [{"role": "system", "content": "s"}]}', "system turns only"),
    (b'{"messages": [{"role": "assistant", "content": "a"}]}', "'assistant'"),
    (b'{"messages": [{"role": "llama", "content": "a"}]}', "'llama'"),
    (b'{"prompt": "\\ud800"}', "lone surrogate"),
    (b'{"prompt": "  "}', "it is empty"),
    (b'{"prompt": "one"}', "duplicate of line 1"),
)


def books_balance(loaded: PromptSet) -> bool:
    return loaded.rows_read == len(loaded.prompts) + len(loaded.dropped) + loaded.other_split


def texts(loaded: PromptSet) -> list[str]:
    return [prompt.messages[-1]["content"] for prompt in loaded.prompts]


def test_broken_rows_are_quarantined_with_line_and_reason(chat_tokenizer: Any, write_rows: Any, tmp_path: Path) -> None:
    path = write_rows(
        {"prompt": "one", "domain": "math", "id": "m1"}, *(row for row, _ in BROKEN), b"", {"turns": ["two"]}
    )
    quarantine = tmp_path / "out" / "quarantine.jsonl"
    loaded = load_prompts(path, chat_tokenizer("chatml"), quarantine=quarantine)
    assert texts(loaded) == ["one", "two"]
    assert (loaded.prompts[0].domain, loaded.prompts[0].row_id) == ("math", "m1")
    assert loaded.rows_read == 2 + len(BROKEN)  # the blank line is no row
    assert books_balance(loaded)
    kept = [json.loads(line) for line in quarantine.read_text(encoding="utf-8").splitlines()]
    assert [item["line"] for item in kept] == list(range(2, 2 + len(BROKEN)))
    for item, (raw, reason) in zip(kept, BROKEN, strict=True):
        assert reason in item["reason"]
        assert item["file"] == "rows.jsonl"
        assert item["row"] == raw.decode("utf-8", errors="backslashreplace")
    assert [(item["line"], item["reason"]) for item in kept] == loaded.dropped
    assert "2 rows kept of 15" in loaded.summary
    assert "13 dropped" in loaded.summary


def test_a_clean_run_leaves_no_quarantine_file(chat_tokenizer: Any, write_rows: Any, tmp_path: Path) -> None:
    quarantine = tmp_path / "q.jsonl"
    quarantine.write_text("from an older run\n")
    load_prompts(write_rows({"prompt": "one"}), chat_tokenizer("chatml"), quarantine=quarantine)
    assert not quarantine.exists()


@pytest.mark.parametrize("rows", [(), (b'{"prompt": 3}', b"{")])
def test_no_usable_row_is_one_clear_error(chat_tokenizer: Any, write_rows: Any, tmp_path: Path, rows: Any) -> None:
    quarantine = tmp_path / "q.jsonl"
    with pytest.raises(DsparkError, match=r"at least one usable row in .*rows.jsonl"):
        load_prompts(write_rows(*rows), chat_tokenizer("chatml"), quarantine=quarantine)
    written = quarantine.read_text().splitlines() if quarantine.exists() else []
    assert len(written) == len(rows)


def test_role_order_errors_of_the_template_are_caught_per_row(chat_tokenizer: Any, write_rows: Any) -> None:
    user = {"role": "user", "content": "q"}
    path = write_rows({"messages": [user, user]}, {"prompt": "fine"})
    loaded = load_prompts(path, chat_tokenizer("mistral"))
    assert texts(loaded) == ["fine"]
    assert "roles must alternate" in loaded.dropped[0][1]
    assert len(load_prompts(path, chat_tokenizer("chatml")).prompts) == 2


def test_prompt_id_ignores_order_and_extra_fields(chat_tokenizer: Any, write_rows: Any) -> None:
    rows = [{"prompt": f"question {i}", "id": str(i)} for i in range(5)]
    one = load_prompts(write_rows(*rows), chat_tokenizer("chatml"))
    other = load_prompts(write_rows(*({**row, "id": "x"} for row in reversed(rows))), chat_tokenizer("llama3"))
    assert [p.prompt_id for p in one.prompts] == [p.prompt_id for p in reversed(other.prompts)]
    assert len({p.prompt_id for p in one.prompts}) == 5


def test_answers_at_the_end_are_left_out_and_noted(chat_tokenizer: Any, write_rows: Any) -> None:
    talk = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    tokenizer = chat_tokenizer("chatml")
    loaded = load_prompts(write_rows({"conversations": talk}, {"turns": ["one", "two"]}), tokenizer)
    assert loaded.prompts[0].prompt_ids == prompt_ids([{"role": "user", "content": "q"}], tokenizer)
    assert [line for line, _ in loaded.notes] == [1, 2]


def test_max_tokens(chat_tokenizer: Any, write_rows: Any) -> None:
    path = write_rows({"prompt": "short"}, {"prompt": "long " * 50})
    loaded = load_prompts(path, chat_tokenizer("chatml"), max_tokens=60)
    assert texts(loaded) == ["short"]
    assert "at most max_tokens tokens (60)" in loaded.dropped[0][1]


def test_split_field_selects_and_the_rest_is_counted(chat_tokenizer: Any, write_rows: Any) -> None:
    rows = [{"prompt": f"{name} {i}", "split": name} for i in range(3) for name in ("train", "test")]
    path = write_rows(*rows, {"prompt": "stray"})
    loaded = load_prompts(path, chat_tokenizer("chatml"), split="test")
    assert texts(loaded) == ["test 0", "test 1", "test 2"]
    assert (loaded.other_split, len(loaded.dropped)) == (3, 1)
    assert books_balance(loaded)
    with pytest.raises(DsparkError, match="usable row"):
        load_prompts(path, chat_tokenizer("chatml"), split="calibration")


def test_file_without_split_fields_is_not_taken_for_every_split(chat_tokenizer: Any, write_rows: Any) -> None:
    with pytest.raises(DsparkError, match="expected a split field"):
        load_prompts(write_rows({"prompt": "q"}), chat_tokenizer("chatml"), split="train")


def test_directory_of_split_files(chat_tokenizer: Any, write_rows: Any, tmp_path: Path) -> None:
    write_rows({"prompt": "t"}, name="train.jsonl")
    write_rows({"prompt": "c"}, {"prompt": "t"}, name="calibration.jsonl")
    assert texts(load_prompts(tmp_path, chat_tokenizer("chatml"), split="train")) == ["t"]
    both = load_prompts(tmp_path, chat_tokenizer("chatml"))
    assert texts(both) == ["c", "t"]
    assert "duplicate of line 2 of calibration.jsonl" in both.dropped[0][1]


def test_byte_order_mark_and_windows_lines(chat_tokenizer: Any, write_rows: Any) -> None:
    path = write_rows(b'\xef\xbb\xbf{"prompt": "one"}\r', b'{"prompt": "two"}\r')
    assert texts(load_prompts(path, chat_tokenizer("chatml"))) == ["one", "two"]


def test_tokenizer_without_template_is_one_error_not_a_row_each(chat_tokenizer: Any, write_rows: Any) -> None:
    with pytest.raises(NoChatTemplate):
        load_prompts(write_rows({"prompt": "q"}), chat_tokenizer("none"))


@pytest.mark.parametrize("name", ["missing.jsonl", "missing.parquet", "/nowhere/at/all", "./nowhere"])
def test_missing_file_is_not_looked_up_on_the_hub(chat_tokenizer: Any, name: str) -> None:
    with pytest.raises(DsparkError, match="nothing is there"):
        load_prompts(name, chat_tokenizer("chatml"))


def test_unknown_file_type(chat_tokenizer: Any, write_rows: Any) -> None:
    with pytest.raises(DsparkError, match=r"ending in .jsonl"):
        load_prompts(write_rows({"prompt": "q"}, name="rows.csv"), chat_tokenizer("chatml"))
