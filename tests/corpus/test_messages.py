"""Row forms, roles, null content and tool calls, without a tokenizer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dspark.contracts import DsparkError
from dspark.corpus.messages import content_id, read_conversation

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def roles(row: dict[str, Any], **options: Any) -> list[str]:
    return [m["role"] for m in read_conversation(row, **options).messages]


def with_answer(**answer: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", **answer}]}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "q"},
        {"turns": ["q"]},
        {"messages": [{"role": "user", "content": "q"}]},
        {"prompt": [{"role": "user", "content": "q"}]},
        {"conversations": [{"from": "human", "value": "q"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}]},
        {"messages": None, "prompt": "q", "tools": None, "domain": None, "id": None},
        {"messages": [{"role": "user", "content": "q", "tool_calls": None, "name": None}]},
    ],
)
def test_every_form_of_the_same_question_has_the_same_content_id(row: dict[str, Any]) -> None:
    read = read_conversation(row)
    assert read.messages == ({"role": "user", "content": "q"},)
    assert content_id(read.messages) == content_id(({"content": "q", "role": "user"},))


def test_content_id_depends_on_content_and_tools_only() -> None:
    user = ({"role": "user", "content": "q"},)
    names = {content_id(user), content_id(({"role": "user", "content": "Q"},)), content_id(user, ({"name": "t"},))}
    assert len(names) == 3
    assert all(len(name) == 16 for name in names)
    assert content_id(user) == read_id({"prompt": "q", "id": 7, "domain": "math", "split": "train"})


def read_id(row: dict[str, Any]) -> str:
    return content_id(read_conversation(row).messages)


def test_list_of_user_turns_keeps_the_first_and_says_so() -> None:
    read = read_conversation({"turns": ["one", "two"]})
    assert [m["content"] for m in read.messages] == ["one"]
    assert "first of 2 user turns" in read.note


def test_role_aliases() -> None:
    said = ["system", "human", "gpt", "observation", "model", "user", "assistant", "tool"]
    row = {"conversations": [{"from": name, "value": "x"} for name in said]}
    assert roles(row) == ["system", "user", "assistant", "tool", "assistant", "user", "assistant", "tool"]


def test_the_models_own_name_is_refused_by_name_or_mapped() -> None:
    row = {"conversations": [{"from": "human", "value": "q"}, {"from": "our-model-4b", "value": "a"}]}
    with pytest.raises(DsparkError, match="our-model-4b"):
        read_conversation(row)
    assert roles(row, role_aliases={"our-model-4b": "assistant"}) == ["user", "assistant"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": []}, "at least one turn"),
        ({"turns": []}, "at least one turn"),
        ({"messages": "hello"}, "at least one turn"),
        ({"messages": [{"role": "system", "content": "s"}]}, "system turns only"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "'assistant'"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "'tool'"),
        ({"question": "q", "answer": "a"}, r"messages, conversations, turns, prompt.*\['answer', 'question'\]"),
        ({}, "but got"),
        ({"messages": ["q", {"role": "user", "content": "q"}]}, "object with role and content"),
        ({"messages": [{"content": "q"}]}, "role to be one of"),
        ({"messages": [{"role": ["user"], "content": "q"}]}, "role to be one of"),
        ({"messages": [{"role": "user"}]}, "content of role user.*None"),
        ({"messages": [{"role": "user", "content": 5}]}, "content of role user.*5"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "text parts only"),
        ({"prompt": "bad \ud800"}, "lone surrogate"),
        ({"prompt": "q", "domain": 3}, "domain"),
        ({"prompt": "q", "tools": "{"}, "tools to be JSON"),
    ],
)
def test_refused_rows_say_why(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(DsparkError, match=reason):
        read_conversation(row)


def test_null_content_with_tool_calls_native_string_and_arguments_as_string() -> None:
    spelled = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    flat = {"name": "add", "arguments": {"a": 1}}
    for calls in ([CALL], json.dumps([CALL]), [spelled], json.dumps([spelled]), [flat]):
        answer = read_conversation(with_answer(content=None, tool_calls=calls)).messages[1]
        assert answer == {"role": "assistant", "content": "", "tool_calls": [CALL]}


@pytest.mark.parametrize(
    ("calls", "reason"),
    [
        ('[{"name": "add"', "tool_calls to be JSON"),
        (json.dumps(json.dumps([CALL])), "list of objects"),  # encoded twice: not decoded twice
        ('{"name": "add"}', "list of objects"),
        ([{"function": {"arguments": {}}}], "name its function"),
        ([{"name": "add", "arguments": "{a: 1}"}], "arguments of tool call 'add' to be JSON"),
        ([{"name": "add", "arguments": [1]}], "to be an object"),
        ([{"name": "add", "arguments": '{"a": NaN}'}], "NaN is not a JSON value"),
    ],
)
def test_broken_tool_calls_say_why(calls: Any, reason: str) -> None:
    with pytest.raises(DsparkError, match=reason):
        read_conversation(with_answer(content=None, tool_calls=calls))


def test_null_content_without_tool_calls_is_refused() -> None:
    for calls in (None, [], "[]"):
        with pytest.raises(DsparkError, match="content of role assistant"):
            read_conversation(with_answer(content=None, tool_calls=calls))


def test_values_that_json_cannot_hold_are_a_reason_not_a_crash() -> None:
    row = with_answer(content="x", tool_calls=[{"name": "f", "arguments": {"a": float("inf")}}])
    with pytest.raises(DsparkError, match="plain JSON values"):
        content_id(read_conversation(row).messages)
