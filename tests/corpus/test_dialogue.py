"""Ids and loss masks against the text they decode to, for the structures of the stock chat templates."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

import dspark.corpus
from dspark.contracts import DsparkError
from dspark.corpus.dialogue import (
    Dialogue,
    HistoryRewritten,
    NoChatTemplate,
    Truncated,
    encode,
    encode_turns,
    prompt_ids,
)

TALK = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello there"},
    {"role": "user", "content": "And?"},
    {"role": "assistant", "content": "That is all"},
]
QWEN_CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def pieces(dialogue: Dialogue, tokenizer: Any) -> list[tuple[bool, str]]:
    """The row as (supervised, text) runs: the mask in readable form."""
    runs: list[tuple[bool, list[int]]] = []
    for token, flag in zip(dialogue.ids, dialogue.loss_mask, strict=True):
        if not runs or runs[-1][0] != flag:
            runs.append((flag, []))
        runs[-1][1].append(token)
    return [(flag, tokenizer.decode(ids)) for flag, ids in runs]


def supervised(dialogue: Dialogue, tokenizer: Any) -> list[str]:
    return [text for flag, text in pieces(dialogue, tokenizer) if flag]


@pytest.mark.parametrize(
    ("name", "end"),
    [("chatml", "<|im_end|>"), ("default_system", "<|im_end|>"), ("llama3", "<|eot|>"), ("mistral", "</s>")],
)
def test_append_only_templates_supervise_answers_and_their_end(chat_tokenizer: Any, name: str, end: str) -> None:
    tokenizer = chat_tokenizer(name)
    space = " " if name == "mistral" else ""
    row = encode(TALK, tokenizer)
    assert supervised(row, tokenizer) == [f"{space}Hello there{end}", f"{space}That is all{end}"]
    assert tokenizer.decode(row.ids) == tokenizer.apply_chat_template(TALK, tokenize=False)
    assert encode_turns(TALK, tokenizer) == [row]


@pytest.mark.parametrize("name", ["chatml", "default_system", "llama3", "mistral", "qwen3"])
def test_each_answer_starts_exactly_where_sampling_starts(chat_tokenizer: Any, name: str) -> None:
    tokenizer = chat_tokenizer(name)
    row = encode_turns(TALK[:2], tokenizer)[0]
    prompt = prompt_ids(TALK[:1], tokenizer)
    assert row.ids[: len(prompt)] == prompt
    assert not any(row.loss_mask[: len(prompt)])


def test_prompt_ids_equal_the_tokenizers_own(chat_tokenizer: Any) -> None:
    tokenizer = chat_tokenizer("llama3")
    theirs = tokenizer.apply_chat_template(TALK[:3], add_generation_prompt=True, return_dict=False)
    assert list(prompt_ids(TALK[:3], tokenizer)) == theirs


def test_system_turn_replaces_the_default_one(chat_tokenizer: Any) -> None:
    tokenizer = chat_tokenizer("default_system")
    own = [{"role": "system", "content": "Be brief."}, *TALK]
    assert "You are kind." in tokenizer.decode(prompt_ids(TALK[:1], tokenizer))
    assert "You are kind." not in tokenizer.decode(encode(own, tokenizer).ids)


def test_qwen3_inserted_empty_think_is_not_supervised(chat_tokenizer: Any) -> None:
    tokenizer = chat_tokenizer("qwen3")
    assert pieces(encode(TALK[:2], tokenizer), tokenizer) == [
        (False, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"),
        (True, "Hello there<|im_end|>"),
        (False, "\n"),
    ]


@pytest.mark.parametrize(
    "answer",
    [
        {"content": "Hello", "reasoning_content": "Greet them."},
        {"content": "<think>\nGreet them.\n</think>\n\nHello"},
    ],
)
def test_qwen3_reasoning_is_supervised(chat_tokenizer: Any, answer: dict[str, str]) -> None:
    tokenizer = chat_tokenizer("qwen3")
    row = encode([TALK[0], {"role": "assistant", **answer}], tokenizer)
    assert supervised(row, tokenizer) == ["<think>\nGreet them.\n</think>\n\nHello<|im_end|>"]


def test_qwen3_empty_think_that_the_target_wrote_is_supervised(chat_tokenizer: Any) -> None:
    tokenizer = chat_tokenizer("qwen3")
    row = encode([TALK[0], {"role": "assistant", "content": "<think>\n\n</think>\n\nHello"}], tokenizer)
    assert supervised(row, tokenizer) == ["<think>\n\n</think>\n\nHello<|im_end|>"]


def test_rewritten_history_gives_one_row_per_turn(chat_tokenizer: Any) -> None:
    tokenizer = chat_tokenizer("qwen3")
    talk = [TALK[0], {**TALK[1], "reasoning_content": "Greet."}, TALK[2], {**TALK[3], "reasoning_content": "End."}]
    with pytest.raises(HistoryRewritten, match="encode_turns"):
        encode(talk, tokenizer)
    first, second = encode_turns(talk, tokenizer)
    assert supervised(first, tokenizer) == ["<think>\nGreet.\n</think>\n\nHello there<|im_end|>"]
    assert supervised(second, tokenizer) == ["<think>\nEnd.\n</think>\n\nThat is all<|im_end|>"]
    assert "Greet." not in tokenizer.decode(second.ids)
    prompt = prompt_ids(talk[:3], tokenizer)
    assert second.ids[: len(prompt)] == prompt


def test_replaced_end_token_gives_one_row_per_turn(chat_tokenizer: Any) -> None:
    tokenizer = chat_tokenizer("other_end")
    rows = encode_turns(TALK, tokenizer)
    assert [supervised(row, tokenizer) for row in rows] == [["Hello there<|eot|>"], ["That is all<|eot|>"]]


def test_answer_that_does_not_continue_its_prompt_is_refused(chat_tokenizer: Any) -> None:
    with pytest.raises(DsparkError, match="continue the generation prompt"):
        encode_turns(TALK, chat_tokenizer("think_prompt"))


def test_generation_prompt_that_opens_the_think_block(chat_tokenizer: Any) -> None:
    """The target writes from inside the block, so supervision starts there."""
    tokenizer = chat_tokenizer("think_prompt")
    row = encode([TALK[0], {"role": "assistant", "content": "<think>\nGreet.\n</think>\n\nHello"}], tokenizer)
    assert supervised(row, tokenizer) == ["Greet.\n</think>\n\nHello<|im_end|>"]


@pytest.mark.parametrize(
    ("answer", "name", "reason"),
    [
        ({"content": "Hello"}, "upper", "changes 'Hello'"),
        ({"content": "Hello", "reasoning_content": "Greet."}, "chatml", "changes 'Greet.'"),
        ({"content": "", "tool_calls": [QWEN_CALL]}, "chatml", "drops.*add"),
    ],
)
def test_template_that_drops_or_changes_what_was_said(
    chat_tokenizer: Any, answer: dict[str, Any], name: str, reason: str
) -> None:
    with pytest.raises(DsparkError, match=reason):
        encode_turns([TALK[0], {"role": "assistant", **answer}], chat_tokenizer(name))


def test_tool_calls_and_tool_turns(chat_tokenizer: Any) -> None:
    tokenizer = chat_tokenizer("qwen3")
    talk = [
        TALK[0],
        {"role": "assistant", "content": "", "tool_calls": [QWEN_CALL], "reasoning_content": "Add."},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "Two", "reasoning_content": "Say it."},
    ]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    row = encode(talk, tokenizer, tools=tools)
    assert supervised(row, tokenizer) == [
        '<think>\nAdd.\n</think>\n\n<tool_call>add {"a": 1}</tool_call><|im_end|>',
        "<think>\nSay it.\n</think>\n\nTwo<|im_end|>",
    ]
    with pytest.raises(DsparkError, match="no place for them"):
        prompt_ids(talk[:1], chat_tokenizer("chatml"), tools)


def test_empty_answers_are_not_supervised_and_alone_are_refused(chat_tokenizer: Any) -> None:
    tokenizer = chat_tokenizer("chatml")
    empty = [TALK[0], {"role": "assistant", "content": " \n"}]
    with pytest.raises(DsparkError, match="1 empty assistant turns"):
        encode(empty, tokenizer)
    with pytest.raises(DsparkError, match="no assistant turn"):
        encode(TALK[:1], tokenizer)
    assert supervised(encode([*empty, *TALK[2:]], tokenizer), tokenizer) == ["That is all<|im_end|>"]


@pytest.mark.parametrize("length", [1, 4, 5, 6])
def test_answers_of_a_token_a_block_less_one_a_block_and_more(chat_tokenizer: Any, length: int) -> None:
    row = encode([TALK[0], {"role": "assistant", "content": "x" * length}], chat_tokenizer("chatml"))
    assert sum(row.loss_mask) == length + 1  # and the end token


def test_max_length(chat_tokenizer: Any) -> None:
    tokenizer = chat_tokenizer("chatml")
    whole = encode(TALK[:2], tokenizer)
    start = len(prompt_ids(TALK[:1], tokenizer))
    cut = encode(TALK[:2], tokenizer, max_length=start + 1)
    assert (cut.ids, sum(cut.loss_mask), cut.truncated) == (whole.ids[: start + 1], 1, True)
    assert not encode(TALK[:2], tokenizer, max_length=len(whole.ids)).truncated
    for length in (start, 1):
        with pytest.raises(Truncated, match=f"beyond max_length {length}"):
            encode(TALK[:2], tokenizer, max_length=length)


def test_turns_cut_away_are_reported(chat_tokenizer: Any) -> None:
    tokenizer = chat_tokenizer("other_end")
    skipped: list[str] = []
    length = len(prompt_ids(TALK[:1], tokenizer)) + 4
    rows = encode_turns(TALK, tokenizer, max_length=length, on_skip=skipped.append)
    assert [supervised(row, tokenizer) for row in rows] == [["Hell"]]
    assert len(skipped) == 1
    assert "turn 3" in skipped[0]


@pytest.mark.parametrize("name", ["chatml", "llama3", "mistral", "qwen3", "other_end"])
def test_cut_answer_teaches_no_end_token(chat_tokenizer: Any, name: str) -> None:
    tokenizer = chat_tokenizer(name)
    row = encode_turns(TALK, tokenizer, complete=False)[-1]
    assert supervised(row, tokenizer)[-1].strip() == "That is all"
    assert row.loss_mask[-1]


def test_merge_across_the_boundary_keeps_the_prompts_tokens(chat_tokenizer: Any) -> None:
    """The prompt ends in a newline and the answer begins with one; the vocabulary has a token for two newlines."""
    tokenizer = chat_tokenizer("chatml")
    talk = [TALK[0], {"role": "assistant", "content": "\nHello"}]
    prompt, row = prompt_ids(TALK[:1], tokenizer), encode(talk, tokenizer)
    assert tokenizer(tokenizer.decode(row.ids), add_special_tokens=False)["input_ids"] != list(row.ids)
    assert row.ids[: len(prompt)] == prompt
    assert supervised(row, tokenizer) == ["\nHello<|im_end|>"]
    assert tokenizer.decode(row.ids) == tokenizer.apply_chat_template(talk, tokenize=False)


def test_two_user_turns_in_a_row_are_the_templates_business(chat_tokenizer: Any) -> None:
    talk = [TALK[0], TALK[2], TALK[3]]
    assert supervised(encode(talk, chat_tokenizer("chatml")), chat_tokenizer("chatml")) == ["That is all<|im_end|>"]
    with pytest.raises(DsparkError, match=r"refuses the messages.*roles must alternate"):
        encode(talk, chat_tokenizer("mistral"))
    with pytest.raises(DsparkError, match=r"refuses the messages.*roles must alternate"):
        prompt_ids(talk[:2], chat_tokenizer("mistral"))


def test_tokenizer_without_a_template(chat_tokenizer: Any) -> None:
    with pytest.raises(NoChatTemplate, match="chat template"):
        prompt_ids(TALK[:1], chat_tokenizer("none"))


def test_heavy_packages_are_imported_where_used_only() -> None:
    """Reading JSONL must not wait for pyarrow or datasets; transformers is not imported at all."""
    for path in Path(dspark.corpus.__file__).parent.glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        top = {alias.name.split(".")[0] for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
        top |= {(node.module or "").split(".")[0] for node in tree.body if isinstance(node, ast.ImportFrom)}
        assert top & {"transformers", "datasets", "pyarrow", "torch"} == set(), path.name
        assert "import transformers" not in path.read_text(encoding="utf-8")
