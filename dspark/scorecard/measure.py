"""Rolls out one setting with a draft model, and once more without it where the two must be equal.

Whole blocks are drafted and verified: a shorter verification would censor what the later slots can do. Left out on
purpose: speed (bench/speed.py), which needs a quiet machine and says nothing about the draft model alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dspark.contracts import Completion, Request
from dspark.corpus.prompts import Prompt
from dspark.drafter.model import Drafter
from dspark.runner import Engine, EngineOptions
from dspark.runner.acceptance import Counts, Drafted, count
from dspark.scorecard.setting import Setting, requests_for
from dspark.target.decoder import Target

OnFinish = Callable[[int, Completion], None]


@dataclass(frozen=True, slots=True)
class RunOptions:
    """max_tokens: most response tokens. run_seed: with the prompt's id, the only source of randomness. batch_size:
    sequences in flight; changes nothing."""

    max_tokens: int
    run_seed: int = 0
    batch_size: int = 32


@dataclass(frozen=True, slots=True)
class Conversation:
    """What one prompt's rounds add up to: the unit that intervals resample."""

    prompt_id: str
    domain: str
    counts: Counts


@dataclass(frozen=True, slots=True)
class Outcome:
    """One setting, measured. tokens of all responses; drafted, accepted: drafts; rejected: rounds with a rejection;
    differing: sequences that are not plain decoding's (None where that was not asked)."""

    setting: Setting
    conversations: tuple[Conversation, ...]
    tokens: int
    drafted: int
    accepted: int
    rejected: int
    differing: int | None

    @property
    def verdict(self) -> str:
        """equal, different or not compared; inconclusive when nothing was drafted, accepted or rejected: then equality
        proves nothing."""
        if self.differing is None:
            return "not compared"
        if self.differing:
            return "different"
        return "equal" if min(self.drafted, self.accepted, self.rejected) else "inconclusive"


def measure(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Prompt],
    setting: Setting,
    run: RunOptions,
    on_finish: OnFinish | None = None,
) -> Outcome:
    """One sequence a prompt. drafter: in eval mode, in the target's dtype, bound to it."""
    assert target.self_tested
    requests = requests_for(prompts, setting, target.eos_ids, run.max_tokens, run.run_seed)
    options = EngineOptions(setting.verifier, max_batch=run.batch_size)
    speculative = Engine(target, drafter, options).generate(requests, on_finish)
    plain = Engine(target, None, options).generate(requests, on_finish) if setting.equals_plain else None
    rounds = [r for c in speculative for r in c.rounds]
    return Outcome(
        setting,
        _conversations(prompts, requests, speculative, drafter.config.num_predictions),
        tokens=sum(len(c.token_ids) for c in speculative),
        drafted=sum(len(r.drafted) for r in rounds),
        accepted=sum(r.accepted for r in rounds),
        rejected=sum(r.accepted < r.verified for r in rounds),
        differing=None if plain is None else differing(speculative, plain),
    )


def differing(some: Sequence[Completion], others: Sequence[Completion]) -> int:
    """How many completions differ in any of their bits."""
    return sum(bits(a) != bits(b) for a, b in zip(some, others, strict=True))


def bits(completion: Completion) -> tuple[object, ...]:
    """What the contract fixes of a completion: tokens, both log-probabilities, how it ended."""
    return completion.token_ids, completion.logprobs, completion.raw_logprobs, completion.finish_reason


def drafted(prompt: Prompt, request: Request, completion: Completion) -> Drafted:
    """A completion as acceptance statistics take it."""
    last = len(request.prompt_ids) + len(completion.token_ids) - 1
    return Drafted(prompt.domain, completion.rounds, last)


def _conversations(
    prompts: Sequence[Prompt], requests: Sequence[Request], completions: Sequence[Completion], slots: int
) -> tuple[Conversation, ...]:
    return tuple(
        Conversation(p.prompt_id, p.domain, count(drafted(p, r, c), slots))
        for p, r, c in zip(prompts, requests, completions, strict=True)
    )
