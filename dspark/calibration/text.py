"""The report as plain text, 80 columns, for the terminal. Left out on purpose: colours, and what report.html is for."""

from __future__ import annotations

import textwrap
from typing import Any

from dspark.calibration.events import ALL
from dspark.calibration.scores import ESTIMATORS
from dspark.slot_maps import read_maps

_WIDTH = 80
_HEADER = "     T  before   after  95% interval   noise   AUROC  predicted  observed"


def percent(value: float | None) -> str:
    """A share as a percentage with one decimal ("12.3"), or "no data"."""
    return "no data" if value is None else f"{100 * value:.1f}"


def table_lines(data: dict[str, Any]) -> list[str]:
    """Lines of at most 80 columns from a report's JSON data."""
    cells = {(r["estimator"], r["law"], r["domain"], r["slot"]): r for r in data["rows"]}
    slots = [*range(1, data["num_slots"] + 1), "mean"]
    maps = read_maps(data["calibration"]["maps"])
    temperatures = ["-" if m.knots else f"{m.temperature:.2f}" for m in maps] + [""]
    domains = [d for d in data["domains"] if d != ALL]
    shown = _names(domains)
    counts = data["domains"][ALL]
    lines = [
        data["title"][:_WIDTH],
        f"{counts['rounds']} rounds, {counts['conversations']} conversations; in {counts['whole_rounds']} whole rounds "
        f"{_number(counts['accepted_drafts_per_round'], 2)} accepted drafts each",
        "",
        "Survival of the draft prefix, ECE in %",
        f"{'slot':>6}{_HEADER}",
    ]
    lines += [_line(f"{s:>6}", t, cells, ALL, s) for s, t in zip(slots, temperatures, strict=True)]
    if domains:
        lines += ["", f"{'domain':<13}{_HEADER[7:]}"]
        lines += [_line(f"{shown[d]:<12}", None, cells, d, "mean") for d in domains]
    lines += ["", *_estimator_lines(cells), "", *_shift_lines(data), *_sweep_lines(data), *drift_lines(data)]
    lines += [wrapped for note in data["notes"] for wrapped in _wrapped(note, "- ")]
    return [line.rstrip() for line in lines]


def _names(domains: list[str], width: int = 12) -> dict[str, str]:
    """For a terminal: without control characters; a long one keeps its beginning and its end."""
    found = {}
    for domain in domains:
        plain = "".join(c if c.isprintable() else "?" for c in domain)
        half = width // 2
        found[domain] = plain if len(plain) <= width else f"{plain[:half]}…{plain[half + 1 - width :]}"
    return found


def _line(label: str, temperature: str | None, cells: dict[Any, Any], domain: str, slot: Any) -> str:
    before, after = (cells[name, "cumulative", domain, slot] for name in ("head", "head_calibrated"))
    middle = "" if temperature is None else f"{temperature:>6}"
    return (
        f"{label}{middle} {percent(before['ece']):>7} {percent(after['ece']):>7}  {_span(after):>12}"
        f" {percent(after['ece_noise']) if after['events'] else '-':>7} {_number(after['auroc']):>7}"
        f" {_number(after['mean_predicted']):>10} {_number(after['mean_observed']):>9}"
    )


def _estimator_lines(cells: dict[Any, Any]) -> list[str]:
    lines = [f"{'All slots pooled':<26}{'survival':>16}{'':14}{'given all before':>20}"]
    lines.append(f"{'':<26}{'ECE %':>7}{'NLL':>8}{'AUROC':>8}{'':7}{'ECE %':>7}{'NLL':>8}{'AUROC':>8}")
    for name, label in ESTIMATORS.items():
        if (name, "cumulative", ALL, "pooled") not in cells:
            lines += [f"{label:<26}not given"] if name in ("draft_max_probability", "position_prior") else []
            continue
        halves = []
        for law in ("cumulative", "conditional"):
            row = cells[name, law, ALL, "pooled"]
            halves.append(f"{percent(row['ece']):>7}{_number(row['nll']):>8}{_number(row['auroc']):>8}")
        lines.append(f"{label:<26}{halves[0]}{'':7}{halves[1]}")
    return lines


def _shift_lines(data: dict[str, Any]) -> list[str]:
    rows = [r for r in data["domain_shift"] if r["law"] == "cumulative" and r["slot"] == "mean"]
    if not rows:
        return []
    lines = ["Domain shift: survival ECE in %, mean over slots, by what was calibrated on"]
    lines.append(f"{'':<13}{'nothing':>9}{'the other domains':>32}{'all domains':>22}")
    for domain in dict.fromkeys(r["domain"] for r in rows):
        found = {r["estimator"]: r for r in rows if r["domain"] == domain}
        spans = [f"{percent(found[n]['ece'])} {_span(found[n])}" for n in ("others", "all")]
        lines.append(f"{_names([domain])[domain]:<13}{percent(found['none']['ece']):>9}{spans[0]:>32}{spans[1]:>22}")
    return [*lines, ""]


def _sweep_lines(data: dict[str, Any]) -> list[str]:
    rows = data["thresholds"][::2]
    if not rows:
        return []
    lines = ["Verifying while the calibrated survival is at least a threshold, per round"]
    for label, key, digits in (("threshold", "threshold", 1), ("verified", "verified", 2), ("tokens", "tokens", 2),
                               ("acceptance", "acceptance", 2)):  # fmt: skip
        lines.append(f"{label:<12}" + "".join(f"{_number(r[key], digits):>6}" for r in rows))
    return [*lines, ""]


def drift_lines(data: dict[str, Any]) -> list[str]:
    """What has moved since an older report; nothing without one."""
    if "drift" not in data:
        return []
    own = "" if data["drift"]["same_draft_model"] else "; another draft model, so with its own calibration"
    lines = _wrapped(
        "Drift since the older report: predicted minus observed survival, and ECE in %, of the older calibration on "
        f"the rounds of now{own}. *: moved, by one test of the whole table."
    )
    lines.append(f"{'domain':<11}{'slot':>5}{'gap':>8}{'now':>8}{'moved':>25}{'ECE':>7}{'now':>6}")
    for row in data["drift"]["rows"]:
        gaps = "".join(f"{_number(v):>8}" for v in row["gap"])
        span = row["gap_interval"]
        moved = "-" if span is None else f"{row['gap_moved']:+.3f} [{span[0]:+.3f}, {span[1]:+.3f}]"
        errors = f"{percent(row['ece'][0]):>7}{percent(row['ece'][1]):>6}"
        star = "  *" if row["moved"] else ""
        lines.append(f"{_names([row['domain']], 10)[row['domain']]:<11}{row['slot']:>5}{gaps}{moved:>25}{errors}{star}")
    then, now = data["drift"]["sampled"]
    if then != now:
        lines += _wrapped(f"Sampled then with {then or 'unknown settings'}, now with {now or 'unknown settings'}.")
    lines += _wrapped(data["drift"]["verdict"])
    if alone := data["drift"]["left_out"]:
        lines += _wrapped(f"Left out, for only one of the reports has them: {', '.join(_names(alone).values())}.")
    return [*lines, ""]


def _span(row: dict[str, Any]) -> str:
    span = row["interval"]["ece"]
    return "-" if span is None else f"[{percent(span[0])}, {percent(span[1])}]"


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _wrapped(text: str, bullet: str = "") -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=bullet, subsequent_indent=" " * len(bullet))
