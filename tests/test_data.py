"""The shipped prompts: made by data/make_prompts.py byte for byte, disjoint splits, the same kinds everywhere."""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dspark.contracts import DsparkError
from dspark.corpus.messages import content_id, read_conversation

DATA = Path(__file__).parents[1] / "data"
SIZES = {"train": 300, "calibration": 60, "test": 120}
EXTRA = 1360
DOMAINS = ("math", "code", "chat")


@pytest.fixture(scope="module")
def maker() -> Any:
    spec = importlib.util.spec_from_file_location("make_prompts", DATA / "make_prompts.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def rows() -> dict[str, list[dict[str, Any]]]:
    files = {split: (DATA / "prompts" / f"{split}.jsonl").read_text(encoding="utf-8") for split in SIZES}
    return {split: [json.loads(line) for line in text.splitlines()] for split, text in files.items()}


def test_committed_files_are_what_the_script_makes(maker: Any, tmp_path: Path) -> None:
    assert maker.write_prompts(tmp_path) == {**SIZES, "extra": EXTRA}
    for split in (*SIZES, "extra"):
        assert (tmp_path / f"{split}.jsonl").read_bytes() == (DATA / "prompts" / f"{split}.jsonl").read_bytes()


def test_every_split_asks_every_kind_at_the_same_rate(rows: dict[str, list[dict[str, Any]]]) -> None:
    for split, size in SIZES.items():
        assert Counter(row["domain"] for row in rows[split]) == dict.fromkeys(DOMAINS, size // 3)
        kinds = Counter((row["domain"], row["kind"]) for row in rows[split])
        assert set(kinds.values()) == {size // 60}
        assert len(kinds) == 60
        assert {row["split"] for row in rows[split]} == {split}


def test_no_prompt_and_no_question_in_two_splits(rows: dict[str, list[dict[str, Any]]]) -> None:
    flat = [row for split in SIZES for row in rows[split]]
    hashes = {content_id(read_conversation(row).messages) for row in flat}
    questions = {next(m["content"] for m in row["messages"] if m["role"] == "user").casefold() for row in flat}
    assert len(hashes) == len(questions) == len({row["id"] for row in flat}) == len(flat) == 480


def test_extra_prompts_ask_nothing_that_another_split_asks(maker: Any, rows: dict[str, list[dict[str, Any]]]) -> None:
    """Only values of train variants: no slot value that calibration or test alone may use."""
    extra = [json.loads(line) for line in (DATA / "prompts" / "extra.jsonl").read_text(encoding="utf-8").splitlines()]
    questions = {maker._question(row) for row in extra}
    assert len(questions) == len({row["id"] for row in extra}) == len(extra) == EXTRA
    assert not questions & {maker._question(row) for split in SIZES for row in rows[split]}
    train = {(r["domain"], r["kind"], r["id"].rsplit("-", 1)[1]) for r in rows["train"]}
    for row in extra:
        chosen = row["id"].rsplit("-", 2)[1]
        assert all((row["domain"], row["kind"], variant) in train for variant in chosen)
        assert row["split"] == "extra"
    assert max(Counter((row["domain"], row["kind"]) for row in extra).values()) == maker.EXTRA_PER_KIND


def test_no_filled_content_in_two_splits(maker: Any) -> None:
    """Two variants of a kind never share all their slots, so splits do not differ by wording alone."""
    import tomllib

    for domain in DOMAINS:
        for kind in tomllib.loads((DATA / "templates" / f"{domain}.toml").read_text(encoding="utf-8"))["kind"]:
            slots = [values for key, values in kind.items() if key not in maker.FIXED_KEYS]
            assert len(set(zip(*slots, strict=True))) == 8, kind["name"]


def test_rows_follow_the_schema(rows: dict[str, list[dict[str, Any]]]) -> None:
    flat = [row for split in SIZES for row in rows[split]]
    for row in flat:
        assert sorted(row) == ["domain", "id", "kind", "messages", "split"]
        roles = [m["role"] for m in row["messages"]]
        assert roles[-1] == "user"
        assert roles[roles[0] == "system" :] in (["user"], ["user", "assistant", "user"])
        assert all(m["content"].strip() == m["content"] != "" and "{" not in m["content"][:1] for m in row["messages"])
    readme = (DATA / "README.md").read_text(encoding="utf-8")
    systems = sum(row["messages"][0]["role"] == "system" for row in flat)
    talks = sum(any(m["role"] == "assistant" for m in row["messages"]) for row in flat)
    assert f"{systems} prompts have a system turn and {talks} an earlier exchange" in readme


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ('name = "k"\nsay = ["{x}"]\nx = ["only one"]', "expected 8 values in math/k.x, but got 1"),
        (f'name = "k"\nsay = ["{{x}}"]\nx = {["same"] * 8}', "repeats math-k-0"),
    ],
)
def test_templates_that_cannot_be_filled(maker: Any, tmp_path: Path, kind: str, reason: str) -> None:
    for domain in DOMAINS:
        (tmp_path / f"{domain}.toml").write_text(f"[[kind]]\n{kind}\n")
    with pytest.raises(DsparkError, match=reason):
        maker.make_rows(tmp_path)
