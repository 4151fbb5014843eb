"""Draft models side by side: paired ratios, refusals, what is written and printed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

from dspark import cli
from dspark.commands.compare import read_reports
from dspark.contracts import DsparkError
from dspark.runner.acceptance import Counts
from dspark.scorecard.compare import compare, comparison_text, paired_ratio
from dspark.scorecard.measure import Conversation
from dspark.scorecard.pictures import decay_figure, slots_figure
from dspark.scorecard.rates import FEW, count_table, estimate, rates
from dspark.scorecard.setting import Setting
from dspark.scorecard.text import report_text

COUPLED, GREEDY = Setting("coupled", 0.2, 0.9), Setting("greedy", 0.0)


def conversations(gain: int = 0, slots: int = 3, count: int = 24) -> list[Conversation]:
    """Hard and easy prompts; gain: tokens more over the ten rounds of each, give or take one."""
    found = []
    for i in range(count):
        tokens = 12 + 2 * (i % 7) + (gain + (-1) ** i if gain else 0)
        counts = Counts(10, tokens, tokens - 10, (10,) * slots, tuple(max(0, 5 + i % 3 - k) for k in range(slots)))
        found.append(Conversation(f"p{i}", ("math", "code")[i % 2], counts))
    return found


def table(some: list[Conversation]) -> torch.Tensor:
    return count_table([{name: getattr(c.counts, name) for name in Counts.__slots__} for c in some])


def test_a_ratio_is_paired_by_conversation() -> None:
    one, other = table(conversations()), table(conversations(gain=2))
    got = paired_ratio(one, other)
    assert got["value"] == pytest.approx(float(other[:, 1].sum() / one[:, 1].sum()))
    low, high = got["interval"]
    assert 1.0 < low < got["value"] < high  # surely better, though each tau alone spreads wider than the gain
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(24, (400, 2, 24), generator=generator)
    alone = rates(other[drawn[:, 1]].sum(1))["tau"] / rates(one[drawn[:, 0]].sum(1))["tau"]
    unpaired = estimate(torch.tensor(got["value"]), alone)["interval"]
    assert unpaired[0] < 1.0
    assert high - low < 0.5 * (unpaired[1] - unpaired[0])


def test_twice_the_same_draft_model_is_exactly_one(make_report: Callable[..., Any]) -> None:
    report = make_report({COUPLED: conversations()})
    rows = compare({"a": report, "b": report})["rows"]
    assert [r["ratio"] for r in rows if r["drafter"] == "b"] == [{"value": 1.0, "interval": None}] * 3
    assert all(r["ratio"] is None for r in rows if r["drafter"] == "a")


def test_settings_in_common_are_compared_per_domain(make_report: Callable[..., Any]) -> None:
    first = make_report({COUPLED: conversations(), GREEDY: conversations()})
    second = make_report({GREEDY: conversations(gain=3, slots=5)}, identity="b" * 64)  # a longer block is no obstacle
    data = compare({"dspark": first, "dflash": second})
    assert data["titles"] == [GREEDY.title]
    assert data["drafters"] == {"dspark": "a" * 64, "dflash": "b" * 64}
    assert [(r["domain"], r["drafter"]) for r in data["rows"]] == [
        (domain, name) for domain in ("overall", "code", "math") for name in ("dspark", "dflash")
    ]
    assert data["rows"][1]["ratio"] == paired_ratio(table(conversations()), table(conversations(3)))
    text = comparison_text(data)
    assert "own included" in text
    assert "own excluded" in text
    assert all(len(line) <= 80 for line in text.splitlines())


@pytest.mark.parametrize(
    ("where", "key"),
    [("target", "fingerprint"), ("target", "dtype"), ("prompts", "hash"), ("run", "max_tokens"), ("run", "run_seed")],
)
def test_what_cannot_be_compared_is_refused(make_report: Callable[..., Any], where: str, key: str) -> None:
    one, other = make_report({GREEDY: conversations()}), make_report({GREEDY: conversations()})
    other[where][key] = "another"
    with pytest.raises(DsparkError, match="expected reports of the same"):
        compare({"a": one, "b": other})


def test_one_report_or_no_common_setting_is_refused(make_report: Callable[..., Any]) -> None:
    one, other = make_report({GREEDY: conversations()}), make_report({COUPLED: conversations()})
    with pytest.raises(DsparkError, match="at least two"):
        compare({"a": one})
    with pytest.raises(DsparkError, match="a setting that all reports have"):
        compare({"a": one, "b": other})


def test_the_verb(make_report: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, gain in (("a", 0), ("b", 2)):
        (tmp_path / name).mkdir()
        report = make_report({COUPLED: conversations(gain)})
        (tmp_path / name / "drafter_report.json").write_text(json.dumps(report))
    out = tmp_path / "out"
    named = [f"one={tmp_path / 'a'}", str(tmp_path / "b" / "drafter_report.json")]
    assert cli.main(["compare", *named, "--out", str(out)]) == 0
    assert "ratio of tau" in capsys.readouterr().out
    data = json.loads((out / "comparison.json").read_text())
    assert list(data["drafters"]) == ["one", named[1]]
    assert (out / "comparison_slots.png").read_bytes().startswith(b"\x89PNG")
    assert cli.main(["compare", f"x={tmp_path / 'a'}", f"x={tmp_path / 'b'}", "--out", str(out)]) == cli.USER_ERROR
    assert "'x' twice" in capsys.readouterr().err
    (tmp_path / "a" / "drafter_report.json").write_text('{"schema": "other/1"}')
    assert cli.main(["compare", *named, "--out", str(out)]) == cli.USER_ERROR
    assert "expected a drafter report of schema" in capsys.readouterr().err


def test_pairs_are_made_by_id(make_report: Callable[..., Any]) -> None:
    one, other = make_report({GREEDY: conversations()}), make_report({GREEDY: conversations(gain=2)})
    wanted = compare({"a": one, "b": other})["rows"]
    turned = {**other, "settings": [{**e, "conversations": e["conversations"][::-1]} for e in other["settings"]]}
    assert turned["settings"][0]["conversations"] != other["settings"][0]["conversations"]
    assert compare({"a": one, "b": turned})["rows"] == wanted


def test_other_prompts_are_refused_in_words(make_report: Callable[..., Any]) -> None:
    one, other = make_report({GREEDY: conversations(count=8)}), make_report({GREEDY: conversations(count=3)})
    with pytest.raises(DsparkError, match=r"big has 8 and small has 3, 3 of them the same. Test both"):
        compare({"big": one, "small": other})
    other = {**one, "prompts": {**one["prompts"], "hash": "q" * 64}}
    with pytest.raises(DsparkError, match="the 8 of a and b differ in order, domains or tokens"):
        compare({"a": one, "b": other})


def test_reversed_conversations_in_a_file_are_no_report(make_report: Callable[..., Any], tmp_path: Path) -> None:
    report = make_report({GREEDY: conversations()})
    report["settings"][0]["conversations"].reverse()
    (tmp_path / "b.json").write_text(json.dumps(report))
    with pytest.raises(DsparkError, match="edited or damaged"):
        read_reports([f"b={tmp_path / 'b.json'}"])


def test_long_names_keep_both_ends_and_stay_apart(make_report: Callable[..., Any]) -> None:
    names = ["short", "the first of the long names", "runs/elsewhere/drafter_report.json"]
    text = comparison_text(compare(dict.fromkeys(names, make_report({GREEDY: conversations()}))))
    assert "the fir…ng names: the first of the long names\n" in text
    assert "overall  runs/el…ort.json 1." in text
    assert "short:" not in text
    alike = [f"runs/number {i} of many/drafter_report.json" for i in range(2)]
    text = comparison_text(compare(dict.fromkeys(alike, make_report({GREEDY: conversations()}))))
    lines = [line for line in text.splitlines() if line.startswith("overall")]
    assert len({line[9:25] for line in lines}) == 2
    assert alike[1] in text
    assert max(map(len, text.splitlines())) <= 80


def shown(figure: Figure) -> tuple[set[float], set[float]]:
    """The heights of (full, hollow) marks in the first panel; bars have no marks."""
    marked = [line for line in figure.axes[0].get_lines() if line.get_marker() not in ("", "None", None)]
    found: tuple[set[float], set[float]] = (set(), set())
    for line in marked:
        found[line.get_markerfacecolor() == "none"].update(float(y) for y in line.get_ydata())
    return found


@pytest.mark.parametrize(("blocks", "full"), [(FEW, True), (FEW - 1, False)])
def test_a_share_of_few_blocks_is_pale_in_the_picture_and_marked_in_the_table(
    make_report: Callable[..., Any], blocks: int, full: bool
) -> None:
    counts = Counts(100, 150, 50, (100, blocks), (50, blocks))
    report = make_report({GREEDY: [Conversation("p", "math", counts)]})
    for figure in (decay_figure({"a": report, "b": report}, [GREEDY.title]), slots_figure(report)):
        assert shown(figure) == (({0.5, 1.0}, set()) if full else ({0.5}, {1.0}))
    lines = report_text(report).splitlines()
    assert f"blocks         100     {blocks}" in lines
    assert f"overall       50.0  100.0{'' if full else '*'}" in lines
    assert max(map(len, lines)) <= 80


def test_pictures_say_what_they_are_of(make_report: Callable[..., Any]) -> None:
    report = make_report({GREEDY: conversations()}, identity="abcd" * 16)
    (legend,) = slots_figure(report).legends
    assert legend.get_title().get_text() == "draft model abcdabcdabcd for tiny, 4 prompts"
    (legend,) = decay_figure({"one": report, "two": report}, [GREEDY.title]).legends
    assert legend.get_title().get_text() == "draft models for tiny, 4 prompts"
    assert [text.get_text() for text in legend.get_texts()] == ["one (abcdabcd)", "two (abcdabcd)"]
