"""An ablation's recipe is read strictly, its steps follow from the time, its table fits; and one runs end to end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from dspark import cli
from dspark.bench.ablation import AblationConfig, ablation_table, folder_of, read_ablation, steps_for
from dspark.bench.drafting import draft_milliseconds
from dspark.contracts import DsparkError, SamplingParams
from tests.runner.conftest import make_drafter, make_target

ROOT = Path(__file__).parents[2]
GOOD: dict[str, Any] = {"recipe": "r.yaml", "variants": {"a": {}, "b": {"x.y": 1}}, "steps": 3}


def test_overrides_are_arguments_of_fit() -> None:
    config = AblationConfig.from_dict({**GOOD, "common": {"c": True, "x.y": 0, "n": None, "l": "[1, 2]"}})
    assert config.overrides("a") == ["--c=true", "--x.y=0", "--n=null", "--l=[1, 2]"]
    assert config.overrides("b") == ["--c=true", "--x.y=1", "--n=null", "--l=[1, 2]"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"second": 3}, "known keys, but got 'second'"),
        ({"variants": {}}, "expected variants"),
        ({"seconds": 3}, "either seconds or steps"),
        ({"steps": 0}, "either seconds or steps"),
        ({"variants": {"a b": {}, "a-b": {}}}, "names that differ"),
        ({"variants": {"a": [1]}}, "variant 'a' to map"),
        ({"variants": ["a"]}, "mappings"),
    ],
)
def test_what_means_nothing_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(DsparkError, match=said):
        AblationConfig.from_dict({**GOOD, **change})


def test_steps_follow_from_time() -> None:
    assert steps_for(240, 0.8) == 300
    assert steps_for(1, 30.0) == 1
    assert folder_of("rank 0 (DFlash)") == "rank-0-dflash"


def test_the_table_fits_the_terminal() -> None:
    tau = {"coupled, temperature 0.2, top-p 0.9": {"value": 1.234, "interval": [1.1, 1.4]}}
    row = {"name": "x" * 40, "steps": 9999, "step_seconds": 1.5, "draft_ms": {1: 4.5, 32: 100.0}, "tau": tau}
    lines = ablation_table([{**row, "ratio": dict.fromkeys(tau)}, {**row, "ratio": tau}]).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[-1].endswith("1.23 [1.10, 1.40]  1.23 [1.10, 1.40]")


def test_the_shipped_recipe_names_keys_that_its_recipe_takes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    config = read_ablation("recipes/ablate.yaml")
    assert "rank 0 (DFlash)" in config.variants
    for name in config.variants:
        assert cli.main(["fit", config.recipe, *config.overrides(name), "--print_config"]) == 0, name
        capsys.readouterr()


def test_drafting_is_timed_and_leaves_the_model_alone() -> None:
    target = make_target(torch.float32)
    models = {"one": make_drafter(target), "two": make_drafter(target, num_layers=3)}
    before = {name: [p.clone() for p in m.parameters()] for name, m in models.items()}
    found = draft_milliseconds(models, 3, SamplingParams(temperature=0.2), repeats=3)
    assert list(found) == ["one", "two"]
    assert all(ms > 0 for ms in found.values())
    for name, model in models.items():
        assert all(torch.equal(a, b) for a, b in zip(before[name], model.parameters(), strict=True))


class Runs:
    """In place of the processes: notes every command, and leaves what it would have left."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.done: list[str] = []
        monkeypatch.setattr("dspark.commands.ablate._execute", self)
        monkeypatch.setattr("dspark.commands.ablate._rows", lambda config, names, out: self.seen.append(names) or [])
        monkeypatch.setattr("dspark.commands.ablate.ablation_table", lambda rows: "")
        self.seen: list[list[str]] = []

    def __call__(self, title: str, command: list[str]) -> None:
        given = dict(part.removeprefix("--").split("=", 1) for part in command if part.startswith("--"))
        folder = Path(given["trainer.default_root_dir"])
        folder.mkdir(parents=True, exist_ok=True)
        self.done.append(f"{command[1]} {folder.name} {given.get('trainer.max_steps', '')}".strip())
        if command[1] == "test":
            (folder / "drafter_report.json").write_text("{}")
            return
        seconds = {"timing-1": 0.5, "timing-2": 0.25}.get(folder.name, 1.0)
        (folder / "steps.json").write_text(json.dumps({"steps": 11, "median_seconds": seconds}))
        (folder / "last.ckpt").write_text("")


