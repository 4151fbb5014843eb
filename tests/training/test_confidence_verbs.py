"""`dspark calibrate` and `dspark report` as they are typed, on recorded rounds of a tiny draft model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dspark.cli import main


@pytest.fixture
def folders(runs: Any, tiny: Any, target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A draft model and three disjoint folders of rounds, written by hand: nothing but their acceptance table wants to
    know how they were made."""
    monkeypatch.setattr("dspark.commands.report.rollout_acceptance", lambda folders: {})
    names = ("fit", "test", "now")
    found = {name: str(tiny.write_directory(tmp_path / name, 30, seed)) for seed, name in enumerate(names)}
    runs.fit(tmp_path, "draft", found["fit"], "", 200, 2)
    return {**found, "drafter": str(tmp_path / "draft" / "end.ckpt")}


def calibrate(folders: dict[str, str], out: Path, *more: str) -> int:
    models = ["--drafter", folders["drafter"], "--target", "tiny", "--dtype", "float32", "--quiet"]
    return main(["calibrate", *models, "--rollouts", folders["fit"], "--out", str(out), *more])


def report(folders: dict[str, str], calibration: Path, split: str, out: Path, *more: str) -> int:
    models = ["--drafter", folders["drafter"], "--target", "tiny", "--dtype", "float32", "--quiet"]
    where = ["--rollouts", folders[split], "--calibration", str(calibration), "--out", str(out), "--tensorboard", ""]
    return main(["report", *models, *where, *more])


@pytest.mark.parametrize("method", ["temperature", "platt", "isotonic"])
def test_fit_then_report_then_drift(folders: dict[str, str], tmp_path: Path, capsys: Any, method: str) -> None:
    record = tmp_path / "calibration.json"
    assert calibrate(folders, record, "--method", method) == 0
    said = capsys.readouterr().out
    assert "slot 1: " in said
    assert ("knots" in said) == (method == "isotonic")
    assert json.loads(record.read_text())["method"] == method
    assert report(folders, record, "test", tmp_path / "old", "--fitted-on", folders["fit"]) == 0
    said = capsys.readouterr().out
    assert "position prior" in said
    assert "Domain shift" in said
    assert max(len(line) for line in said.splitlines() if "written to" not in line) <= 80
    assert report(folders, record, "now", tmp_path / "new", "--against", str(tmp_path / "old")) == 0
    assert "Drift since the older report" in capsys.readouterr().out
    rows = json.loads((tmp_path / "new" / "report.json").read_text())["drift"]["rows"]
    assert {row["slot"] for row in rows} == {1, 2, 3, "mean"}


def test_rounds_that_say_nothing_of_this_draft_model(
    folders: dict[str, str], tiny: Any, tmp_path: Path, capsys: Any
) -> None:
    """Another one's drafts, the same folder twice, rounds of other sequences, a domain that stands for all."""
    record = tmp_path / "calibration.json"
    manifest = Path(folders["fit"]) / "manifest.json"
    plain = json.loads(manifest.read_text())
    rows = tiny.make_rows(6)
    odd = tiny.write_directory(tmp_path / "odd", rows=[{**row, "domain": "all"} for row in rows])
    wrong = {
        "another draft model": {**plain, "run": {"draft_layers": "f" * 64}},
        "occurs twice": plain,
    }
    for message, content in wrong.items():
        manifest.write_text(json.dumps(content))
        twice = [folders["fit"]] if "twice" in message else []
        assert calibrate(folders, record, "--rollouts", folders["fit"], *twice) == 2
        assert message in capsys.readouterr().err
    assert calibrate(folders, record, "--rollouts", str(odd)) == 2
    assert "Rename it in the prompts" in capsys.readouterr().err
    assert not record.exists()


def test_mistakes_are_one_line(folders: dict[str, str], tmp_path: Path, capsys: Any) -> None:
    record, old = tmp_path / "calibration.json", tmp_path / "old"
    assert calibrate(folders, record) == 0
    assert report(folders, record, "test", old) == 0
    (old / "report.json").write_text((old / "report.json").read_text().replace('"num_slots": 3', '"num_slots": 2'))
    capsys.readouterr()
    wrong = {
        "that the calibration was fitted on": ["--fitted-on", folders["now"]],
        "edited or damaged": ["--against", str(old)],
        "expected a JSON file": ["--against", str(tmp_path / "nothing")],
    }
    for message, options in wrong.items():
        assert report(folders, record, "test", tmp_path / "new", *options) == 2
        said = capsys.readouterr()
        assert message in said.err
        assert len(said.err.strip().splitlines()) == 1
        assert not (tmp_path / "new").exists()
    record.write_text(record.read_text().replace('"temperature": ', '"temperature": 2'))
    assert report(folders, record, "test", tmp_path / "new") == 2
    assert "edited or damaged" in capsys.readouterr().err
