"""A source of finished conversations -> rows of ids and loss masks. The twin of prompts.py, for training.

A row's ``finish_reason`` is heard: "length" means that the answer was cut, so no end token is taught. Left out on
purpose: packing and label shifting (training), and any filter on quality.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.contracts import DsparkError
from dspark.corpus import dialogue
from dspark.corpus.ledger import Ledger, open_rows
from dspark.corpus.messages import content_id, read_conversation


@dataclass(frozen=True, slots=True)
class Example:
    """dialogue_id: content hash of the whole conversation. turn numbers the rows of one conversation (0 unless the
    chat template rewrites history)."""

    dialogue_id: str
    domain: str
    turn: int
    dialogue: dialogue.Dialogue


@dataclass(frozen=True, slots=True)
class DialogueSet:
    """examples in file order; ``conversations`` of them before parting into turns. rows_read == conversations +
    len(dropped) + other_split. truncated counts examples cut by max_length, supervised the supervised tokens."""

    examples: list[Example]
    conversations: int
    dropped: list[tuple[int, str]]
    notes: list[tuple[int, str]]
    rows_read: int
    other_split: int
    truncated: int
    supervised: int
    summary: str


def load_dialogues(
    source: str | Path,
    tokenizer: dialogue.ChatTokenizer,
    split: str | None = None,
    quarantine: Path | None = None,
    *,
    max_length: int | None = None,
    role_aliases: Mapping[str, str] | None = None,
) -> DialogueSet:
    """Load conversations from any source that ``load_prompts`` takes, and encode them with dialogue.encode_turns.

    Raises DsparkError when the source cannot be opened, no usable row is left, or the tokenizer has no chat template.
    """
    ledger, examples = Ledger(str(source)), []
    for row, value in open_rows(source, split, ledger):
        skipped: list[str] = []
        try:
            found = _read_dialogue(value, tokenizer, max_length, role_aliases, skipped)
        except dialogue.NoChatTemplate:
            raise
        except DsparkError as error:
            ledger.drop(row, str(error))
            continue
        if ledger.keep(row, found[0].dialogue_id):
            examples += found
            ledger.notes += [(row.line, reason) for reason in skipped]
    ledger.close(quarantine)
    return _finish(examples, ledger)


def _read_dialogue(
    row: Mapping[str, Any],
    tokenizer: dialogue.ChatTokenizer,
    max_length: int | None,
    role_aliases: Mapping[str, str] | None,
    skipped: list[str],
) -> list[Example]:
    read = read_conversation(row, role_aliases)
    name = content_id(read.messages, read.tools)
    parts = dialogue.encode_turns(
        read.messages,
        tokenizer,
        tools=read.tools,
        max_length=max_length,
        complete=read.finish_reason != "length",
        on_skip=skipped.append,
    )
    return [Example(name, read.domain, turn, part) for turn, part in enumerate(parts)]


def _finish(examples: list[Example], ledger: Ledger) -> DialogueSet:
    truncated = sum(example.dialogue.truncated for example in examples)
    supervised = sum(sum(example.dialogue.loss_mask) for example in examples)
    return DialogueSet(
        examples=examples,
        conversations=ledger.kept,
        dropped=ledger.dropped,
        notes=ledger.notes,
        rows_read=ledger.rows_read,
        other_split=ledger.other_split,
        truncated=truncated,
        supervised=supervised,
        summary=f"{ledger.summary()}; {len(examples)} examples, {supervised} supervised tokens, {truncated} truncated",
    )
