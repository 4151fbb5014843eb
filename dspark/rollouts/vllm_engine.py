"""vLLM as the generator of a rollout, for sizes our runner is not for.

It draws samples of its own: seeded per request, but with noise that is not ours and with reduction orders that depend
on the batch. So nothing is promised bit for bit, the manifest says so (`facts`), and the trajectories carry vLLM's
scheme of randomness, not ours. Prompts go in as token ids, and what comes back are token ids and the log-probabilities
of the law they were drawn from (logprobs_mode "processed_logprobs").

vLLM gives one kind of log-probability, so the raw ones are known only where both are the same (temperature 1, nothing
truncated), or where ours are computed afterwards (recompute.py). Left out on purpose: drafting, and options for vLLM's
own parallelism.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

from dspark.contracts import Completion, DsparkError, Request, SamplingParams

PROMISES = (
    "each sequence was drawn by this release of vLLM from the target's law at these sampling parameters, with the "
    "seq_seed of its row as the request's seed"
)
PIECE = 4  # batches per call of vLLM: what an interruption may cost, and how often a batch runs empty
DOES_NOT_PROMISE = (
    "the same tokens or log-probabilities again: they may differ with the batch's size and members, prefix caching, "
    "release, build and machine, and after an interruption. dspark replay cannot draw them again"
)


class VllmEngine:
    """A Generator over vllm.LLM. model: a checkpoint folder. batch: most sequences in flight.

    Raises DsparkError when vLLM is not installed, does not load the model, fails on the way, or gives no
    log-probabilities. A token without a finite one has NaN: whoever stores it sets it aside.
    """

    def __init__(self, model: Path, dtype: str, batch: int):
        self._vllm = _import_vllm()
        self._model, self._dtype, self._batch = model, dtype, batch

    def facts(self, recompute: bool) -> dict[str, Any]:
        """What a manifest says of this engine beside the models; logprobs: whose they are."""
        version = str(self._vllm.__version__)
        engine = {
            "name": "vllm",
            "version": version,
            "promises": PROMISES,
            "does_not_promise": DOES_NOT_PROMISE,
            "logprobs": "dspark" if recompute else "vllm",
        }
        return {"engine": engine, "rng_scheme": f"vllm-{version}/request-seed"}

    def generate(
        self, requests: list[Request], on_finish: Callable[[int, Completion], None] | None = None
    ) -> list[Completion]:
        """Finish all requests, a few batches at a time; completions in request order, ``on_finish(index, completion)``
        for each of a piece when it is done."""
        done: list[Completion] = []
        with _told("to load the model"):
            llm = self._load(max(len(r.prompt_ids) + r.params.max_tokens for r in requests))
        while len(done) < len(requests):
            piece = requests[len(done) : len(done) + PIECE * self._batch]
            with _told("to finish a piece"):
                outputs = llm.generate(*self._asked(piece), use_tqdm=False)
            for request, output in zip(piece, outputs, strict=True):
                done.append(completion(request, output.outputs[0]))
                if on_finish:
                    on_finish(len(done) - 1, done[-1])
        return done

    def _load(self, longest: int) -> Any:
        return self._vllm.LLM(
            model=str(self._model),
            dtype=self._dtype,
            max_model_len=longest,
            max_num_seqs=self._batch,
            max_num_batched_tokens=max(longest, 2048),
            enable_chunked_prefill=False,  # 0.32 on a CPU dies of a seeded request whose prompt comes in chunks
            skip_tokenizer_init=True,
            generation_config="vllm",  # not the checkpoint's own sampling defaults
            logprobs_mode="processed_logprobs",
        )

    def _asked(self, requests: Sequence[Request]) -> tuple[list[dict[str, Any]], list[Any]]:
        prompts = [{"prompt_token_ids": list(request.prompt_ids)} for request in requests]
        return prompts, [self._params(request.params) for request in requests]

    def _params(self, params: SamplingParams) -> Any:
        from vllm.sampling_params import RequestOutputKind

        return self._vllm.SamplingParams(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            max_tokens=params.max_tokens,
            stop_token_ids=list(params.stop_ids),
            ignore_eos=True,  # stop_ids are all that ends a sequence
            seed=params.seq_seed,
            logprobs=0,  # of the sampled token alone
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )


def completion(request: Request, output: Any) -> Completion:
    """A finished vllm.CompletionOutput as ours. Raises DsparkError when it ended otherwise than by stop or length, or
    has no log-probabilities at all."""
    tokens, reason = tuple(output.token_ids), output.finish_reason
    if reason not in ("stop", "length"):
        raise DsparkError(f"vllm: expected sequences to end by stop or length, but one ended by {reason!r}.")
    if output.logprobs is None or len(output.logprobs) != len(tokens):
        got = "none" if output.logprobs is None else str(len(output.logprobs))
        raise DsparkError(
            f"vllm: expected a log-probability for each of {len(tokens)} tokens, but got {got}. Is this a release of "
            "vLLM that docs/rollouts.md names?"
        )
    logprobs = tuple(_logprob(row, token) for row, token in zip(output.logprobs, tokens, strict=True))
    raw = logprobs if is_raw(request.params) else (math.nan,) * len(tokens)
    assert request.params.seq_seed is not None, "collecting seeds every request"
    return Completion(tokens, logprobs, raw, reason, (), request.params.seq_seed)


def is_raw(params: SamplingParams) -> bool:
    """Whether the law that is sampled from is the target's own softmax."""
    return (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)


def _logprob(row: Any, token: int) -> float:
    """Of the sampled token in vLLM's {token id: Logprob}; NaN where it is missing."""
    found = (row or {}).get(token)
    return math.nan if found is None or found.logprob is None else float(found.logprob)


@contextmanager
def _told(what: str) -> Iterator[None]:
    """vLLM's errors as ours, and its words on stderr: stdout is the summary's."""
    try:
        with redirect_stdout(sys.stderr):
            yield
    except Exception as error:  # whatever vLLM and its libraries raise
        first = (str(error).strip().splitlines() or [""])[0].rstrip(".")
        raise DsparkError(
            f"vllm: expected it {what}, but got {type(error).__name__}: {first}. What is finished is kept, and the "
            "same command goes on; --debug shows vLLM's own words."
        ) from error


def _import_vllm() -> ModuleType:
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        import vllm
    except Exception as error:  # a build for other hardware fails with whatever it does not find
        raise DsparkError(
            f"engine vllm: expected vLLM in this environment, but got {type(error).__name__}: {error}. It brings a "
            "torch of its own: install both into an environment of their own (docs/rollouts.md says how), or leave out "
            "--engine."
        ) from error
    return vllm
