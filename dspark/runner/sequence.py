"""What the runner knows about one request between rounds: plain counts and ids, no tensor.

Positions are absolute. A sequence owns the arena rows ``base .. base + need - 1``; position p lives in row base + p, in
the target's cache and in the draft model's context cache alike. Rolling back a rejected draft is therefore nothing but
not advancing ``cached``: the next pass overwrites the rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dspark.contracts import Completion, FinishReason, Request, Round


@dataclass(slots=True)
class Sequence:
    """A request in flight. ``cached`` counts the leading tokens whose keys and values (and context features) are
    final."""

    index: int
    request: Request
    base: int
    ring: int = 0  # which ring of the sliding-window layers is its own
    tokens: list[int] = field(default_factory=list)
    cached: int = 0
    logprobs: list[float] = field(default_factory=list)
    raw_logprobs: list[float] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt_ids)

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def prefilling(self) -> bool:
        return self.cached < self.prompt_length

    @property
    def anchor(self) -> int:
        """Position of the last known token: the one the next target pass starts from."""
        return len(self.tokens) - 1

    @property
    def remaining(self) -> int:
        """Tokens this request may still produce."""
        return self.request.params.max_tokens - (len(self.tokens) - self.prompt_length)

    def append(self, tokens: list[int], logprobs: list[float], raw_logprobs: list[float]) -> int:
        """Take emitted tokens in order, up to and including a stop token or the budget. Returns how many were kept."""
        params = self.request.params
        for kept, token in enumerate(tokens, start=1):
            self.tokens.append(token)
            self.logprobs.append(logprobs[kept - 1])
            self.raw_logprobs.append(raw_logprobs[kept - 1])
            if token in params.stop_ids:
                self.finish_reason = "stop"
                return kept
            if self.remaining == 0:
                self.finish_reason = "length"
                return kept
        return len(tokens)

    def completion(self) -> Completion:
        assert self.finish_reason is not None, f"request {self.index} is not finished"
        new = self.tokens[self.prompt_length :]
        seed = self.request.params.seq_seed
        assert seed is not None, "the engine gives a seed to a request that has none"
        return Completion(
            tuple(new), tuple(self.logprobs), tuple(self.raw_logprobs), self.finish_reason, tuple(self.rounds), seed
        )
