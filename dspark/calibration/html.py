"""The report as one self-contained HTML page: no script, no outside file, pictures inline.

Left out on purpose: numbers of its own; every one stands in report.json.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from dspark.calibration.events import ALL
from dspark.calibration.figures import DPI
from dspark.calibration.scores import ESTIMATORS
from dspark.calibration.text import percent
from dspark.slot_maps import read_maps

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1b1b1b; background: #fff; max-width: 1060px; margin: 2em auto;
  padding: 0 1em; }
h1 { font-size: 1.6em; margin-bottom: 0.2em; } h2 { font-size: 1.2em; margin-top: 2em; }
.headline { font-size: 1.1em; } figure { margin: 1em 0; } figure img { max-width: 100%; height: auto; }
figcaption, .small { color: #555; font-size: 0.88em; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.86em; font-variant-numeric: tabular-nums; }
th, td { padding: 0.22em 0.7em; text-align: right; white-space: nowrap; }
th:first-child, td:first-child, td.name, th.name { text-align: left; }
thead th { border-bottom: 2px solid #888; } tr.first td { border-top: 1px solid #ccc; }
tr.after td { font-weight: 600; } .interval, .none { color: #707070; font-weight: 400; }
.provenance td { text-align: left; white-space: normal; overflow-wrap: anywhere; vertical-align: top; }
"""
_COLUMNS = ("ECE %", "noise %", "mass ECE %", "Brier", "NLL", "AUROC", "predicted", "observed", "events")
_CAPTION = (
    "Brackets: 95 % bootstrap intervals over conversations. ECE: 15 equal-width bins; mass ECE: 15 bins of equally "
    "many events; noise: the ECE that a perfect calibration would show on this many events. An ECE is too high by "
    "about its noise, and its interval mends a part of that only: one near the noise cannot be improved on. NLL in "
    "nats."
)


def render(data: dict[str, Any], pictures: Sequence[tuple[str, str, bytes]]) -> str:
    """The page. pictures: (heading, caption, PNG bytes), in reading order; the tables stand between them."""
    body = [
        f"<h1>{escape(data['title'])}</h1>",
        f'<p class="headline">{escape(data["headline"])}</p>',
        _list(data["notes"]),
        _figure(*pictures[0]),
        "<h2>Per slot: survival of the draft prefix</h2>",
        _score_table(data, "cumulative", [(ALL, s) for s in _slots(data)]),
        f'<p class="small">{escape(_CAPTION)}</p>',
        *(_figure(*picture) for picture in pictures[1:]),
        "<h2>Per domain: survival, mean over slots</h2>",
        _score_table(data, "cumulative", [(d, "mean") for d in data["domains"]]),
        _domain_table(data),
        *_shift(data),
        *_drift(data),
        "<h2>Per slot: acceptance given all before</h2>",
        _score_table(data, "conditional", [(ALL, s) for s in _slots(data)]),
        "<h2>Where the numbers come from</h2>",
        _provenance(data),
    ]
    head = f"<meta charset='utf-8'><title>{escape(data['title'])}</title><style>{_STYLE}</style>"
    return f"<!doctype html><html lang='en'><head>{head}</head><body>{''.join(body)}</body></html>\n"


def _slots(data: dict[str, Any]) -> list[Any]:
    return [*range(1, data["num_slots"] + 1), "mean", "pooled"]


