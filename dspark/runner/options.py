"""How the runner works, as plain values checked when made. What depends on the models is checked by the engine."""

from __future__ import annotations

from dataclasses import dataclass

from dspark.contracts import DsparkError, VerifierName
from dspark.runner.curve import CapacityCurve
from dspark.runner.schedule import POLICIES, Policy
from dspark.settings import TRUNCATIONS, TruncationMode


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How the runner works. None of it changes what a request produces under the coupled and greedy verifiers, but for
    truncation.

    verifier: greedy (temperature 0 only), coupled or rejection. max_batch: requests in flight. prefill_chunk: prompt
    tokens per pass. verify_tokens: most drafts verified per round (None = the whole block; 0 = none). kv_tokens: arena
    rows. policy: how many of them are (schedule.py); all but fixed read the confidences. threshold: of the policy of
    that name. curve: what early_stop, lagged_global and global weigh tokens against. commit_to_cap: verify the whole
    block but commit what the policy would have verified, so that such a run still records untruncated labels.
    backtracking: most tokens of a sequence that a pass may roll back (None: what the block needs, at least 6); layers
    with a sliding window keep so many entries more. reuse_prefixes: copy what a prompt shares with another one instead
    of computing it again (prefix.py). truncation, keep_tokens: bounded replay of prompts (target/replay.py): an
    approximation, the one option here that changes what a request produces.
    """

    verifier: VerifierName = "coupled"
    max_batch: int = 32
    prefill_chunk: int = 256
    verify_tokens: int | None = None
    kv_tokens: int = 16384
    commit_to_cap: bool = False
    policy: Policy = "fixed"
    threshold: float = 0.0
    curve: CapacityCurve | None = None
    reuse_prefixes: bool = True
    backtracking: int | None = None
    truncation: TruncationMode = "off"
    keep_tokens: int = 0

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise DsparkError(f"runner: expected a policy of {', '.join(POLICIES)}, but got {self.policy!r}.")
        if not 0.0 <= self.threshold <= 1.0:
            raise DsparkError(f"runner: expected a threshold from 0 to 1, but got {self.threshold}.")
        if self.policy == "global" and self.verifier == "rejection":
            raise DsparkError(
                "runner: policy global expects the coupled or the greedy verifier, but got rejection: it cuts a block "
                "by what its later drafts are, which changes the law of the output. Use lagged_global or early_stop."
            )
        if self.verifier not in ("greedy", "coupled", "rejection"):
            raise DsparkError(f"runner: expected verifier greedy, coupled or rejection, but got {self.verifier!r}.")
        if self.truncation not in TRUNCATIONS or (self.truncation != "off") != (self.keep_tokens > 0):
            raise DsparkError(
                "runner: expected truncation compact or mask with keep_tokens > 0, or off without, but got "
                f"{self.truncation!r} and {self.keep_tokens}."
            )
        if self.commit_to_cap and self.verifier == "rejection":
            raise DsparkError(
                "runner: commit_to_cap expects the coupled or the greedy verifier, but got rejection. Collect "
                "untruncated labels for rejection with verify_tokens unset (the whole block)."
            )
        for name in ("max_batch", "prefill_chunk", "kv_tokens"):
            if getattr(self, name) < 1:
                raise DsparkError(f"runner: expected {name} >= 1, but got {getattr(self, name)}.")
