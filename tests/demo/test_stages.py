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


def test_outputs_of_other_inputs_are_removed_and_own_ones_kept_for_resuming(tmp_path: Path) -> None:
    mine = Path(tmp_path / "kept.txt")
    mine.write_text("the user's")
    folder = tmp_path / "run"
    seen: list[bool] = []

    def stage(inputs: dict, fail: bool) -> Stage:
        def work() -> dict:
            out = folder / "out"
            seen.append(out.exists())
            out.mkdir(parents=True, exist_ok=True)
            (out / "manifest.json").write_text("{}")
            if fail:
                raise RuntimeError("killed")
            return {}

        return Stage("one", "one", inputs, (folder / "out", mine), work)

    stages = Stages(folder / "stamps", lambda line: None)
    with pytest.raises(RuntimeError):
        stages.do(stage({"a": 1}, fail=True))
    stages.do(stage({"a": 1}, fail=False))
    stages.do(stage({"a": 2}, fail=False))
    assert seen == [False, True, False], "resumed with the same inputs, made anew with others"
    assert mine.read_text() == "the user's"


def test_a_failing_stage_leaves_no_stamp(tmp_path: Path) -> None:
    stages = Stages(tmp_path, lambda line: None)

    def fail() -> dict:
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        stages.do(Stage("one", "one", {}, (), fail))
    assert not (tmp_path / "one.json").exists()
