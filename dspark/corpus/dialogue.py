"""Messages -> token ids and loss mask, through the tokenizer's own chat template. The one file that touches a template.

Boundaries are found by rendering, never by patterns over markup: the prompt before an answer, rendered with the
generation prompt, must be a prefix of the conversation rendered up to that answer, which must be a prefix of the whole.
Supervised is what the target itself would write: the answer with its reasoning and tool calls and the token that ends
it. Not supervised: what the template writes around it (headers, an empty think block it inserts, white space after
the end token). mask[t] speaks of ids[t] as a *label*; shifting is the trainer's work.

A template that rewrites history (drops earlier reasoning, ends the last turn differently) is not append-only. Then
``encode`` refuses and ``encode_turns`` gives one row per answer, each as the target saw it when it wrote that answer.

The tokenizer comes in as an argument (a transformers tokenizer, or anything with the methods of ChatTokenizer), so
nothing heavy is imported. Left out on purpose: images, and ``{% generation %}`` marks (stock templates have none).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from dspark.contracts import DsparkError

Message = Mapping[str, Any]
EMPTY_THINK = re.compile(r"\s*<think>\s*</think>\s*")


class ChatTokenizer(Protocol):
    """The part of a transformers tokenizer that is used here."""

    chat_template: Any
    all_special_tokens: list[str]
    added_tokens_decoder: dict[int, Any]

    def __call__(self, text: str, *, add_special_tokens: bool) -> Any: ...
    def apply_chat_template(self, conversation: list[dict[str, Any]], **options: Any) -> Any: ...
    def decode(self, token_ids: list[int], **options: Any) -> Any: ...


class HistoryRewritten(DsparkError):
    """The template is not append-only on this conversation: use ``encode_turns``."""


class Truncated(DsparkError):
    """max_length cut every supervised token away: the row is well-formed but too long."""


class NoChatTemplate(DsparkError):
    """Nothing can be rendered at all: a fault of the tokenizer, not of any row."""


@dataclass(frozen=True, slots=True)
class Dialogue:
    """ids and loss_mask, both of length S. truncated: tokens beyond max_length were cut."""

    ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class _Options:
    tokenizer: ChatTokenizer
    tools: Sequence[Mapping[str, Any]] | None
    max_length: int | None
    complete: bool


def prompt_ids(
    messages: Sequence[Message], tokenizer: ChatTokenizer, tools: Sequence[Mapping[str, Any]] | None = None
) -> tuple[int, ...]:
    """Token ids of the conversation so far, ending with the template's generation prompt.

    Raises DsparkError without a chat template, or when the template refuses the messages (role order, for one).
    """
    return tuple(_tokens(_render(messages, tokenizer, tools, generation=True), tokenizer))


def encode(
    messages: Sequence[Message],
    tokenizer: ChatTokenizer,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    max_length: int | None = None,
    complete: bool = True,
) -> Dialogue:
    """Encode a conversation (canonical messages: corpus/messages.py) with every non-empty answer supervised.

    max_length keeps the first tokens. ``complete=False`` says that the last answer was cut by its token limit: the end
    token that the template adds is left out, for the target never wrote it.
    Raises HistoryRewritten (template not append-only), Truncated, or DsparkError (no supervised token; template refuses
    the messages, changes an answer's text, or leaves out its reasoning or tool calls).
    """
    return _encode(messages, _answers(messages), _Options(tokenizer, tools, max_length, complete))


def encode_turns(
    messages: Sequence[Message],
    tokenizer: ChatTokenizer,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    max_length: int | None = None,
    complete: bool = True,
    on_skip: Callable[[str], object] = lambda reason: None,
) -> list[Dialogue]:
    """``encode`` where the template is append-only (one row), else one row per answer with only that answer supervised.

    A turn that max_length cuts away whole is told to ``on_skip``; when none is left, Truncated. Other errors as encode.
    """
    answers, options = _answers(messages), _Options(tokenizer, tools, max_length, complete)
    try:
        return [_encode(messages, answers, options)]
    except HistoryRewritten:
        return _encode_each(messages, answers, options, on_skip)


def _encode_each(
    messages: Sequence[Message], answers: list[int], options: _Options, on_skip: Callable[[str], object]
) -> list[Dialogue]:
    rows, skipped = [], []
    for answer in answers:
        one = replace(options, complete=options.complete or answer != len(messages) - 1)
        try:
            rows.append(_encode(messages[: answer + 1], [answer], one))
        except Truncated as error:
            skipped.append(f"turn {answer}: {error}")
        except HistoryRewritten:
            raise DsparkError(
                f"expected the rendered answer (turn {answer}) to continue the generation prompt, but the chat "
                "template renders the two differently."
            ) from None
    if not rows:
        raise Truncated(skipped[0])
    for reason in skipped:
        on_skip(reason)
    return rows


def _answers(messages: Sequence[Message]) -> list[int]:
    """Indices of the assistant turns that say something. Raises DsparkError when there is none."""
    turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    said = [i for i in turns if any(_pieces(messages[i])) or messages[i].get("tool_calls")]
    if not said:
        got = f"{len(turns)} empty assistant turns" if turns else "no assistant turn"
        raise DsparkError(f"expected at least one supervised token, but got {got}.")
    return said


def _encode(messages: Sequence[Message], answers: Iterable[int], options: _Options) -> Dialogue:
    full = _render(messages, options.tokenizer, options.tools)
    cuts: list[tuple[int, bool]] = []
    for answer in answers:
        cuts += _cuts(messages, answer, full, options)
    if options.complete or messages[-1]["role"] != "assistant":
        cuts.append((len(full), False))
    ids, mask = _assemble(full, cuts, options.tokenizer)
    if not any(mask):
        raise DsparkError("expected at least one supervised token, but the template renders every answer as nothing.")
    if options.max_length is None or len(ids) <= options.max_length:
        return Dialogue(tuple(ids), tuple(mask))
    kept = mask[: options.max_length]
    if not any(kept):
        raise Truncated(f"every supervised token lies beyond max_length {options.max_length} ({len(ids)} tokens).")
    return Dialogue(tuple(ids[: options.max_length]), tuple(kept), truncated=True)


def _cuts(messages: Sequence[Message], answer: int, full: str, options: _Options) -> list[tuple[int, bool]]:
    """The answer's boundaries in the rendered text: (end, whether the text up to it is supervised), ascending."""
    last = answer == len(messages) - 1
    before = _render(messages[:answer], options.tokenizer, options.tools, generation=True)
    after = full if last else _render(messages[: answer + 1], options.tokenizer, options.tools)
    if not (full.startswith(after) and after.startswith(before)):
        raise HistoryRewritten(
            f"expected an append-only chat template, but it renders turn {answer} differently later. Use encode_turns."
        )
    text = after[len(before) :]
    _check_said(messages[answer], text)
    lead = EMPTY_THINK.match(text)
    start = lead.end() if lead and not any(_pieces(messages[answer])[:2]) else 0
    end_token, tail = _closing(text, options.tokenizer)
    stop = end_token if last and not options.complete else tail
    at = len(before)
    return [(at, False), (at + start, False), (at + max(start, stop), True)]


def _check_said(message: Message, text: str) -> None:
    """Whatever the message says must stand in the rendered answer: a template may not change or drop it silently."""
    for piece in _pieces(message):
        if piece not in text:
            raise DsparkError(f"expected the chat template to keep the answer's text, but it changes {piece[:60]!r}.")
    for call in message.get("tool_calls") or ():
        if call["function"]["name"] not in text:
            raise DsparkError(f"expected the chat template to write tool calls, but it drops {call['function']!r:.80}.")


def _pieces(message: Message) -> tuple[str, str, str]:
    """(reasoning field, think text inside the content, the rest of the content), stripped; "" where there is none."""
    content = message["content"] or ""
    think, mark, rest = content.partition("</think>")
    if not mark:
        think, rest = "", content
    # A think block that the target itself left empty is its own text: any mark of it keeps it supervised.
    inner = think.replace("<think>", "").strip() or ("</think>" if mark else "")
    return ((message.get("reasoning_content") or "").strip(), inner, rest.strip())


def _closing(text: str, tokenizer: ChatTokenizer) -> tuple[int, int]:
    """Where the special tokens that end the answer begin and where they end; len(text) twice when there are none."""
    names = {*tokenizer.all_special_tokens}
    names |= {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    specials = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True) if name)
    found = re.search(rf"((?:{specials})+)\s*$", text) if specials else None
    return found.span(1) if found else (len(text), len(text))


