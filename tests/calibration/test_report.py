"""The report: its files, what it says, and what it says when there is no data."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest
import torch

from dspark.calibration import measures, scores
from dspark.calibration.events import Events
from dspark.calibration.fitting import fit
from dspark.calibration.record import Calibration, survival
from dspark.calibration.report import Report, build_report, format_table, load_report
from dspark.contracts import DsparkError
from dspark.slot_maps import identity

FILES = {"report.json", "report.html", "overview.png", "reliability-survival.png", "reliability-conditional.png",
         "thresholds.png"}  # fmt: skip


@pytest.fixture(scope="module")
def made(heads, tmp_path_factory) -> tuple:
    """(test events, calibration, report) of a head with both baselines."""
    folder = tmp_path_factory.mktemp("report")
    fitted_on, events = heads.synthetic_head(900, maximum=True), heads.synthetic_head(900, seed=1, maximum=True)
    calibration = fit(events=fitted_on, drafter_hash="drafter")
    extra = {"target": "tiny", "note": "<b>&"}
    report = build_report(
        events, calibration, folder, "A title <1>", extra, events_calibration=fitted_on,
        tensorboard_dir=folder / "board", replicates=100,
    )  # fmt: skip
    return events, calibration, report


class _Page(HTMLParser):
    """Collects what a page refers to, and fails on a tag closed out of order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sources: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_files_and_round_trip(made) -> None:
    _, _, report = made
    assert {path.name for path in report.directory.iterdir()} >= FILES
    assert load_report(report.directory).data == report.data
    assert Report(json.loads((report.directory / "report.json").read_text()), report.directory).data == report.data


def test_numbers_are_the_measures(made) -> None:
    events, calibration, report = made
    a, y = survival(events.confidence_logits, calibration.maps).double(), events.labels
    row = report.row("head_calibrated", "cumulative", 2)
    assert row["ece"] == pytest.approx(measures.ece(a[:, 1], y[:, 1], measures.bin_index(a[:, 1])), abs=1e-6)
    assert row["auroc"] == pytest.approx(measures.auroc(a[:, 1], y[:, 1]), abs=1e-6)
    assert row["mean_observed"] == pytest.approx(float(y[:, 1].mean()), abs=1e-6)
    code = [i for i, d in enumerate(events.domain) if d == "code"]
    domain_row = report.row("head", "conditional", 1, "code")
    assert domain_row["events"] == len(code)
    assert domain_row["mean_observed"] == pytest.approx(float(y[code, 0].mean()), abs=1e-6)
    facts = report.data["domains"]["all"]
    assert facts["accepted_drafts_per_round"] == pytest.approx(float(events.accepted.double().mean()), abs=1e-6)
    assert facts["tokens_per_round"] == pytest.approx(facts["accepted_drafts_per_round"] + 1)


def test_calibration_helps_and_the_head_beats_the_baselines(made) -> None:
    _, _, report = made
    before, after = (report.row(e, "cumulative", "mean") for e in ("head", "head_calibrated"))
    assert after["ece"] < before["ece"] / 2
    assert before["interval"]["ece"][0] > after["interval"]["ece"][1]
    pooled = {
        e: report.row(e, "conditional", "pooled")
        for e in ("head_calibrated", "draft_max_probability", "position_prior")
    }
    assert (
        pooled["head_calibrated"]["auroc"]
        > pooled["draft_max_probability"]["auroc"]
        > pooled["position_prior"]["auroc"]
    )
    assert pooled["head_calibrated"]["nll"] < pooled["position_prior"]["nll"]


def test_every_interval_holds_its_point(made) -> None:
    _, _, report = made
    for row in report.data["rows"]:
        for metric, span in row["interval"].items():
            assert span is None or span[0] <= row[metric] <= span[1]


def test_conditional_ranking_is_left_alone(made) -> None:
    _, _, report = made
    for slot in (1, 2, 3):
        before, after = (report.row(e, "conditional", slot) for e in ("head", "head_calibrated"))
        assert after["auroc"] == pytest.approx(before["auroc"], abs=1e-4)


