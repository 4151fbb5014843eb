"""A source of rows -> the prompts the target is asked. Broken rows are dropped with a reason, never silently.

Left out on purpose: shuffling and subsampling (the caller's choice, by prompt_id), and answers already in the rows: a
trailing assistant turn is removed, for the target writes its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.contracts import DsparkError
from dspark.corpus import dialogue
from dspark.corpus.ledger import Ledger, open_rows
from dspark.corpus.messages import Conversation, content_id, read_conversation
from dspark.files import sha256_json


@dataclass(frozen=True, slots=True)
class Prompt:
    """prompt_id: 16 hex digits of the content's SHA-256, so the same question has the same id in any file and order.
    prompt_ids: token ids, generation prompt included. row_id: the row's own ``id`` field, "" without one."""

    prompt_id: str
    domain: str
    messages: tuple[dict[str, Any], ...]
    prompt_ids: tuple[int, ...]
    row_id: str = ""


@dataclass(frozen=True, slots=True)
class PromptSet:
    """prompts in file order; dropped and notes as (line, reason); rows_read == len(prompts) + len(dropped) +
    other_split. summary: the same in one line, for the user."""

    prompts: list[Prompt]
    dropped: list[tuple[int, str]]
    notes: list[tuple[int, str]]
    rows_read: int
    other_split: int
    summary: str


def load_prompts(
    source: str | Path,
    tokenizer: dialogue.ChatTokenizer,
    split: str | None = None,
    quarantine: Path | None = None,
    *,
    max_tokens: int | None = None,
    role_aliases: Mapping[str, str] | None = None,
) -> PromptSet:
    """Load prompts from a JSONL or Parquet file, a directory, or a Hugging Face dataset (corpus/sources.py).

    split keeps the rows of that split (ledger.open_rows says how it is found). quarantine is a JSONL file that receives
    every dropped row with its line and reason. Prompts longer than max_tokens are dropped; role_aliases adds roles.
    Raises DsparkError when the source cannot be opened, no usable row is left, or the tokenizer has no chat template.
    """
    ledger, prompts = Ledger(str(source)), []
    for row, value in open_rows(source, split, ledger):
        try:
            prompt, note = _read_prompt(value, tokenizer, max_tokens, role_aliases)
        except dialogue.NoChatTemplate:
            raise
        except DsparkError as error:
            ledger.drop(row, str(error))
            continue
        if ledger.keep(row, prompt.prompt_id):
            prompts.append(prompt)
            if note:
                ledger.notes.append((row.line, note))
    ledger.close(quarantine)
    return PromptSet(prompts, ledger.dropped, ledger.notes, ledger.rows_read, ledger.other_split, ledger.summary())


def prompts_hash(prompts: Sequence[Prompt]) -> str:
    """sha256 hex over ids, domains and token ids, in order: two runs asked the same iff it is the same."""
    return sha256_json([[p.prompt_id, p.domain, list(p.prompt_ids)] for p in prompts])


def _read_prompt(
    row: Mapping[str, Any],
    tokenizer: dialogue.ChatTokenizer,
    max_tokens: int | None,
    role_aliases: Mapping[str, str] | None,
) -> tuple[Prompt, str]:
    conversation = read_conversation(row, role_aliases)
    messages, note = _question(conversation)
    ids = dialogue.prompt_ids(messages, tokenizer, conversation.tools)
    if max_tokens is not None and len(ids) > max_tokens:
        raise DsparkError(f"expected at most max_tokens tokens ({max_tokens}), but got a prompt of {len(ids)}.")
    name = content_id(messages, conversation.tools)
    return Prompt(name, conversation.domain, messages, ids, conversation.row_id), note


def _question(conversation: Conversation) -> tuple[tuple[dict[str, Any], ...], str]:
    """The conversation up to its last question, and a note on what was left aside."""
    messages, note = conversation.messages, conversation.note
    while messages[-1]["role"] == "assistant":
        messages = messages[:-1]
        note = "left out the answer at the end: the target writes its own"
    if messages[-1]["role"] == "system":
        raise DsparkError("expected the prompt to end with a user or tool turn, but it ends with a system turn.")
    if messages[-1]["role"] == "user" and not messages[-1]["content"].strip():
        raise DsparkError("expected the last user turn to say something, but it is empty.")
    return messages, note
