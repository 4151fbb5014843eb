"""One row of any accepted form -> canonical messages. Pure: no file, no tokenizer.

A canonical message is a dict with ``role`` (system | user | assistant | tool) and ``content`` (str), and where the row
has them ``reasoning_content`` (str), ``tool_calls`` (list, arguments as objects), ``tool_call_id`` and ``name`` (str).
Every refusal is a DsparkError whose text is the reason that ends up in the quarantine file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dspark.contracts import DsparkError
from dspark.files import sha256_json

ROLE_ALIASES: Mapping[str, str] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
"""Role names seen in public data -> the four roles. Anything else (a model's own name, say) is refused by name unless
the caller maps it: a silently dropped role once cost 1.4 million rows (vllm-project/speculators#907)."""

ROW_FORMS = ("messages", "conversations", "turns", "prompt")
"""Keys that may hold the conversation, in the order they are looked for."""

DEFAULT_DOMAIN = "default"


@dataclass(frozen=True, slots=True)
class Conversation:
    """One usable row. ``finish_reason`` is "length" when the last answer was cut by its token limit, else None or
    "stop"; ``note`` says in words what of the row was left aside ("" = nothing)."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] | None = None
    domain: str = DEFAULT_DOMAIN
    row_id: str = ""
    finish_reason: str | None = None
    note: str = ""


def content_id(messages: tuple[dict[str, Any], ...], tools: tuple[dict[str, Any], ...] | None = None) -> str:
    """16 hex digits naming the content: SHA-256 over the canonical messages (and tools, when there are any).

    Raises DsparkError when tool calls or tools hold something that JSON cannot.
    """
    record: dict[str, Any] = {"messages": list(messages)}
    if tools:
        record["tools"] = list(tools)
    try:
        return sha256_json(record)[:16]
    except (TypeError, ValueError) as error:  # a date from a columnar file, an infinity, a lone surrogate
        raise DsparkError(f"expected messages and tools to hold plain JSON values, but got {error}.") from None


def read_conversation(row: Mapping[str, Any], role_aliases: Mapping[str, str] | None = None) -> Conversation:
    """Read one row of any form in ``ROW_FORMS``. ``role_aliases`` adds names to ROLE_ALIASES.

    Raises DsparkError on a row that cannot be understood, is empty, holds text that is not Unicode, or whose first
    turn after the system turns is not the user's.
    """
    form = next((key for key in ROW_FORMS if row.get(key) is not None), None)
    if form is None:
        raise DsparkError(f"expected one of the keys {', '.join(ROW_FORMS)}, but got {sorted(map(str, row))}.")
    aliases = {**ROLE_ALIASES, **(role_aliases or {})}
    messages, note = _read_turns(row[form], form, aliases)
    _check_opening(messages)
    return Conversation(
        messages=messages,
        tools=_tools(row.get("tools")),
        domain=_text_field(row, "domain") or DEFAULT_DOMAIN,
        row_id=_text_field(row, "id"),
        finish_reason=_text_field(row, "finish_reason") or None,
        note=note,
    )


def _read_turns(value: Any, form: str, aliases: Mapping[str, str]) -> tuple[tuple[dict[str, Any], ...], str]:
    if form == "prompt" and isinstance(value, str):
        value = [value]
    if not isinstance(value, list | tuple) or not value:
        raise DsparkError(f"expected {form} to hold at least one turn, but got {_show(value)}.")
    if all(isinstance(turn, str) for turn in value):
        note = f"used the first of {len(value)} user turns: the others need an answer" if len(value) > 1 else ""
        return (_message({"role": "user", "content": value[0]}, aliases),), note
    return tuple(_message(turn, aliases) for turn in value), ""


def _check_opening(messages: tuple[dict[str, Any], ...]) -> None:
    first = next((m["role"] for m in messages if m["role"] != "system"), None)
    if first is None:
        raise DsparkError("expected a user turn, but got system turns only.")
    if first != "user":
        raise DsparkError(f"expected the first turn after the system turn to be the user's, but got role {first!r}.")


def _message(turn: Any, aliases: Mapping[str, str]) -> dict[str, Any]:
    if not isinstance(turn, Mapping):
        raise DsparkError(f"expected a turn to be an object with role and content, but got {_show(turn)}.")
    said = turn.get("role") if turn.get("role") is not None else turn.get("from")
    if not isinstance(said, str) or said not in aliases:
        raise DsparkError(f"expected role to be one of {', '.join(sorted(aliases))}, but got {_show(said)}.")
    message: dict[str, Any] = {"role": aliases[said]}
    # Columnar files fill absent keys with null, so null is read as absent throughout.
    calls = _tool_calls(turn.get("tool_calls"))
    reasoning = turn.get("reasoning_content") if turn.get("reasoning_content") is not None else turn.get("reasoning")
    content = turn.get("content") if turn.get("content") is not None else turn.get("value")
    if content is None and (calls or reasoning):
        content = ""
    message["content"] = _text(content, f"the content of role {message['role']}")
    if reasoning:
        message["reasoning_content"] = _text(reasoning, "reasoning_content")
    if calls:
        message["tool_calls"] = calls
    for key in ("tool_call_id", "name"):
        if turn.get(key) is not None:
            message[key] = _text(turn[key], key)
    return message


def _text(value: Any, what: str) -> str:
    if isinstance(value, list):
        value = "".join(_part(part, what) for part in value)
    if not isinstance(value, str):
        raise DsparkError(f"expected {what} to be text, but got {_show(value)}.")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise DsparkError(f"expected {what} to be valid Unicode, but got a lone surrogate.") from None
    return value


def _part(part: Any, what: str) -> str:
    if isinstance(part, Mapping) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    raise DsparkError(f"expected {what} to hold text parts only, but got {_show(part)}.")


def parse_json(text: str) -> Any:
    """``json.loads`` without its extension: NaN and infinities are not JSON. Raises ValueError or RecursionError."""

    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is not a JSON value")

    return json.loads(text, parse_constant=refuse)


def _json_once(value: Any, what: str) -> Any:
    """Decode text exactly once: a native value passes through, and text inside text is not decoded again."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except (ValueError, RecursionError) as error:
        raise DsparkError(f"expected {what} to be JSON, but it does not parse: {error}.") from None


def _objects(value: Any, what: str) -> list[dict[str, Any]]:
    value = _json_once(value, what)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        raise DsparkError(f"expected {what} to be a list of objects, but got {_show(value)}.")
    return [dict(item) for item in value]


def _tools(value: Any) -> tuple[dict[str, Any], ...] | None:
    return tuple(_objects(value, "tools")) or None


def _tool_calls(value: Any) -> list[dict[str, Any]]:
    return [_tool_call(call) for call in _objects(value, "tool_calls")]


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call if call.get("function") is None else call["function"]
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise DsparkError(f"expected every tool call to name its function, but got {_show(call)}.")
    arguments = _json_once(function.get("arguments"), f"the arguments of tool call {name!r}")
    if not isinstance(arguments, Mapping | None):
        raise DsparkError(f"expected the arguments of tool call {name!r} to be an object, but got {_show(arguments)}.")
    clean = {"type": "function", "function": {"name": name, "arguments": dict(arguments or {})}}
    return {**clean, "id": call["id"]} if isinstance(call.get("id"), str) else clean


def _text_field(row: Mapping[str, Any], key: str) -> str:
    value = row.get(key)
    if value is None:
        return ""
    if key == "id" and isinstance(value, int):
        return str(value)
    return _text(value, key)


def _show(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."
