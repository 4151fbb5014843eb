"""Writes the two RL tasks: `python data/rl/make_tasks.py`. Same bytes every time; tests/test_data.py holds them to it.

digits/       the shape and the tokenizer of a tiny policy with 16 tokens, no weights
digits.jsonl  three digits; the answer is to be the same digits, then the end
sums.jsonl    sums of two numbers, for SmolLM2: 301 to train on, 60 to test
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path

HERE = Path(__file__).resolve().parent
SPECIAL = ["<pad>", "<s>", "<end>", "<ask>", "<answer>", "<unknown>"]
DIGITS = [str(d) for d in range(10)]
TEMPLATE = "{% for m in messages %}<ask>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<answer>{% endif %}"
SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 16, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "torch_dtype": "float32",
}  # fmt: skip


def tokenizer() -> dict:
    """tokenizer.json: a token a digit."""
    added = [
        {"id": i, "content": name, "special": True, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False}
        for i, name in enumerate(SPECIAL)
    ]  # fmt: skip
    vocabulary = {name: i for i, name in enumerate(SPECIAL + DIGITS)}
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": ""}, "behavior": "Isolated", "invert": False},
        "post_processor": None, "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unknown>"},
    }  # fmt: skip


def digits() -> list[dict]:
    """All 1000 questions, in an order that mixes them."""
    asked = ["".join(d) for d in product(DIGITS, repeat=3)]
    order = sorted(range(1000), key=lambda i: i * 619 % 1000)
    return [row(f"digits-{asked[i]}", "digits", asked[i]) for i in order]


def sums() -> list[dict]:
    """The sums of two numbers from 2 to 20, in an order that mixes them; every sixth is left for testing."""
    pairs = [(a, b) for a in range(2, 21) for b in range(2, 21)]
    chosen = [pairs[i * 157 % len(pairs)] for i in range(len(pairs))]
    told = {"role": "system", "content": "You add numbers. Say the sum."}
    return [
        {**row(f"sums-{a}-{b}", "sums", f"{a} + {b} = ?", [told]), "split": "test" if i % 6 == 5 else "train"}
        for i, (a, b) in enumerate(chosen)
    ]


def row(name: str, domain: str, text: str, before: Sequence[dict] = ()) -> dict:
    return {"id": name, "domain": domain, "messages": [*before, {"role": "user", "content": text}]}


def write(folder: Path) -> None:
    """Everything, into `folder`."""
    (folder / "digits").mkdir(parents=True, exist_ok=True)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "<end>",
              "pad_token": "<pad>", "unk_token": "<unknown>", "chat_template": TEMPLATE}  # fmt: skip
    for name, content in (("config.json", SHAPE), ("tokenizer.json", tokenizer()), ("tokenizer_config.json", config)):
        (folder / "digits" / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    for name, rows in (("digits.jsonl", digits()), ("sums.jsonl", sums())):
        text = "".join(json.dumps(r) + "\n" for r in rows)
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(HERE)
