"""Records that cross rooms, and the errors a user may see. Plain data: nothing here computes.

Shape letters used throughout the package:
    N  rows of a flat batch (tokens)      B  blocks (one anchor each)      K  slots of a block (gamma)
    S  tokens of one sequence             H  hidden size                   D  head size
    V  vocabulary                         R  requests                      L  layers
Positions are 0-based absolute token indices. Slots are numbered from 0 in code; slot k predicts the token at
anchor + k + 1 when ``sample_from_anchor`` is true.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

FinishReason = Literal["stop", "length"]
VerifierName = Literal["greedy", "rejection", "coupled"]
DraftedBy = Literal["drafter", "lookup"]  # the draft model, or what was written before (runner/lookup.py)


class DsparkError(Exception):
    """A mistake the user can mend. The command line prints the message and exits with 2, never a traceback.

    The message says what was expected, what came, and what to do.
    """


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is sampled. Everything the reproducibility contract fixes, and nothing else.

    temperature 0 means greedy (ties go to the lowest token id). top_k 0, top_p 1.0 and min_p 0.0 switch the
    respective truncation off. ``seq_seed`` is the request's only source of randomness (0 <= seq_seed < 2**63).
    ``stop_ids`` end the sequence; the stop token itself is kept as the last token. Raises DsparkError on a value
    out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int = 128
    stop_ids: tuple[int, ...] = ()
    seq_seed: int | None = None

    def __post_init__(self) -> None:
        seeded = self.seq_seed is None or 0 <= self.seq_seed < 2**63
        checks = (
            ("temperature", 0.0 <= self.temperature < float("inf"), "a finite number >= 0"),
            ("top_k", self.top_k >= 0, "an integer >= 0 (0 = off)"),
            ("top_p", 0.0 < self.top_p <= 1.0, "a number in (0, 1] (1 = off)"),
            ("min_p", 0.0 <= self.min_p < 1.0, "a number in [0, 1) (0 = off)"),
            ("max_tokens", self.max_tokens >= 1, "an integer >= 1"),
            ("seq_seed", seeded, "an integer in [0, 2**63), or None for one of its own"),
        )
        for name, ok, wanted in checks:
            if not ok:
                raise DsparkError(f"sampling: expected {name} to be {wanted}, but got {getattr(self, name)!r}.")
        object.__setattr__(self, "stop_ids", tuple(int(i) for i in self.stop_ids))

    def with_seed(self, seq_seed: int) -> SamplingParams:
        return replace(self, seq_seed=seq_seed)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "stop_ids": list(self.stop_ids)}


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate: prompt token ids (at least one) and how to sample."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_ids", tuple(int(i) for i in self.prompt_ids))
        if not self.prompt_ids:
            raise DsparkError("request: expected at least one prompt token, but got an empty prompt.")


@dataclass(frozen=True, slots=True)
class MTPPredictInfo:
    """What the draft model, or a lookup, hands the scheduler for one request.

    token_ids: the drafted tokens, slot order, length <= K. confidence_rates: *conditional* probability per slot
    that the verifier accepts it given that it accepted all before (calibrated when a calibration is loaded), same
    length; None when the draft model has no confidence head. source: who drafted.
    """

    token_ids: tuple[int, ...]
    confidence_rates: tuple[float, ...] | None
    source: DraftedBy = "drafter"


@dataclass(frozen=True, slots=True)
class Round:
    """What one draft-verify round did for one request: the acceptance labels.

    anchor: absolute position of the anchor (the last token known before the round). drafted: token ids proposed.
    verified: how many of them went through the target (a prefix). accepted: how many of those were accepted.
    confidences: conditional acceptance probabilities per drafted slot (empty without a confidence head). source: who
    drafted; what a lookup did says nothing about the draft model.
    The round is *untruncated* when verified == len(drafted): only then are its labels uncensored.
    """

    anchor: int
    drafted: tuple[int, ...]
    verified: int
    accepted: int
    confidences: tuple[float, ...] = ()
    source: DraftedBy = "drafter"


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request. logprobs are of the law the token was sampled from (after temperature and truncation),
    raw_logprobs of the target's softmax at temperature 1; both fp32 values, one per token, <= 0. seq_seed: what it was
    sampled with: the request's, or the one it was given where it had none."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    raw_logprobs: tuple[float, ...]
    finish_reason: FinishReason
    rounds: tuple[Round, ...]
    seq_seed: int
