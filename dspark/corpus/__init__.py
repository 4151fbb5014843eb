"""Text in, token ids out: prompts and conversations through the target's own chat template.

messages.py   one row of any accepted form -> canonical messages
sources.py    JSONL, Parquet, a directory, a Hugging Face dataset -> numbered rows
ledger.py     what was dropped and why, and the quarantine file
dialogue.py   messages -> prompt ids; messages -> ids + loss mask (the only file that touches a chat template)
prompts.py    a source -> PromptSet                (what the target is asked)
conversations.py  a source -> DialogueSet          (finished conversations to train on)
splits.py     disjoint, complete splits by content hash

Left out on purpose: packing, and the shift between inputs and labels. Both belong to training, which knows blocks.
"""

from __future__ import annotations

from dspark.corpus.conversations import DialogueSet, Example, load_dialogues
from dspark.corpus.dialogue import Dialogue, HistoryRewritten, Truncated, encode, encode_turns, prompt_ids
from dspark.corpus.prompts import Prompt, PromptSet, load_prompts
from dspark.corpus.splits import split_by_hash

__all__ = [
    "Dialogue",
    "DialogueSet",
    "Example",
    "HistoryRewritten",
    "Prompt",
    "PromptSet",
    "Truncated",
    "encode",
    "encode_turns",
    "load_dialogues",
    "load_prompts",
    "prompt_ids",
    "split_by_hash",
]
