"""The calibration report: does the confidence head say what happens, before and after, and does it earn its place.

`build_report` writes report.json (every number), report.html (one self-contained page) and the pictures as PNG files
into a folder, and the same into a TensorBoard folder. Report on another split than the calibration was fitted on.
Left out on purpose: collecting events (the runner's work).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from dspark.calibration import bootstrap, figures
from dspark.calibration.board import write_board
from dspark.calibration.choices import domain_shift, threshold_sweep
from dspark.calibration.drift import compare, conversation_sums, refuse_other_slots, verdict
from dspark.calibration.events import ALL, Events
from dspark.calibration.html import render
from dspark.calibration.measures import DEFAULT_BINS
from dspark.calibration.record import Calibration
from dspark.calibration.scores import LAWS, Learned, reliability, score_rows
from dspark.calibration.text import percent, table_lines
from dspark.contracts import DsparkError
from dspark.files import atomic_write
from dspark.sealed import read_sealed, sealed

_SWEEP = (
    "A round verifies its drafts up to the first whose calibrated survival lies below the threshold; read off rounds "
    "that were verified whole."
)
FORMAT = "dspark-calibration-report/2"
PICTURES = ("overview", "reliability-survival", "reliability-conditional", "thresholds")
_AGAIN = "Make the report again: lightning test recipes/confidence.yaml, or dspark report."


@dataclass(frozen=True)
class Report:
    """data: what report.json holds (plain JSON values). directory: where the files are."""

    data: dict[str, Any]
    directory: Path

    def row(self, estimator: str, law: str, slot: int | str, domain: str = ALL) -> dict[str, Any]:
        """One row of numbers; slot 1 ... K, "mean" or "pooled" (see scores.py). Raises KeyError if there is none."""
        key = (estimator, law, slot, domain)
        for row in self.data["rows"]:
            if (row["estimator"], row["law"], row["slot"], row["domain"]) == key:
                return row
        raise KeyError(f"report: no row for {key}")


def build_report(
    events_test: Events,
    calibration: Calibration,
    out_dir: str | Path,
    title: str = "Confidence calibration",
    extra: dict[str, Any] | None = None,
    *,
    events_calibration: Events | None = None,
    against: dict[str, Any] | None = None,
    tensorboard_dir: str | Path | None = None,
    replicates: int = bootstrap.REPLICATES,
    key: int = 0,
) -> Report:
    """Writes the report on `events_test` and returns it.

    events_calibration: the split the calibration was fitted on; gives the position prior, the other methods and the
    domain shift. against: an older report's data, to tell drift from. extra: facts shown under
    provenance (JSON values: model names, sampling settings). key: fixes the bootstrap. Raises DsparkError when the
    calibration has another number of slots or was fitted on other events, `extra` is not JSON, or the folder cannot be
    written.
    """
    if not bootstrap.LEAST <= replicates <= bootstrap.MOST:
        wanted = f"{bootstrap.LEAST} to {bootstrap.MOST} bootstrap replicates"
        raise DsparkError(f"calibration report: expected {wanted}, but got {replicates}.")
    out_dir = Path(out_dir)
    data = _data(events_test, calibration, events_calibration, title, _plain(extra or {}), replicates, key)
    if against is not None:
        data["drift"] = _drift(against, events_test, calibration, data["extra"], replicates, key)
        data["headline"] += f" {data['drift']['verdict']}"
    data = sealed(data)
    drawn = _figures(data)
    pictures = [(heading, caption, figures.png(figure)) for _, heading, caption, figure in drawn]
    _clear(out_dir)
    for (name, *_), (_, _, picture) in zip(drawn, pictures, strict=True):
        atomic_write(out_dir / f"{name}.png", picture)
    atomic_write(out_dir / "report.html", render(data, pictures))
    if tensorboard_dir is not None:
        named = [(name, picture) for (name, *_), (_, _, picture) in zip(drawn, pictures, strict=True)]
        write_board(data, named, tensorboard_dir)
    atomic_write(out_dir / "report.json", json.dumps(data, indent=1, allow_nan=False) + "\n")
    return Report(data, out_dir)


def _clear(folder: Path) -> None:
    """Takes an earlier report away, its numbers first: one that is cut off leaves none, and not two halves."""
    for name in ("report.json", "report.html", *(f"{picture}.png" for picture in PICTURES)):
        try:
            (folder / name).unlink(missing_ok=True)
        except OSError as error:
            raise DsparkError(
                f"{folder / name}: expected a place for a report, but got: {error.strerror or error}."
            ) from error


def load_report(directory: str | Path) -> Report:
    """The report that build_report wrote, from its folder or its report.json. Raises DsparkError when it is absent,
    another format, or not as it was written."""
    path = Path(directory)
    path = path if path.suffix == ".json" else path / "report.json"
    return Report(read_sealed(path, "calibration report", ("format", FORMAT), _AGAIN), path.parent)


def format_table(report: Report) -> str:
    """The report as plain text of at most 80 columns."""
    return "\n".join(table_lines(report.data))


def _data(
    events: Events,
    calibration: Calibration,
    fitted_on: Events | None,
    title: str,
    extra: dict[str, Any],
    replicates: int,
    key: int,
) -> dict[str, Any]:
    calibration.check(num_slots=events.num_slots)
    learned, shift = Learned(), []
    if fitted_on is not None:
        refuse_other_events(calibration, fitted_on)
        learned = Learned.on(fitted_on, calibration)
        shift = domain_shift(fitted_on, events, calibration, replicates, key)
    rows = _rounded(score_rows(events, calibration, learned, replicates, key))
    data = {
        "format": FORMAT,
        "title": title,
        "headline": "",
        "notes": [],
        "slot_numbering": "slot 1 is the first draft token",
        "num_slots": events.num_slots,
        "domains": _rounded({name: _domain_facts(part) for name, part in events.by_domain()}),
        "rows": rows,
        "reliability": _rounded(reliability(events, calibration)),
        "thresholds": _rounded(threshold_sweep(events, calibration.maps)),
        "domain_shift": _rounded(shift),
        "conversations": _rounded(conversation_sums(events, calibration.maps)),
        "bootstrap": {"replicates": replicates, "key": key, "unit": "conversation", "level": 0.95},
        "bins": DEFAULT_BINS,
        "calibration": calibration.to_dict(),
        "data_hash": events.data_hash(),
        "extra": extra,
    }
    return {**data, "headline": _headline(data), "notes": _notes(data, events, fitted_on)}


def refuse_other_events(calibration: Calibration, fitted_on: Events) -> None:
    """Raises DsparkError unless the calibration was fitted on these events: what is learned from others, and stands
    beside it, would not be a comparison."""
    calibration.check(num_slots=fitted_on.num_slots)
    if calibration.data_hash != fitted_on.data_hash():
        raise DsparkError(
            "calibration report: expected the events that the calibration was fitted on "
            f"({calibration.data_hash[:12]}), but got others ({fitted_on.data_hash()[:12]}). Give the rollouts that "
            "dspark calibrate had, all of them, or none."
        )


def _drift(
    older: dict[str, Any], events: Events, calibration: Calibration, extra: dict[str, Any], replicates: int, key: int
) -> dict[str, Any]:
    """The older calibration on the rounds of now where it is of the same draft model: a calibration fitted anew would
    hide the drift. Else each report's own."""
    refuse_other_slots(older, events.num_slots)
    before = Calibration.from_dict(older["calibration"])
    same = before.drafter_hash == calibration.drafter_hash
    now = conversation_sums(events, (before if same else calibration).maps)
    rows = compare(older["conversations"], now, events.num_slots, replicates, key)
    alone = sorted(set(now["domains"]) ^ set(older["conversations"]["domains"]))
    sampled = [older["extra"].get("sampled"), extra.get("sampled")]
    return {"against": older["data_hash"], "same_draft_model": same, "sampled": sampled, "left_out": alone,
            "verdict": verdict(rows), "rows": _rounded(rows)}  # fmt: skip