def an_ablation(tmp_path: Path, **fields: Any) -> Path:
    (tmp_path / "recipe.yaml").write_text("data: {init_args: {train: []}}")
    content = {"recipe": str(tmp_path / "recipe.yaml"), "variants": {"base": {}, "other": {"x": 1}}}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({**content, "out": str(tmp_path / "out"), **fields}))
    return tmp_path / "mine.yaml"


def test_what_runs_and_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, path = Runs(monkeypatch), str(an_ablation(tmp_path, seconds=60))
    first = ["fit warm-up 12", "fit timing-1 12", "fit timing-2 12", "fit base 240", "test base"]
    assert cli.main(["ablate", path, "--only", "base"]) == 0, capsys.readouterr().err
    assert runs.done == first  # 60 s at the lower of the two medians
    assert cli.main(["ablate", path]) == 0
    assert runs.done[5:] == ["fit timing-1 12", "fit timing-2 12", "fit other 240", "test other"]
    assert runs.seen == [["base"], ["base", "other"]]
    assert cli.main(["ablate", path]) == 0
    assert len(runs.done) == 9
    (tmp_path / "recipe.yaml").write_text("data: {init_args: {train: []}}  # another recipe now")
    assert cli.main(["ablate", path, "--only", "base"]) == 0
    assert runs.done[9:] == first
    assert runs.seen[-1] == ["base"]  # the other is of the recipe as it was


def test_a_run_that_was_cut_is_not_taken_for_a_finished_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, path = Runs(monkeypatch), str(an_ablation(tmp_path, seconds=60))
    assert cli.main(["ablate", path]) == 0

    def cut(title: str, command: list[str]) -> None:
        raise DsparkError("cut")

    with monkeypatch.context() as patch:
        patch.setattr("dspark.commands.ablate._execute", cut)
        assert cli.main(["ablate", path, "--seconds", "30"]) == cli.USER_ERROR
    before = len(runs.done)
    assert cli.main(["ablate", path]) == 0
    assert runs.done[before:] == ["fit base 240", "test base"]


@pytest.mark.slow
def test_an_ablation_from_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    answers = tmp_path / "answers"
    prepare = ["prepare", "recipes/prepare.yaml", "--splits", "[train]", "--limit", "9", "--max_tokens", "14"]
    assert cli.main([*prepare, "--out", str(answers)]) == 0
    common = {
        "data.init_args.train": f"[{answers / 'train'}]", "data.init_args.val": "[]", "trainer.logger": False,
        "model.init_args.init.regression": 0, "model.init_args.test.limit": 4, "model.init_args.test.max_tokens": 10,
        "model.init_args.test.settings": "[{verifier: coupled, temperature: 0.2, top_p: 0.9}]",
        "model.init_args.features.cache": str(tmp_path / "features"),
    }  # fmt: skip
    content = {"recipe": "recipes/drafter.yaml", "steps": 2, "out": str(tmp_path / "out"), "common": common}
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({**content, "variants": {"base": {}}}))
    monkeypatch.setattr("dspark.commands.ablate.TIMED_STEPS", 3)
    monkeypatch.setattr("dspark.commands.ablate.TIMINGS", ("timing-1",))
    capsys.readouterr()
    assert cli.main(["ablate", str(path), "--json"]) == 0, capsys.readouterr().err
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["name"], row["steps"]) == ("base", 2)
    assert row["step_seconds"] > 0
    assert row["draft_ms"]["1"] < row["draft_ms"]["32"]
    assert row["tau"]["coupled, temperature 0.2, top-p 0.9"]["value"] >= 1.0
