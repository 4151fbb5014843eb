"""From recorded rounds to calibration events: what the confidence head says where the verifier's verdict is known."""

from __future__ import annotations

from pathlib import Path

import torch
from tqdm import tqdm

from dspark.calibration.events import Events
from dspark.contracts import DsparkError
from dspark.export.bundle import drafter_hash
from dspark.training.confidence_module import ConfidenceModule
from dspark.training.data import RoundsDataModule


def gather_events(
    drafter: str | Path, rollouts: list[str], target: str, dtype: str, quiet: bool = False
) -> tuple[Events, str]:
    """(events, drafter hash): the head of ``drafter`` (a checkpoint or a bundle) on the untruncated rounds of rollout
    folders, its raw logits recomputed from the target's features. Raises DsparkError when there is nothing to read."""
    module = ConfidenceModule(target=target, drafter=str(drafter), target_dtype=dtype)
    module.setup("predict")
    module.eval()
    data = RoundsDataModule(predict=rollouts)
    parts = []
    for i, batch in enumerate(tqdm(data.predict_dataloader(), desc="confidence", leave=False, disable=quiet)):
        part = module.predict_step(batch, i)
        if part is not None:
            parts.append(part)
    if not parts:
        raise DsparkError(
            f"{', '.join(rollouts)}: expected rounds with drafts, but got none. Roll out with a draft model."
        )

    def joined(key: str) -> torch.Tensor:
        return torch.cat([part[key] for part in parts])

    names = {key: [name for part in parts for name in part[key]] for key in ("domain", "conversation")}
    events = Events(
        joined("confidence_logits"),
        joined("accepted"),
        joined("verified"),
        **names,
        draft_max_prob=joined("draft_max_prob"),
    )
    return events, drafter_hash(module.drafter)