def _domain_facts(events: Events) -> dict[str, Any]:
    whole = events.accepted[events.verified == events.num_slots].double()  # a shorter round caps what it can accept
    mean = float(whole.mean()) if len(whole) else None
    return {
        "rounds": events.num_events,
        "whole_rounds": len(whole),
        "conversations": len(set(zip(events.domain, events.conversation, strict=True))),
        "accepted_drafts_per_round": mean,
        "tokens_per_round": None if mean is None else 1 + mean,
    }


def _headline(data: dict[str, Any]) -> str:
    before, after = (_mean_row(data, name) for name in ("head", "head_calibrated"))
    if after["ece"] is None:
        return "No slot was verified: there is nothing to report."
    span = after["interval"]["ece"]
    interval = "" if span is None else f" (95 % interval {percent(span[0])} to {percent(span[1])} %)"
    return (
        f"ECE of the survival, mean over slots: {percent(before['ece'])} % before, {percent(after['ece'])} % after "
        f"calibration{interval}. A perfect calibration would show {percent(after['ece_noise'])} % on this many rounds."
    )


def _notes(data: dict[str, Any], events: Events, fitted_on: Events | None) -> list[str]:
    notes = []
    if data["data_hash"] == data["calibration"]["data_hash"]:
        notes.append("These are the rounds the calibration was fitted on: the numbers after calibration flatter it.")
    elif shared := len(_conversations(events) & _conversations(fitted_on)):
        notes.append(f"{shared} conversations are of the fit split too: the numbers after calibration flatter it.")
    unfitted = [k + 1 for k, n in enumerate(data["calibration"]["slot_events"]) if n == 0]
    if unfitted:
        notes.append(f"No data to fit slot {_list(unfitted)}: no calibration there.")
    unseen = [k + 1 for k, n in enumerate(events.conditional_observed.sum(0).tolist()) if n == 0]
    if unseen:
        notes.append(f"No round of this split reached slot {_list(unseen)}.")
    missing = [] if fitted_on else ["position prior, other methods and domain shift (pass the calibration split)"]
    missing += ["draft's max-probability (not recorded)"] if events.draft_max_prob is None else []
    if missing:
        notes.append(f"Left out: {' and '.join(missing)}.")
    if data["domains"][ALL]["conversations"] < 2:
        notes.append("Only one conversation: no intervals.")
    return notes