def test_page_is_self_contained(made) -> None:
    _, _, report = made
    text = (report.directory / "report.html").read_text()
    page = _Page()
    page.feed(text)
    assert page.open == []
    assert len(page.sources) == 4
    assert all(source.startswith("data:image/png;base64,") for source in page.sources)
    assert "<script" not in text
    assert "A title &lt;1&gt;" in text
    assert "&lt;b&gt;&amp;" in text
    assert not re.search(r"\bnan\b", re.sub(r"base64,[^\"]*", "", text), re.IGNORECASE)


def test_table_fits_a_terminal(made) -> None:
    _, _, report = made
    lines = format_table(report).splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("code") for line in lines)
    assert any("position prior" in line for line in lines)


def test_tensorboard_has_scalars_and_pictures(made) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    _, _, report = made
    board = accumulator.EventAccumulator(str(report.directory / "board"))
    board.Reload()
    points = board.Scalars("calibration_survival_by_slot/ece_head_calibrated")
    assert [p.step for p in points] == [1, 2, 3]
    assert points[1].value == pytest.approx(report.row("head_calibrated", "cumulative", 2)["ece"])
    assert "calibration/reliability-survival" in board.Tags()["images"]


def test_same_events_give_the_same_bytes(heads, tmp_path) -> None:
    events = heads.synthetic_head(60, slots=1)
    calibration = fit(events, "drafter")
    for name in ("one", "two"):
        build_report(events, calibration, tmp_path / name, replicates=40, key=3)
    for name in FILES:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_no_data_is_said_not_nan(heads, tmp_path) -> None:
    """Slot 3 never verified, slot 2 never reached, one conversation, no baselines, fit split = test split."""
    events = heads.plain_events([[1.0, 2.0, 3.0]], [0], [2])
    report = build_report(events, fit(events, "drafter"), tmp_path)
    text = (tmp_path / "report.json").read_text()
    assert "NaN" not in text
    assert report.row("head", "cumulative", 3)["ece"] is None
    assert report.row("head", "conditional", 2)["events"] == 0
    table = format_table(report)
    assert "no data" in table
    assert max(map(len, table.splitlines())) <= 80
    notes = " ".join(report.data["notes"])
    for phrase in ("fitted on", "No data to fit slot 2, 3", "reached slot 2, 3", "Left out", "Only one"):
        assert phrase in notes


def test_nothing_verified_at_all(heads, tmp_path) -> None:
    events = heads.plain_events([[1.0]] * 2, [0, 0], [0, 0])
    report = build_report(events, fit(events, "drafter"), tmp_path)
    assert "nothing to report" in report.data["headline"]
    assert format_table(report)


def test_wrong_inputs(heads, tmp_path) -> None:
    events = heads.synthetic_head(20)
    other = Calibration("temperature", identity(2), "drafter", "data", 1, (None, None), (None, None))
    with pytest.raises(DsparkError, match="3 slots"):
        build_report(events, other, tmp_path / "new")
    with pytest.raises(DsparkError, match="plain JSON"):
        build_report(events, fit(events, "drafter"), tmp_path / "new", extra={"a": torch.zeros(1)})
    assert not (tmp_path / "new").exists()
    with pytest.raises(DsparkError, match="expected a JSON file"):
        load_report(tmp_path)


