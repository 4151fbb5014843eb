"""load_dialogues: every conversation is kept or dropped with a reason, and a cut answer teaches no end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dspark.contracts import DsparkError
from dspark.corpus.conversations import DialogueSet, load_dialogues
from dspark.corpus.dialogue import encode

CALL = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]


def talk(question: str, **answer: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", **answer}], "domain": "chat"}


def reasons(loaded: DialogueSet) -> dict[int, str]:
    return dict(loaded.dropped)


def test_rows_in_equal_rows_out_plus_itemised_drops(chat_tokenizer: Any, write_rows: Any, tmp_path: Path) -> None:
    path = write_rows(
        talk("1", content="fine"),
        talk("2", content=""),
        talk("3", content=None, tool_calls=CALL),
        talk("3", content=None, tool_calls=json.dumps(CALL)),
        talk("5", content=None, tool_calls="[{broken"),
        talk("6", content="x" * 500),
        {"prompt": "a question alone"},
        talk("1", content="fine"),
        b"{",
        {"conversations": [{"from": "human", "value": "q"}, {"from": "robot", "value": "a"}]},
    )
    quarantine = tmp_path / "q.jsonl"
    loaded = load_dialogues(path, chat_tokenizer("qwen3"), quarantine=quarantine, max_length=120)
    assert [e.dialogue_id for e in loaded.examples] == list(dict.fromkeys(e.dialogue_id for e in loaded.examples))
    assert (loaded.rows_read, loaded.conversations) == (10, 3)
    assert loaded.rows_read == loaded.conversations + len(loaded.dropped) + loaded.other_split
    assert sorted(reasons(loaded)) == [2, 4, 5, 7, 8, 9, 10]
    assert "empty assistant" in reasons(loaded)[2]
    assert "duplicate of line" in reasons(loaded)[4]  # the same calls, spelled as text
    assert "tool_calls to be JSON" in reasons(loaded)[5]
    assert "no assistant turn" in reasons(loaded)[7]
    assert len(quarantine.read_text().splitlines()) == 7
    assert (loaded.truncated, loaded.supervised) == (1, sum(sum(e.dialogue.loss_mask) for e in loaded.examples))
    assert "1 truncated" in loaded.summary


def test_answer_wholly_cut_by_max_length_is_its_own_reason(chat_tokenizer: Any, write_rows: Any) -> None:
    path = write_rows(talk("x" * 200, content="answer"), talk("q", content="answer"))
    loaded = load_dialogues(path, chat_tokenizer("chatml"), max_length=60)
    assert "beyond max_length 60" in reasons(loaded)[1]
    assert loaded.conversations == 1


def test_finish_reason_length_teaches_no_end(chat_tokenizer: Any, write_rows: Any) -> None:
    cut = {**talk("q", content="half an ans"), "finish_reason": "length"}
    tokenizer = chat_tokenizer("chatml")
    loaded = load_dialogues(write_rows(cut), tokenizer)
    assert loaded.examples[0].dialogue == encode(cut["messages"], tokenizer, complete=False)
    assert tokenizer.decode(loaded.examples[0].dialogue.ids).endswith("half an ans")


def test_rewriting_template_gives_numbered_turns(chat_tokenizer: Any, write_rows: Any) -> None:
    both = talk("q", content="one")["messages"] + talk("r", content="two")["messages"]
    loaded = load_dialogues(write_rows({"messages": both}), chat_tokenizer("qwen3"))
    assert loaded.conversations == 1
    assert [example.turn for example in loaded.examples] == [0, 1]


def test_all_zero_masks_never_pass(chat_tokenizer: Any, write_rows: Any) -> None:
    with pytest.raises(DsparkError, match=r"2 of 2 rows were dropped.*supervised token"):
        load_dialogues(write_rows(talk("q", content=""), talk("r", content=" ")), chat_tokenizer("llama3"))
