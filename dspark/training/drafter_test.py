"""What `lightning test recipes/drafter.yaml` does: speculative rollouts on prompts, a report, its table and picture.

The draft model runs as an exported bundle would: eval mode, the target's dtype, the inference operations. Left out on
purpose: sharing the prompts out among ranks (the first one does them all).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dspark.calibration.figures import png
from dspark.corpus.prompts import PromptSet, load_prompts
from dspark.drafter.model import Drafter
from dspark.files import atomic_write
from dspark.runner import EngineOptions
from dspark.scorecard.measure import Outcome, RunOptions, measure
from dspark.scorecard.pictures import slots_figure, write_board
from dspark.scorecard.rates import OVERALL
from dspark.scorecard.report import REPORT_NAME, build_report
from dspark.target.decoder import Target
from dspark.target.load import load_tokenizer
from dspark.training.bars import bar
from dspark.training.checkpoint import served
from dspark.training.options import RolloutOptions

PICTURE = "drafter_slots.png"


def rollout_report(
    target: Target, source: str, drafter: Drafter, options: RolloutOptions, facts: dict[str, Any], quiet: bool
) -> dict[str, Any]:
    """Rolls out every setting of the options and returns the report (scorecard/report.py).

    source: where the target's tokenizer comes from. drafter: as trained. facts: what the report says of its origin.
    Raises DsparkError when no usable prompt is there, or the operations fail their self-test.
    """
    chosen = _prompts(source, target, options)
    prompts = chosen.prompts[: options.limit or None]
    run = RunOptions(options.max_tokens, options.run_seed, options.batch_size)
    running = served(drafter, target)
    told = {"source": options.prompts, "split": options.split, "limit": options.limit, "dropped": len(chosen.dropped)}
    with bar("rollouts", len(prompts) * sum(1 + s.equals_plain for s in options.settings), quiet) as shown:
        outcomes: list[Outcome] = [
            measure(target, running, prompts, setting, run, lambda *_: shown.update()) for setting in options.settings
        ]
    return build_report(
        outcomes, target=target, drafter=drafter, prompts=prompts, run=run, prompt_facts=told, drafter_facts=facts
    )


def write_report(report: dict[str, Any], folder: str | Path, loggers: Iterable[Any], step: int) -> None:
    """drafter_report.json and drafter_slots.png into the folder; picture and figures into TensorBoard."""
    picture = png(slots_figure(report))
    atomic_write(Path(folder) / REPORT_NAME, json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    atomic_write(Path(folder) / PICTURE, picture)
    values = {
        f"test/{entry['title']}/{name}": entry["figures"][OVERALL][name]["value"]
        for entry in report["settings"]
        for name in ("tau", "accepted")
        if entry["figures"][OVERALL]["rounds"]
    }
    for logger in loggers:
        logger.log_metrics(values, step)
        if hasattr(logger.experiment, "add_image"):
            write_board(logger.experiment, "test/acceptance by slot", picture, step)


def _prompts(source: str, target: Target, options: RolloutOptions) -> PromptSet:
    """The prompts that fit the context with their answers."""
    longest = min(target.config.max_position_embeddings, EngineOptions().kv_tokens) - options.max_tokens
    tokenizer: Any = load_tokenizer(source)
    return load_prompts(options.prompts, tokenizer, options.split or None, max_tokens=longest)