@pytest.mark.parametrize(("old", "new"), [('"num_slots": 3', '"num_slots": 2'), ('"slot": 1', '"slot": 9')])
def test_a_report_that_was_changed_is_none(heads, tmp_path, old: str, new: str) -> None:
    """Drift is told from it: a count that nobody measured must not become a verdict."""
    events = heads.synthetic_head(40)
    build_report(events, fit(events, "drafter"), tmp_path)
    path = tmp_path / "report.json"
    text = path.read_text()
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(DsparkError, match=r"edited or damaged.*Make the report again"):
        load_report(tmp_path)
    path.write_text(text[: len(text) // 2])
    with pytest.raises(DsparkError, match="does not parse"):
        load_report(path)


def test_a_new_report_leaves_nothing_of_an_old_one(heads, tmp_path, monkeypatch) -> None:
    """Neither a picture it does not have, nor, when it is cut off, numbers that are not its own."""
    events = heads.synthetic_head(60)
    build_report(events, fit(events, "drafter"), tmp_path, replicates=40)
    cut = Events(events.confidence_logits, [0] * 60, [2] * 60, events.domain, events.conversation)
    build_report(cut, fit(cut, "drafter"), tmp_path, replicates=40)
    assert not (tmp_path / "thresholds.png").exists()
    monkeypatch.setattr("dspark.calibration.report.write_board", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        build_report(events, fit(events, "drafter"), tmp_path, replicates=40, tensorboard_dir=tmp_path / "board")
    with pytest.raises(DsparkError, match="expected a JSON file"):
        load_report(tmp_path)


def test_places_that_cannot_be_written(heads, tmp_path) -> None:
    events = heads.synthetic_head(20)
    (tmp_path / "file").write_text("")
    with pytest.raises(DsparkError, match="TensorBoard"):
        build_report(events, fit(events, "d"), tmp_path / "a", replicates=40, tensorboard_dir=tmp_path / "file")
    (tmp_path / "b" / "report.json").mkdir(parents=True)
    with pytest.raises(DsparkError, match="a place for a report"):
        build_report(events, fit(events, "d"), tmp_path / "b", replicates=40)
    for replicates in (0, 39, 10**12):
        with pytest.raises(DsparkError, match="bootstrap replicates"):
            build_report(events, fit(events, "d"), tmp_path / "c", replicates=replicates)


def test_names_that_a_terminal_would_obey_are_shown_plainly(heads, tmp_path) -> None:
    long = ["mathematics-easy", "mathematics-hard", "\x1b[31mred\n"]
    base = heads.synthetic_head(90)
    events = Events(
        base.confidence_logits, base.accepted, base.verified, [long[i % 3] for i in range(90)], base.conversation
    )
    text = format_table(build_report(events, fit(events, "d"), tmp_path, replicates=40))
    assert "\x1b" not in text
    assert {"mathem…-easy", "mathem…-hard"} <= {word for line in text.splitlines() for word in line.split()}


def test_what_stands_beside_the_head_learned_from_the_same_rounds(heads, tmp_path) -> None:
    """The other methods and the baselines fitted on other rounds, the test's own at worst, would be no comparison."""
    fitted_on, events = heads.synthetic_head(90), heads.synthetic_head(90, seed=1)
    calibration = fit(fitted_on, "drafter")
    with pytest.raises(DsparkError, match="that the calibration was fitted on"):
        build_report(events, calibration, tmp_path, events_calibration=events)
    part = fitted_on.select(torch.arange(90) < 60)
    report = build_report(part, calibration, tmp_path, events_calibration=fitted_on, replicates=40)
    assert any("conversations are of the fit split too" in note for note in report.data["notes"])


def test_the_baseline_is_calibrated_as_the_head_is(made) -> None:
    """A probability that nobody calibrated loses in ECE and NLL whatever it knows."""
    _, _, report = made
    raw, mended = (report.row(f"draft_max_probability{end}", "cumulative", "pooled") for end in ("", "_calibrated"))
    assert mended["nll"] < raw["nll"]


def test_many_conversations_are_joined_into_clusters(heads, monkeypatch) -> None:
    """The bootstrap's cost is bounded by the number of clusters; rounds of a conversation stay together."""
    monkeypatch.setattr(scores.bootstrap, "MAX_CLUSTERS", 16)
    events = heads.synthetic_head(200, slots=1, conversations=120)
    count, cluster = scores.clusters(events)
    assert count == 15  # five of each domain's 40
    assert cluster.max() == 14
    first = {}
    for domain, conversation, mine in zip(events.domain, events.conversation, cluster.tolist(), strict=True):
        assert first.setdefault((domain, conversation), mine) == mine
