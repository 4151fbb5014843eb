"""vLLM as a peer, run by its own Python: MODEL DTYPE LONGEST BATCH, then a request a line on stdin, an answer a line.

Imports nothing of this package: that environment has its own torch and no dspark.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def main(model: str, dtype: str, longest: str, batch: str) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model, dtype=dtype, max_model_len=int(longest), max_num_seqs=int(batch), skip_tokenizer_init=True,
        generation_config="vllm", enable_prefix_caching=False, max_num_batched_tokens=max(2048, int(longest)),
    )  # fmt: skip
    _say({})
    for line in sys.stdin:
        asked = json.loads(line)
        params = SamplingParams(
            temperature=asked["temperature"], top_p=asked["top_p"], max_tokens=asked["max_tokens"], ignore_eos=True,
            detokenize=False,
        )  # fmt: skip
        _say(_answer(llm, asked, params))


def _answer(llm: Any, asked: dict[str, Any], params: Any) -> dict[str, Any]:
    prompts = [{"prompt_token_ids": ids} for ids in asked["prompts"]]
    began, outputs = time.perf_counter(), []
    for at in range(0, len(prompts), asked["batch"]):
        outputs += llm.generate(prompts[at : at + asked["batch"]], params, use_tqdm=False)
    return {"seconds": time.perf_counter() - began, "tokens": [list(o.outputs[0].token_ids) for o in outputs]}


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps({"dspark": 1, **answer}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
