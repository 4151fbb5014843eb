"""Runs in vLLM's environment, not ours: `python vllm_worker.py TASK FOLDER`, answers in FOLDER. Knows no dspark.

heads: vLLM's own loader reads FOLDER/draft, and what its modules say about FOLDER/inputs.safetensors is written down.
The runner that DSpark needs may be refused by a build; its modules are built all the same: that check is passed over.
run: FOLDER/target answers two prompts, greedily, with `draft` speculating and without.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def engine_arguments(folder: Path, draft: bool) -> dict[str, Any]:
    given = {"model": str(folder / "target"), "skip_tokenizer_init": True, "dtype": "float32", "enforce_eager": True,
             "max_model_len": 128, "max_num_seqs": 2, "disable_log_stats": False}  # fmt: skip
    speculation = {"model": str(folder / "draft"), "method": "dspark", "num_speculative_tokens": 4}
    return given | ({"speculative_config": speculation} if draft else {})


def heads(folder: Path) -> dict[str, Any]:
    import torch
    from safetensors.torch import load_file, save_file
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model

    if not torch.accelerator.is_available():
        torch.accelerator.empty_cache = lambda: None  # the loader calls it
    VllmConfig._validate_v1_model_runner = lambda self: None
    config = EngineArgs(**engine_arguments(folder, True)).create_engine_config()
    chosen = config.speculative_config
    with set_current_vllm_config(config), torch.no_grad():
        init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
        initialize_model_parallel(1, 1)
        model = get_model(vllm_config=config, model_config=chosen.draft_model_config, prefix="draft")
        said = load_file(folder / "inputs.safetensors")
        hidden, embedding = said["hidden"], model.markov_embed(said["ids"])
        layer = model.model.layers[0]
        answers = {
            "bias": model.markov_bias(embedding),
            "confidence": model.compute_confidence(hidden, embedding),
            "fused": model.model.hidden_norm(model.combine_hidden_states(said["features"])),
            "qkv": layer.self_attn.qkv_proj(hidden)[0],
            "mlp": layer.mlp(hidden),
            "normed": model.model.norm(hidden),
            "mapped": model.map_draft_to_target(said["columns"]),
        }
        if getattr(model, "has_own_lm_head", False):
            answers["logits"] = model.compute_draft_logits(hidden)
    save_file({name: value.contiguous() for name, value in answers.items()}, folder / "answers.safetensors")
    return {"method": chosen.method, "architectures": chosen.draft_model_config.architectures}


def run(folder: Path) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    prompts = [{"prompt_token_ids": ids} for ids in json.loads((folder / "prompts.json").read_text())]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False)
    answer: dict[str, Any] = {}
    for name, draft in (("plain", False), ("speculative", True)):
        try:
            model = LLM(**engine_arguments(folder, draft))
        except ValueError as error:  # pydantic's, too
            answer["refused"] = str(error)
            break
        answer[name] = [list(out.outputs[0].token_ids) for out in model.generate(prompts, params)]
        counted = {m.name: m.value for m in model.get_metrics() if "spec_decode" in m.name and hasattr(m, "value")}
        answer["drafted"] = counted.get("vllm:spec_decode_num_draft_tokens", 0)
        answer["accepted"] = counted.get("vllm:spec_decode_num_accepted_tokens", 0)
        del model
    return answer


if __name__ == "__main__":
    task, where = {"heads": heads, "run": run}[sys.argv[1]], Path(sys.argv[2])
    (where / "answer.json").write_text(json.dumps(task(where)))
