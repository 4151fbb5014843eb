"""A stage is skipped only when its inputs and every output are what its stamp says."""

from __future__ import annotations

from pathlib import Path

import pytest

from dspark.demo.stages import Stage, Stages


def run_once(folder: Path, inputs: dict, text: str = "made") -> tuple[Stages, list[str]]:
    said: list[str] = []
    stages = Stages(folder / "stamps", said.append)

    def work() -> dict:
        (folder / "out.txt").write_text(text)
        return {"ran": True}

    stages.do(Stage("one", "stage one", inputs, (folder / "out.txt",), work))
    return stages, said


def test_skipped_when_nothing_changed(tmp_path: Path) -> None:
    first, _ = run_once(tmp_path, {"a": 1})
    again, said = run_once(tmp_path, {"a": 1}, text="other")
    assert first.skipped == []
    assert again.skipped == ["one"]
    assert again.results == {"one": {"ran": True}}
    assert said == ["stage one: there already, made from the same inputs"]
    assert (tmp_path / "out.txt").read_text() == "made"


def test_runs_again_when_inputs_or_outputs_changed(tmp_path: Path) -> None:
    run_once(tmp_path, {"a": 1})
    assert run_once(tmp_path, {"a": 2})[0].skipped == []
    (tmp_path / "out.txt").write_text("damaged")
    assert run_once(tmp_path, {"a": 2})[0].skipped == []
    (tmp_path / "out.txt").unlink()
    assert run_once(tmp_path, {"a": 2})[0].skipped == []
    (tmp_path / "stamps" / "one.json").write_text("{torn")
    assert run_once(tmp_path, {"a": 2})[0].skipped == []


def test_a_failing_stage_leaves_no_stamp(tmp_path: Path) -> None:
    stages = Stages(tmp_path, lambda line: None)

    def fail() -> dict:
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        stages.do(Stage("one", "one", {}, (), fail))
    assert not (tmp_path / "one.json").exists()