def _figures(data: dict[str, Any]) -> list[tuple[str, str, str, Figure]]:
    """(file name, heading, caption, figure), in reading order."""
    bars = "Bars: 95 % binomial error per bin; larger marks hold more rounds. Below: where the predictions lie."
    overview = figures.overview(data["rows"], data["num_slots"])
    caption = (
        "Survival of slot k: the first k drafts are all accepted. Bars: 95 % bootstrap intervals over conversations "
        "(an ECE's reaches down: it is too high by its noise). A "
        "position prior is calibrated by construction but ranks nothing; the head earns its place in NLL and AUROC."
    )
    diagrams = {law: figures.reliability_diagram(data["reliability"][law], law) for law in LAWS}
    return [
        ("overview", "Overview", caption, overview),
        ("reliability-survival", "Reliability of the survival", bars, diagrams["cumulative"]),
        ("reliability-conditional", "Reliability of each slot given all before", bars, diagrams["conditional"]),
        *([("thresholds", "What a threshold would verify", _SWEEP, figures.sweep(data))] if data["thresholds"] else []),
    ]


def _conversations(events: Events | None) -> set[tuple[str, str]]:
    return set(zip(events.domain, events.conversation, strict=True)) if events else set()


def _mean_row(data: dict[str, Any], estimator: str) -> dict[str, Any]:
    return Report(data, Path()).row(estimator, "cumulative", "mean")


def _list(values: list[int]) -> str:
    return ", ".join(map(str, values))


def _plain(extra: dict[str, Any]) -> dict[str, Any]:
    try:
        return json.loads(json.dumps(extra, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise DsparkError(f"calibration report: expected extra to be plain JSON values, but got: {error}.") from error


def _rounded(value: Any) -> Any:
    """Floats to 6 decimals: what a reader can use, and the same whatever order a sum was taken in."""
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    return [_rounded(v) for v in value] if isinstance(value, (list, tuple)) else value
