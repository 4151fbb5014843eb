"""Collecting: prompts in, a rollout directory out.

Every sequence has its own seed, derived from the run's seed, the prompt's id and the sample's index, so neither the
order nor the company it is generated in shows in it. Trajectories lie in the order of their prompts' ids, then samples:
the order of the prompt file says which prompts skip and limit take, and nothing else. All sequences that are not on
disk yet go to the generator in one call; it batches them as it likes, and each is stored the moment it finishes.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from dspark.contracts import Completion, DsparkError, Request, SamplingParams
from dspark.corpus.prompts import Prompt, prompts_hash
from dspark.noise import derive_seed
from dspark.rollouts.aside import faulty
from dspark.rollouts.config import RolloutConfig
from dspark.rollouts.rewards import Reward, RewardInput, Scorer, load_reward
from dspark.rollouts.store import TrajectoryWriter
from dspark.rollouts.trajectory import Trajectory, completion_fields, sampling_json

__all__ = ["Generator", "RolloutConfig", "choose", "collect"]

OnProgress = Callable[[int, int, int], None]
Decode = Callable[[Sequence[int]], str]
Item = tuple[Prompt, int]  # a prompt and a sample's index


class Generator(Protocol):
    """What collecting needs of the runner, of workers or of another engine."""

    def generate(
        self, requests: list[Request], on_finish: Callable[[int, Completion], None] | None = None
    ) -> list[Completion]: ...


def collect(
    prompts: Sequence[Prompt],
    engine: Generator,
    config: RolloutConfig,
    out_dir: str,
    manifest_base: dict[str, Any],
    on_progress: OnProgress | None = None,
    *,
    eos_ids: tuple[int, ...] = (),
    decode: Decode | None = None,
    reward: Reward | None = None,
) -> dict[str, Any]:
    """Generates `config.samples_per_prompt` trajectories per prompt into `out_dir`, continuing what is there.

    prompts: config.split already chosen; config.skip and config.limit are applied here, and a prompt that occurs twice
    is used once.
    manifest_base: manifest.run_facts of this engine; with "engine" in it, another one than ours: what it gives no
    finite log-probabilities for is set aside. on_progress(done, total, tokens) counts what is on disk, earlier runs
    included. eos_ids: stop tokens when config.stop_ids is None. decode: token ids to text, for the reward.
    reward: config.reward, where it was loaded before.
    Returns counts and the speed of this call. Raises DsparkError when no prompt is left, the folder holds another
    run, or the runner returns a record that breaks its rules.
    """
    if manifest_base.get("verifier") != config.verifier:
        raise DsparkError(
            f"rollout: expected a runner with the config's verifier {config.verifier}, but got "
            f"{manifest_base.get('verifier')!r}. Make the engine with the same one."
        )
    chosen, duplicates = choose(prompts, config.skip, config.limit)
    items = in_order(chosen, config.samples_per_prompt)
    params = config.params(eos_ids)
    reward = reward or load_reward(config.reward)
    scorer = Scorer(reward.function if reward else None)
    run = {
        **manifest_base,
        "prompts": prompts_hash([prompt for prompt, _ in items[:: config.samples_per_prompt]]),
        "reward_code": reward.code if reward else None,
        "config": config.as_dict(),
        "sampling": sampling_json(params),
    }
    order = [_trajectory_id(item) for item in items]
    started = time.perf_counter()
    with TrajectoryWriter(out_dir, run, order, _whole_groups(config), [p.prompt_id for p in chosen]) as writer:
        resumed, resumed_tokens = writer.done, writer.tokens
        rounds = _generate(items, engine, params, config, writer, scorer, decode, on_progress, manifest_base)
        manifest = writer.finish()
        new_tokens = writer.tokens - resumed_tokens
    seconds = time.perf_counter() - started
    counts = manifest["counts"]
    return {
        **counts,
        "prompts": len(chosen),
        "duplicate_prompts": duplicates,
        "resumed": resumed,
        "new_tokens": new_tokens,
        **rounds,
        "seconds": seconds,
        "tokens_per_second": new_tokens / seconds,
        "reward_failures": counts["rewards_missing"] if config.reward else 0,
        "reward_failures_by_kind": dict(sorted(scorer.failures.items())),
        "reward_errors": scorer.errors,
        "set_aside": counts.get("set_aside", 0),
        "out": str(out_dir),
    }


def in_order(prompts: Sequence[Prompt], samples: int) -> list[Item]:
    """Every prompt's samples, in the order in which trajectories lie."""
    canonical = sorted(prompts, key=lambda prompt: prompt.prompt_id)
    return [(prompt, sample) for prompt in canonical for sample in range(samples)]


