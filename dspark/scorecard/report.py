"""drafter_report.json: everything the table and the pictures show, and what it was measured on.

    schema         of this file
    definitions    what each figure means
    target         name, fingerprint, dtype
    drafter        hash (the exported bundle's own), checkpoint, steps, slots, config
    prompts        source, hash over their ids and tokens, count, rows that were dropped
    machine        what the bits belong to
    run            max_tokens, run_seed, batch_size
    settings       per setting: how it sampled, counts, verdict, figures by domain, and the counts of every conversation
                   (so that intervals and comparisons can be made again from the file alone)
    content        sha256 of all of the above: a report that was damaged or edited is no report
No times of day are in it: the same draft model on the same machine gives the same bytes.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dspark import ops
from dspark.contracts import DsparkError
from dspark.corpus.prompts import Prompt, prompts_hash
from dspark.drafter.identity import drafter_hash
from dspark.drafter.model import Drafter
from dspark.scorecard.measure import Conversation, Outcome, RunOptions
from dspark.scorecard.rates import DEFINITIONS, figures
from dspark.sealed import read_sealed, sealed
from dspark.target.decoder import Target

SCHEMA = "dspark-drafter-report/2"
REPORT_NAME = "drafter_report.json"
_AGAIN = "Test the draft model again: lightning test recipes/drafter.yaml."


def build_report(
    outcomes: Sequence[Outcome],
    *,
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Prompt],
    run: RunOptions,
    prompt_facts: dict[str, Any],
    drafter_facts: dict[str, Any],
) -> dict[str, Any]:
    """JSON-ready. drafter: as it would be exported (its hash is the bundle's). prompt_facts, drafter_facts: where they
    came from."""
    config = drafter.config
    return sealed(
        {
            "schema": SCHEMA,
            "definitions": DEFINITIONS,
            "target": {
                "name": target.name,
                "fingerprint": target.fingerprint,
                "dtype": str(target.dtype)[len("torch.") :],
            },
            "drafter": {
                **drafter_facts,
                "hash": drafter_hash(drafter),
                "slots": config.num_predictions,
                "config": config.to_dict(),
            },
            "prompts": {**prompt_facts, "hash": prompts_hash(prompts), "count": len(prompts)},
            "machine": {**ops.fingerprint(), "python": platform.python_version()},
            "run": asdict(run),
            "settings": [_entry(outcome) for outcome in outcomes],
        }
    )


def _entry(outcome: Outcome) -> dict[str, Any]:
    conversations = [_plain(c) for c in outcome.conversations]
    counts = {name: getattr(outcome, name) for name in ("tokens", "drafted", "accepted", "rejected", "differing")}
    return {
        "setting": asdict(outcome.setting),
        "title": outcome.setting.title,
        "sequences": len(conversations),
        **counts,
        "verdict": outcome.verdict,
        "figures": figures(conversations),
        "conversations": conversations,
    }


def _plain(conversation: Conversation) -> dict[str, Any]:
    counts = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(conversation.counts).items()}
    return {"prompt_id": conversation.prompt_id, "domain": conversation.domain, **counts}


def load_report(path: str | Path) -> dict[str, Any]:
    """A report from its file, or from the folder it lies in. Raises DsparkError when it is none, or not as it was
    written."""
    path = Path(path)
    path = path / REPORT_NAME if path.is_dir() else path
    return read_sealed(path, "drafter report", ("schema", SCHEMA), _AGAIN)


def refuse_difference(report: dict[str, Any]) -> None:
    """Raises DsparkError when a speculative sequence was not plain decoding's where it must be."""
    wrong = [f"{s['differing']} of {s['sequences']} ({s['title']})" for s in report["settings"] if s["differing"]]
    if wrong:
        raise DsparkError(
            f"test: expected speculative decoding to equal plain decoding, but sequences differ: {'; '.join(wrong)}. "
            "This machine or build breaks the contract: run `dspark doctor`."
        )
