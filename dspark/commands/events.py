"""From recorded rounds to calibration events: what the confidence head says where the verifier's verdict is known."""

from __future__ import annotations

from pathlib import Path

from tqdm import tqdm

from dspark.calibration.events import Events
from dspark.contracts import DsparkError
from dspark.export.bundle import drafter_hash
from dspark.training.confidence_module import ConfidenceModule
from dspark.training.confidence_test import events_of
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
    data.refuse_foreign("predict", module.target.vocab_size, module.target.config.max_position_embeddings)
    module.refuse_other_drafts(data, "predict")
    batches = tqdm(data.predict_dataloader(), desc="confidence", leave=False, disable=quiet)
    parts = (module.predict_step(batch, i) for i, batch in enumerate(batches))
    events = events_of(part for part in parts if part is not None)
    if events is None:
        raise DsparkError(
            f"{', '.join(rollouts)}: expected rounds with drafts, but got none. Roll out with a draft model."
        )
    return events, drafter_hash(module.drafter)