def request_for(item: Item, params: SamplingParams, run_seed: int) -> Request:
    """With the seed that is the sample's own."""
    prompt, sample = item
    return Request(prompt.prompt_ids, params.with_seed(derive_seed(run_seed, prompt.prompt_id, sample)))


def _generate(
    items: list[Item],
    engine: Generator,
    params: SamplingParams,
    config: RolloutConfig,
    writer: TrajectoryWriter,
    scorer: Scorer,
    decode: Decode | None,
    on_progress: OnProgress | None,
    facts: dict[str, Any],
) -> dict[str, int]:
    """Returns how many rounds drafted, and how many drafts were verified and accepted in them."""
    counted = {"rounds": 0, "drafts_verified": 0, "drafts_accepted": 0}
    left = [items[place] for place in writer.missing()]
    requests = [request_for(item, params, config.run_seed) for item in left]

    def keep(index: int, completion: Completion) -> None:
        item, request = left[index], requests[index]
        if writer.has(_trajectory_id(item)):
            return
        for r in completion.rounds:
            counted["rounds"] += 1
            counted["drafts_verified"] += r.verified
            counted["drafts_accepted"] += r.accepted
        if facts.get("engine") and (aside := faulty(_trajectory_id(item), request, completion)):
            writer.set_aside(aside)
        else:
            trajectory = _trajectory(item, request, completion, facts["rng_scheme"], scorer, decode)
            writer.add(trajectory, completion.rounds)
        if on_progress:
            on_progress(writer.done, len(items), writer.tokens)

    if on_progress:
        on_progress(writer.done, len(items), writer.tokens)
    if requests:
        for index, completion in enumerate(engine.generate(requests, keep)):
            keep(index, completion)  # for a runner that announced none of them
    return counted


def _trajectory(
    item: Item, request: Request, completion: Completion, scheme: str, scorer: Scorer, decode: Decode | None
) -> Trajectory:
    prompt, _ = item
    return Trajectory(
        trajectory_id=_trajectory_id(item),
        group_id=prompt.prompt_id,
        prompt_id=prompt.prompt_id,
        domain=prompt.domain,
        prompt_ids=request.prompt_ids,
        **completion_fields(completion),
        reward=_reward(item, request, completion, scorer, decode),
        seq_seed=completion.seq_seed,
        rng_scheme=scheme,
        sampling=sampling_json(request.params),
    )


def _reward(
    item: Item, request: Request, completion: Completion, scorer: Scorer, decode: Decode | None
) -> float | None:
    if scorer.function is None:
        return None
    prompt, _ = item
    sample = RewardInput(
        prompt_id=prompt.prompt_id,
        domain=prompt.domain,
        messages=copy.deepcopy(tuple(prompt.messages)),  # its own: other samples see the question as it was
        prompt_ids=request.prompt_ids,
        response_ids=tuple(completion.token_ids),
        text=decode(completion.token_ids) if decode else "",
        finish_reason=completion.finish_reason,
    )
    return scorer(sample, _trajectory_id(item))


def _whole_groups(config: RolloutConfig) -> int:
    """Trajectories per shard: as many whole groups as fit, at least one."""
    return max(1, config.shard_size // config.samples_per_prompt) * config.samples_per_prompt


def choose(prompts: Sequence[Prompt], skip: int, limit: int) -> tuple[list[Prompt], int]:
    """`limit` distinct prompts after the first `skip` of them, and how many repeats were passed over on the way."""
    distinct: dict[str, Prompt] = {}
    duplicates = 0
    for prompt in prompts:
        if limit and len(distinct) == skip + limit:
            break
        duplicates += prompt.prompt_id in distinct
        distinct.setdefault(prompt.prompt_id, prompt)
    chosen = list(distinct.values())[skip:]
    if not chosen:
        raise DsparkError(
            f"rollout: expected at least one prompt, but got none: {len(distinct)} distinct ones, of which skip passes "
            f"over {skip}. Check prompts, split, skip and limit."
        )
    return chosen, duplicates


def _trajectory_id(item: Item) -> str:
    prompt, sample = item
    return f"{prompt.prompt_id}-{sample}"
