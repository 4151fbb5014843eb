"""The report as plain text, 80 columns, for the terminal. Every table says which tau it means."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from dspark.scorecard.rates import FEW, OVERALL, Estimate

WIDTH = 80
_NAME, _CELL, _PER_LINE = 12, 7, 9  # columns of a name, of a slot's cell; slots in a line
_LEGEND = f"""\
tau: tokens per round, the target's own included. drafts: accepted drafts per
round, the target's own excluded. slot k: accepted in % of the rounds where all
slots before it were; survival: up to and including it, in % of all blocks.
blocks: how many rounds that are; * marks a share of fewer than {FEW}.
[low, high]: 95 %, whole conversations resampled; too narrow for a handful."""


def report_text(report: dict[str, Any]) -> str:
    """The whole report as one text without a final line break."""
    target, drafter, prompts = report["target"], report["drafter"], report["prompts"]
    lines = [
        f"draft model {drafter['hash'][:12]} for {target['name']}, {target['dtype']}"[:WIDTH],
        f"{prompts['count']} prompts of {prompts['source']}, up to {report['run']['max_tokens']} tokens"[:WIDTH],
        *_LEGEND.splitlines(),
    ]
    for entry in report["settings"]:
        lines += ["-" * (WIDTH - 2), entry["title"], *_lengths(entry), "", *_slots(entry), "", *_verdict(entry)]
    return "\n".join(line.rstrip() for line in lines)


def span(one: Estimate, digits: int = 2) -> str:
    """1.64 [1.55, 1.73], or what of it there is."""
    if one["value"] is None:
        return "-"
    ends = one["interval"]
    tail = f" [{ends[0]:.{digits}f}, {ends[1]:.{digits}f}]" if ends else ""
    return f"{one['value']:.{digits}f}{tail}"


def clip(name: str, width: int) -> str:
    """A name cut to a column in its middle: names differ at the beginning, paths at the end."""
    tail = width // 2
    return name if len(name) <= width else f"{name[: width - tail - 1]}…{name[-tail:]}"


def _lengths(entry: dict[str, Any]) -> list[str]:
    head = f"{'':<{_NAME}}{'rounds':>8}   {'tau (own included)':<22}{'drafts (own excluded)':<22}"
    rows = [
        f"{clip(name, _NAME - 1):<{_NAME}}{one['rounds']:>8}   {span(one['tau']):<22}{span(one['accepted']):<22}"
        for name, one in entry["figures"].items()
    ]
    return [head, *rows]


def _slots(entry: dict[str, Any]) -> list[str]:
    slots = len(entry["figures"][OVERALL]["tried"])
    lines = []
    for start in range(0, slots, _PER_LINE):
        part = slice(start, start + _PER_LINE)
        numbers = range(start + 1, min(start + _PER_LINE, slots) + 1)
        lines.append(f"{'slot':<{_NAME}}" + "".join(f"{k:>{_CELL - 1}} " for k in numbers))
        lines += [f"{label:<{_NAME}}{cells}" for label, cells in _slot_rows(entry["figures"], part)]
    return lines


def _slot_rows(found: dict[str, Any], part: slice) -> Iterator[tuple[str, str]]:
    overall = found[OVERALL]
    yield "blocks", "".join(f"{n:>{_CELL - 1}} " for n in overall["tried"][part])
    for name, one in found.items():
        yield clip(name, _NAME - 1), _percents([e["value"] for e in one["conditional"][part]], one["tried"][part])
        if name == OVERALL:
            for end, label in enumerate(("  low", "  high")):
                yield label, _percents([e["interval"] and e["interval"][end] for e in one["conditional"][part]])
    yield "survival", _percents([e["value"] for e in overall["survival"][part]])


def _percents(values: list[float | None], blocks: Sequence[int] = ()) -> str:
    """A cell a value; marked where it comes of few blocks."""
    texts = ["-" if v is None else f"{100 * v:.1f}" for v in values]
    marks = ["*" if v is not None and n < FEW else " " for v, n in zip(values, blocks, strict=True)] if blocks else []
    return "".join(f"{text:>{_CELL - 1}}{mark}" for text, mark in zip(texts, marks or " " * len(texts), strict=True))


def _verdict(entry: dict[str, Any]) -> list[str]:
    compared = {
        "equal": f"plain decoding: {entry['differing']} of {entry['sequences']} sequences differ",
        "different": f"plain decoding: {entry['differing']} of {entry['sequences']} sequences DIFFER",
        "inconclusive": "plain decoding: inconclusive, for drafts, acceptances or rejections are missing",
        "not compared": "plain decoding: not compared, for rejection draws tokens of its own",
    }[entry["verdict"]]
    counts = f"{entry['drafted']} drafted, {entry['accepted']} accepted, {entry['rejected']} rounds with a rejection"
    return [compared, counts]