def _assemble(text: str, cuts: Iterable[tuple[int, bool]], tokenizer: ChatTokenizer) -> tuple[list[int], list[bool]]:
    ids: list[int] = []
    mask: list[bool] = []
    start = 0
    for end, supervised in cuts:
        ids = _extend(ids, text, start, end, tokenizer)
        mask += [supervised] * (len(ids) - len(mask))
        start = end
    return ids, mask


def _extend(ids: list[int], text: str, start: int, end: int, tokenizer: ChatTokenizer) -> list[int]:
    """ids of text[:end] that begin with ids (those of text[:start]), so that an answer starts where sampling starts."""
    if start == end:
        return ids
    whole = _tokens(text[:end], tokenizer)
    if whole[: len(ids)] == ids:
        return whole
    # A merge crosses the boundary. Tokenized apart, the text must still be the same text.
    apart = ids + _tokens(text[start:end], tokenizer)
    shown = tokenizer.decode(apart, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if shown != text[:end]:
        raise DsparkError(f"expected a token boundary before {text[start : start + 20]!r}, but it merges.")
    return apart


def _tokens(text: str, tokenizer: ChatTokenizer) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _render(
    messages: Sequence[Message],
    tokenizer: ChatTokenizer,
    tools: Sequence[Mapping[str, Any]] | None,
    generation: bool = False,
) -> str:
    if not getattr(tokenizer, "chat_template", None):
        raise NoChatTemplate("dialogue: expected a tokenizer with a chat template, but it has none. Use a chat model.")
    options: dict[str, Any] = {"tools": [dict(tool) for tool in tools]} if tools else {}
    try:
        text = tokenizer.apply_chat_template(
            [dict(m) for m in messages], tokenize=False, add_generation_prompt=generation, **options
        )
    except Exception as error:  # a template is a program: it raises its own errors and any of Python's
        raise DsparkError(f"the chat template refuses the messages: {type(error).__name__}: {error}.") from error
    for tool in tools or ():
        if str((tool.get("function") or tool).get("name")) not in text:
            raise DsparkError("expected the chat template to list the tools, but it has no place for them.")
    return text
