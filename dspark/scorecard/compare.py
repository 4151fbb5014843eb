"""Draft models side by side on the same prompts: tau with its interval, and the ratio to the first one's, paired.

Paired: a replicate draws the same conversations for all of them. What makes a prompt easy makes it easy for every draft
model, so the ratio is known better than either tau. Left out on purpose: tests of significance; the interval says it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from dspark.calibration.bootstrap import resample_weights
from dspark.contracts import DsparkError
from dspark.scorecard.rates import OVERALL, Estimate, count_table, estimate, rates
from dspark.scorecard.text import WIDTH, clip, span

SCHEMA = "dspark-drafter-comparison/1"
_NAME = 16  # columns of a draft model's name
_MUST_AGREE = {
    "target": lambda r: f"{r['target']['name']}, {r['target']['dtype']} ({r['target']['fingerprint'][:12]})",
    "max_tokens": lambda r: r["run"]["max_tokens"],
    "run_seed": lambda r: r["run"]["run_seed"],
}


def compare(reports: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """JSON-ready: per common setting and domain a row a draft model. reports: name -> report; the first is the one that
    the others are divided by.

    Raises DsparkError for fewer than two reports, or ones of other targets, prompts, lengths or seeds, or without a
    setting in common.
    """
    _check(reports)
    first = next(iter(reports))
    titles = [e["title"] for e in reports[first]["settings"] if all(_entry(r, e) for r in reports.values())]
    if not titles:
        raise DsparkError(
            "compare: expected a setting that all reports have (verifier, temperature, top-p), but got none. Test the "
            "draft models with the same settings."
        )
    rows = []
    for entry in reports[first]["settings"]:
        if entry["title"] in titles:
            for domain in entry["figures"]:
                rows += _rows(reports, entry, domain)
    drafters = {name: r["drafter"]["hash"] for name, r in reports.items()}
    return {"schema": SCHEMA, "first": first, "drafters": drafters, "titles": titles, "rows": rows}


def paired_ratio(first: Tensor, other: Tensor) -> Estimate:
    """tau of ``other`` over tau of ``first``: counts [C, 3 + 2K] of the same C conversations in the same order."""
    weights = resample_weights(len(first))
    point = rates(other.sum(0))["tau"] / rates(first.sum(0))["tau"]
    return estimate(point, rates(weights @ other)["tau"] / rates(weights @ first)["tau"])


def comparison_text(data: dict[str, Any]) -> str:
    """The comparison at 80 columns, without a final line break."""
    lines = [
        "tau: tokens per round, the target's own included. drafts: accepted drafts per",
        "round, the target's own excluded. ratio: of tau to the first draft model's, the",
        "same conversations resampled for both. [low, high]: 95 %.",
    ]
    short = _short(data["drafters"])
    lines += [clip(f"{short[name]}: {name}", WIDTH - 2) for name in short if short[name] != name]
    for title in data["titles"]:
        lines += ["-" * (WIDTH - 2), title, f"{'':<26}{'tau (own included)':<20}{'drafts':<10}{'ratio of tau':<20}"]
        lines += [_line(row, short) for row in data["rows"] if row["title"] == title]
    return "\n".join(line.rstrip() for line in lines)


def _line(row: dict[str, Any], short: Mapping[str, str]) -> str:
    ratio = "1" if row["ratio"] is None else span(row["ratio"], 3)
    name = f"{clip(row['domain'], 8):<9}{short[row['drafter']]:<{_NAME + 1}}"
    return f"{name}{span(row['tau']):<20}{span({**row['accepted'], 'interval': None}):<10}{ratio:<20}"


def _short(names: Iterable[str]) -> dict[str, str]:
    """name -> what stands in its column: the name, cut in the middle when long, numbered when two are then one."""
    names = list(names)
    cut = [clip(name, _NAME) for name in names]
    twice = len(set(cut)) < len(cut)
    return {name: f"{i + 1} {clip(name, _NAME - 3)}" if twice else cut[i] for i, name in enumerate(names)}


def _rows(reports: Mapping[str, dict[str, Any]], entry: dict[str, Any], domain: str) -> list[dict[str, Any]]:
    order = [c["prompt_id"] for c in entry["conversations"] if domain in (OVERALL, c["domain"])]
    counts = {name: _counts(_entry(report, entry), order) for name, report in reports.items()}
    base = next(iter(counts))
    found = []
    for name, report in reports.items():
        one = _entry(report, entry)["figures"][domain]
        ratio = None if name == base else paired_ratio(counts[base], counts[name])
        head = {"title": entry["title"], "domain": domain, "drafter": name}
        found.append({**head, "tau": one["tau"], "accepted": one["accepted"], "ratio": ratio})
    return found


def _counts(entry: dict[str, Any], order: Sequence[str]) -> Tensor:
    """The counts of the conversations called so, in that order: pairs are made by id, never by place."""
    by_id = {c["prompt_id"]: c for c in entry["conversations"]}
    return count_table([by_id[name] for name in order])


def _entry(report: dict[str, Any], like: dict[str, Any]) -> dict[str, Any]:
    """The report's entry of the same setting; {} without one."""
    return next((e for e in report["settings"] if e["setting"] == like["setting"]), {})


def _check(reports: Mapping[str, dict[str, Any]]) -> None:
    if len(reports) < 2:
        raise DsparkError(f"compare: expected at least two reports, but got {len(reports)}.")
    for what, of in _MUST_AGREE.items():
        _refuse_other(what, {name: of(report) for name, report in reports.items()})
    _refuse_other_prompts(reports)


def _refuse_other(what: str, values: Mapping[str, Any]) -> None:
    if len(set(values.values())) > 1:
        told = "; ".join(f"{name} has {value}" for name, value in values.items())
        raise DsparkError(f"compare: expected reports of the same {what}, but {told}. Test them again on the same.")


def _refuse_other_prompts(reports: Mapping[str, dict[str, Any]]) -> None:
    first, *others = reports
    for other in others:
        one, two = _prompt_ids(reports[first]), _prompt_ids(reports[other])
        said = ""
        if one != two:
            said = f"{first} has {len(one)} and {other} has {len(two)}, {len(one & two)} of them the same"
        elif reports[first]["prompts"]["hash"] != reports[other]["prompts"]["hash"]:
            said = f"the {len(one)} of {first} and {other} differ in order, domains or tokens"
        if said:
            raise DsparkError(
                f"compare: expected reports of the same prompts, but {said}. Test both draft models again with the "
                "same test.prompts, test.split and test.limit."
            )


def _prompt_ids(report: dict[str, Any]) -> set[str]:
    return {c["prompt_id"] for entry in report["settings"] for c in entry["conversations"]}
