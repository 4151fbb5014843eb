"""One way to sample, and the requests that ask for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dspark.contracts import DsparkError, Request, SamplingParams, VerifierName
from dspark.corpus.prompts import Prompt
from dspark.noise import derive_seed
from dspark.runner import EngineOptions


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to sample: a verifier with its temperature and top-p. Raises DsparkError on a value out of range.

    Args:
        verifier: coupled, greedy (temperature 0 only) or rejection.
        temperature: of the target's and the draft's law; 0 is greedy.
        top_p: share of the law that is kept; 1 is all.
    """

    verifier: VerifierName = "coupled"
    temperature: float = 1.0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        EngineOptions(self.verifier)
        SamplingParams(temperature=self.temperature, top_p=self.top_p)
        if self.verifier == "greedy" and self.temperature != 0.0:
            raise DsparkError(
                f"setting: expected temperature 0 with the greedy verifier, but got {self.temperature}. Use coupled or "
                "rejection."
            )

    @property
    def title(self) -> str:
        return f"{self.verifier}, temperature {self.temperature:g}, top-p {self.top_p:g}"

    @property
    def equals_plain(self) -> bool:
        """Whether the output is plain decoding's token by token. Rejection keeps the law but draws other tokens."""
        return self.verifier != "rejection"


def requests_for(
    prompts: Sequence[Prompt], setting: Setting, eos: tuple[int, ...], max_tokens: int, run_seed: int
) -> list[Request]:
    """One request a prompt, seeded by the run's seed and the prompt's id."""
    params = SamplingParams(temperature=setting.temperature, top_p=setting.top_p, max_tokens=max_tokens, stop_ids=eos)
    return [Request(p.prompt_ids, params.with_seed(derive_seed(run_seed, p.prompt_id, 0))) for p in prompts]
