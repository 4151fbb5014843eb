"""What a round of drafting costs: the draft model's own work in the runner, target and verification left out.

One round = bring in the features of the tokens the last round confirmed, draw a block for every sequence. Several draft
models are timed in turn, round by round, so that a disturbance hits all of them. Random context features: the cost does
not depend on their values.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping

import torch

from dspark.contracts import Request, SamplingParams
from dspark.drafter.model import Drafter
from dspark.runner.draft import DraftStage
from dspark.runner.sequence import Sequence
from dspark.runner.verify import SamplingRows

REPEATS, CONTEXT, FRESH = 15, 160, 2  # rounds; tokens before the anchor; tokens a round confirms


def draft_milliseconds(
    drafters: Mapping[str, Drafter], batch: int, params: SamplingParams, repeats: int = REPEATS
) -> dict[str, float]:
    """Median milliseconds a round of ``batch`` sequences, by name. The draft models are bound and in eval mode."""
    rounds = {name: _Round(drafter, batch, params) for name, drafter in drafters.items()}
    spent: dict[str, list[float]] = {name: [] for name in rounds}
    with torch.inference_mode():
        for repeat in range(repeats + 1):
            for name, one in rounds.items():
                started = time.perf_counter()
                one.run()
                if repeat:  # the first packs weights
                    spent[name].append(time.perf_counter() - started)
    return {name: 1e3 * statistics.median(values) for name, values in spent.items()}


class _Round:
    def __init__(self, drafter: Drafter, batch: int, params: SamplingParams):
        prompt, room = (1,) * (CONTEXT + 1), CONTEXT + 1 + drafter.config.num_predictions
        self.stage = DraftStage(drafter, batch * room, "coupled", drafter.config.num_predictions)
        self.sequences = [Sequence(i, Request(prompt, params.with_seed(i)), i * room) for i in range(batch)]
        self.sampling = SamplingRows.of([s.request.params for s in self.sequences])
        self.stage.commit(*self._features(range(CONTEXT)))

    def run(self) -> None:
        self.stage.commit(*self._features(range(CONTEXT - FRESH, CONTEXT)))
        self.stage.propose(self.sequences, self.sampling)

    def _features(self, positions: range) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        config = self.stage.drafter.config
        place = torch.tensor(list(positions)).repeat(len(self.sequences))
        base = torch.tensor([s.base for s in self.sequences]).repeat_interleave(len(positions))
        width = len(config.target_layer_ids) * config.hidden_size
        features = torch.randn(len(place), width, generator=torch.Generator().manual_seed(0))
        return features.to(self.stage.drafter.dtype), place, base + place
