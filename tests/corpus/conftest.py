"""Tiny byte-level tokenizers with chat templates that imitate the structure of the ones in the wild (written here)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

tokenizers = pytest.importorskip("tokenizers")

CHATML = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# ChatML that puts a system turn of its own first when the conversation has none.
DEFAULT_SYSTEM = """\
{%- for m in messages %}
{%- if loop.first and m.role != 'system' %}{{ '<|im_start|>system\\nYou are kind.<|im_end|>\\n' }}{% endif %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

LLAMA3 = """\
{{- bos_token }}
{%- for m in messages %}
{{- '<|start_header|>' + m.role + '<|end_header|>\\n\\n' + m.content | trim + '<|eot|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header|>assistant<|end_header|>\\n\\n' }}{% endif %}"""

MISTRAL = """\
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set rest = messages[1:] %}
{%- else %}{% set rest = messages %}{% endif %}
{{- bos_token }}
{%- for m in rest %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- if m.role == 'user' %}
{{- '[INST] ' + (system + '\\n\\n' if loop.first and system is defined else '') + m.content + ' [/INST]' }}
{%- else %}{{ ' ' + m.content | trim + '</s>' }}{% endif %}{% endfor %}"""

# Reasoning before the last question is dropped; the answers after it get a think block, an empty one if need be.
QWEN3 = """\
{%- if tools %}{{ '<|im_start|>system\\n' }}{% for t in tools %}{{ t | tojson }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endif %}
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role != 'assistant' %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- else %}
{%- set content = m.content %}{% set think = m.reasoning_content or '' %}
{%- if '</think>' in content %}
{%- set think = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last and (loop.last or think) %}{{ '<think>\\n' + think + '\\n</think>\\n\\n' }}{% endif %}
{{- content }}
{%- for call in m.tool_calls or [] %}
{{- '<tool_call>' + call.function.name + ' ' + call.function.arguments | tojson + '</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# The last answer ends with another token than the earlier ones.
OTHER_END = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}
{{- '<|eot|>' if loop.last and m.role == 'assistant' else '<|im_end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# The generation prompt opens a think block that the rendered answer does not have.
THINK_PROMPT = CHATML.replace("assistant\\n' }}{% endif %}", "assistant\\n<think>\\n' }}{% endif %}")

UPPER = CHATML.replace("m.content +", "(m.content | upper if m.role == 'assistant' else m.content) +")

TEMPLATES = {
    "chatml": CHATML,
    "default_system": DEFAULT_SYSTEM,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "qwen3": QWEN3,
    "other_end": OTHER_END,
    "think_prompt": THINK_PROMPT,
    "upper": UPPER,
    "none": None,
}
SPECIALS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header|>", "<|end_header|>", "<|eot|>"]


@pytest.fixture(scope="session")
def chat_tokenizer() -> Any:
    """name of a template -> tokenizer: one token a byte, plus specials, plus a merge of two newlines into one token."""
    from transformers import PreTrainedTokenizerFast

    def build(name: str) -> Any:
        alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
        vocab = {symbol: index for index, symbol in enumerate([*alphabet, "ĊĊ"])}
        backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[("Ċ", "Ċ")]))
        backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = tokenizers.decoders.ByteLevel()
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=backend, bos_token="<s>", eos_token="</s>", additional_special_tokens=SPECIALS[2:]
        )
        tokenizer.chat_template = TEMPLATES[name]
        return tokenizer

    built: dict[str, Any] = {}
    return lambda name: built.setdefault(name, build(name))


@pytest.fixture
def write_rows(tmp_path: Path) -> Any:
    """Write rows (dicts as JSON, bytes as they are) to a JSONL file and return its path."""

    def write(*rows: dict[str, Any] | bytes, name: str = "rows.jsonl") -> Path:
        path = tmp_path / name
        lines = (row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows)
        path.write_bytes(b"".join(line + b"\n" for line in lines))
        return path

    return write