def _list(notes: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f"<ul>{items}</ul>" if items else ""


def _figure(heading: str, caption: str, picture: bytes) -> str:
    source = base64.b64encode(picture).decode("ascii")
    width = int.from_bytes(picture[16:20], "big") * 96 // DPI  # a PNG's header holds its width in pixels
    image = f'<img alt="{escape(heading)}" width="{width}" src="data:image/png;base64,{source}">'
    return f"<h2>{escape(heading)}</h2><figure>{image}<figcaption>{escape(caption)}</figcaption></figure>"


def _score_table(data: dict[str, Any], law: str, keys: Sequence[tuple[str, Any]]) -> str:
    cells = {(r["estimator"], r["law"], r["domain"], r["slot"]): r for r in data["rows"]}
    label = "domain" if keys[0][1] == "mean" else "slot"
    titles = "".join(f"<th>{escape(c)}</th>" for c in _COLUMNS)
    lines = [f"<thead><tr><th>{label}</th><th class='name'>estimator</th>{titles}</tr></thead>"]
    for domain, slot in keys:
        present = [(n, cells[n, law, domain, slot]) for n in ESTIMATORS if (n, law, domain, slot) in cells]
        for i, (name, row) in enumerate(present):
            kinds = " ".join(["first"] * (i == 0) + ["after"] * (name == "head_calibrated"))
            shown = escape(domain if label == "domain" else str(slot)) if i == 0 else ""
            cell = f"<td>{shown}</td><td class='name'>{escape(ESTIMATORS[name])}</td>{_row_cells(row)}"
            lines.append(f"<tr class='{kinds}'>{cell}</tr>")
    return f"<div class='scroll'><table>{''.join(lines)}</table></div>"


def _row_cells(row: dict[str, Any]) -> str:
    spans = row["interval"]
    values = [_value(row["ece"], spans["ece"], 100, 1)]
    values += [_value(row[name], None, 100, 1) for name in ("ece_noise", "ece_equal_mass")]
    values += [_value(row[m], spans[m], 1, 3) for m in ("brier", "nll", "auroc", "mean_predicted", "mean_observed")]
    return "".join(f"<td>{v}</td>" for v in [*values, f"{row['events']:,}"])


def _value(value: float | None, span: Sequence[float] | None, scale: int, digits: int) -> str:
    if value is None:
        return "<span class='none'>no data</span>"
    text = f"{scale * value:.{digits}f}"
    if span is not None:
        low, high = (f"{scale * v:.{digits}f}" for v in span)
        text += f" <span class='interval'>[{low}, {high}]</span>"
    return text


def _domain_table(data: dict[str, Any]) -> str:
    titles = "<th>domain</th><th>rounds</th><th>conversations</th><th>accepted drafts per round</th>"
    titles += "<th>tokens per round (with the bonus token)</th>"
    lines = []
    for name, d in data["domains"].items():
        averages = (d["accepted_drafts_per_round"], d["tokens_per_round"])
        counts = (f"{d['rounds']:,}", f"{d['conversations']:,}")
        cells = [escape(name), *counts, *(_value(v, None, 1, 3) for v in averages)]
        lines.append("<tr>" + "".join(f"<td>{c}</td>" for c in cells) + "</tr>")
    return f"<p></p><div class='scroll'><table><thead><tr>{titles}</tr></thead>{''.join(lines)}</table></div>"


_SHIFT = {"none": "no calibration", "others": "fitted on the other domains", "all": "fitted on all domains"}


def _shift(data: dict[str, Any]) -> list[str]:
    """How a calibration does on a domain that its fit has not seen."""
    rows = [r for r in data["domain_shift"] if r["law"] == "cumulative" and r["slot"] == "mean"]
    if not rows:
        return []
    lines = []
    for row in rows:
        shown = escape(row["domain"]) if row["estimator"] == "none" else ""
        cell = f"<td>{shown}</td><td class='name'>{_SHIFT[row['estimator']]}</td>{_row_cells(row)}"
        lines.append(f"<tr class='{'first' if shown else ''}'>{cell}</tr>")
    titles = "".join(f"<th>{escape(c)}</th>" for c in _COLUMNS)
    head = f"<thead><tr><th>domain</th><th class='name'>calibration</th>{titles}</tr></thead>"
    table = f"<div class='scroll'><table>{head}{''.join(lines)}</table></div>"
    return ["<h2>Domain shift: survival, mean over slots</h2>", table]


def _drift(data: dict[str, Any]) -> list[str]:
    """What has moved since the older report."""
    if "drift" not in data:
        return []
    names = ("domain", "slot", "gap before", "gap now", "moved [interval]", "ECE % before", "ECE % now",
             "moved [chance]", "")  # fmt: skip
    lines = [f"<thead><tr>{''.join(f'<th>{n}</th>' for n in names)}</tr></thead>"]
    for row in data["drift"]["rows"]:
        cells = [escape(row["domain"]), str(row["slot"])]
        for name, span, scale, digits in (("gap", "gap_interval", 1, 3), ("ece", "ece_chance", 100, 1)):
            cells += [_value(v, None, scale, digits) for v in row[name]]
            cells.append(_value(row[f"{name}_moved"], row[span], scale, digits))
        cells.append("moved" if row["moved"] else "")
        lines.append("<tr>" + "".join(f"<td>{c}</td>" for c in cells) + "</tr>")
    which = (
        "The older calibration on the rounds of now."
        if data["drift"]["same_draft_model"]
        else ("Another draft model than then: each report's own calibration.")
    )
    caption = (
        f"{data['drift']['verdict']} {which} Gap: predicted minus observed survival, with the bootstrap interval of "
        "its move. ECE: chance holds 95 % of the moves when the conversations of both are dealt out anew. Moved: "
        "beyond what the largest of all these moves reaches by chance in one report of twenty."
    )
    table = f"<div class='scroll'><table>{''.join(lines)}</table></div>"
    return ["<h2>Drift since the older report</h2>", table, f'<p class="small">{caption}</p>']


def _provenance(data: dict[str, Any]) -> str:
    calibration = data["calibration"]
    facts = {
        "method": calibration["method"],
        "map per slot": "; ".join(m.told() for m in read_maps(calibration["maps"])),
        "ECE on the fit split, before (%)": ", ".join(map(percent, calibration["ece_before"])),
        "ECE on the fit split, after (%)": ", ".join(map(percent, calibration["ece_after"])),
        "rounds in the fit split": calibration["num_events"],
        "draft model": calibration["drafter_hash"],
        "fit split": calibration["data_hash"],
        "test split": data["data_hash"],
        "bootstrap": f"{data['bootstrap']['replicates']} replicates, key {data['bootstrap']['key']}",
        **data["extra"],
    }
    lines = "".join(f"<tr><td>{escape(str(k))}</td><td>{escape(str(v))}</td></tr>" for k, v in facts.items())
    return f"<table class='provenance'>{lines}</table>"
