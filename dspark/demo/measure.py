"""What the demo measures at the end: equality with plain decoding, acceptance at three temperatures, speed at batch
1."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from dspark.bench.speed import compare
from dspark.commands.running import Loaded, progress
from dspark.contracts import Completion, Request
from dspark.corpus.prompts import Prompt
from dspark.runner.acceptance import by_domain
from dspark.scorecard.measure import differing, drafted
from dspark.scorecard.setting import Setting, requests_for

_RUN_SEED = 1


def equality(
    loaded: Loaded, prompts: Sequence[Prompt], setting: Setting, max_tokens: int, quiet: bool
) -> dict[str, Any]:
    """Speculative against plain decoding over ``prompts``: how many differ in ids or log-probabilities, with the counts
    of drafts, acceptances and rejections that make the comparison mean something; acceptance by domain."""
    requests = requests_for(prompts, setting, loaded.target.eos_ids, max_tokens, _RUN_SEED)
    plain, plain_seconds = _timed(Loaded(loaded.source, loaded.dtype, loaded.target, None), setting, requests, quiet)
    spec, spec_seconds = _timed(loaded, setting, requests, quiet)
    rounds = [r for c in spec for r in c.rounds]
    slots = loaded.bundle.config.num_predictions if loaded.bundle else 0
    sequences = [drafted(*one) for one in zip(prompts, requests, spec, strict=True)]
    return {
        "setting": asdict(setting),
        "sequences": len(requests),
        "tokens": sum(len(c.token_ids) for c in spec),
        "differing": differing(plain, spec),
        "drafted": sum(len(r.drafted) for r in rounds),
        "accepted": sum(r.accepted for r in rounds),
        "rejected": sum(r.accepted < r.verified for r in rounds),
        "seconds": {"plain": plain_seconds, "speculative": spec_seconds},
        "acceptance": {name: asdict(one) for name, one in by_domain(sequences, slots).items()},
    }


def _timed(loaded: Loaded, setting: Setting, requests: list[Request], quiet: bool) -> tuple[list[Completion], float]:
    engine = loaded.engine(setting.verifier, None)
    done, tokens = 0, 0
    started = time.perf_counter()
    kind = "speculative" if loaded.bundle else "plain"
    with progress(f"{kind}, temperature {setting.temperature:g}", quiet=quiet) as bar:

        def finished(_: int, completion: Completion) -> None:
            nonlocal done, tokens
            done, tokens = done + 1, tokens + len(completion.token_ids)
            bar(done, len(requests), tokens)

        completions = engine.generate(requests, finished)
    return completions, time.perf_counter() - started


def speed(
    loaded: Loaded, prompts: Sequence[Prompt], setting: Setting, max_tokens: int, repeats: int, quiet: bool
) -> dict[str, Any]:
    """Plain decoding and speculative decoding at several verification lengths, batch 1, interleaved request by request,
    outputs compared. How much a draft is worth verifying depends on what a row costs: measured, not assumed."""
    requests = requests_for(prompts, setting, loaded.target.eos_ids, max_tokens, _RUN_SEED)
    block = loaded.bundle.config.num_predictions if loaded.bundle else 0
    engines = {"plain": Loaded(loaded.source, loaded.dtype, loaded.target, None).engine(setting.verifier, None, 1)}
    for gamma in sorted({1, 2, block} & set(range(1, block + 1))):
        engines[f"speculative, {gamma} verified"] = loaded.engine(setting.verifier, gamma, 1)
    total, done = repeats * len(requests) * len(engines), 0
    with progress("speed at batch 1", quiet=quiet) as bar:

        def step() -> None:
            nonlocal done
            done += 1
            bar(done, total, 0)

        result = compare(engines, requests, repeats, step)
    engines_measured = {name: asdict(one) for name, one in result.items()}
    return {"setting": asdict(setting), "requests": len(requests), "repeats": repeats, "engines": engines_measured}
