"""An ablation's recipe is read strictly, its steps follow from the time, its table fits; and one runs end to end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from dspark import cli
from dspark.bench.ablation import AblationConfig, ablation_table, folder_of, read_ablation, steps_for
from dspark.bench.drafting import draft_milliseconds
from dspark.bench.origins import Hashes, merged, origins
from dspark.commands.watching import alone_in, duration, run_logged, time_left
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


class Fake:
    """In place of the processes: notes every command, and leaves what it would have left."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.done: list[str] = []
        self.seen: list[list[str]] = []
        self.titles: list[str] = []
        monkeypatch.setattr("dspark.commands.ablate_runs.run_logged", self)
        monkeypatch.setattr("dspark.commands.ablate._rows", lambda runs, names: self.seen.append(names) or [])
        monkeypatch.setattr("dspark.commands.ablate.ablation_table", lambda rows: "")

    def __call__(self, command: list[str], log: Path, title: str, expected: float | None) -> float:
        given = dict(part.removeprefix("--").split("=", 1) for part in command if part.startswith("--"))
        folder = Path(given["trainer.default_root_dir"])
        folder.mkdir(parents=True, exist_ok=True)
        self.titles.append(title)
        self.done.append(f"{command[1]} {folder.name} {given.get('trainer.max_steps', '')}".strip())
        if command[1] == "test":
            (folder / "drafter_report.json").write_text("{}")
            return 20.0
        seconds = {"timing-1": 0.5, "timing-2": 0.25}.get(folder.name, 1.0)
        (folder / "steps.json").write_text(json.dumps({"steps": 11, "median_seconds": seconds}))
        (folder / "last.ckpt").write_text(f"weights {len(self.done)}")
        return 100.0

    def taken(self) -> list[str]:
        """What has run since the last look."""
        found, self.done = self.done, []
        return found


def an_ablation(tmp_path: Path, **fields: Any) -> Path:
    """Two variants; all that they name lies in tmp_path, the second with training data of its own."""
    for name in ("talk.jsonl", "own.jsonl", "val.jsonl", "prompts.jsonl"):
        (tmp_path / name).write_text(f"{name} as it was")
    (tmp_path / "target").mkdir(exist_ok=True)
    (tmp_path / "target" / "model.safetensors").write_text("weights")
    test = {"prompts": str(tmp_path / "prompts.jsonl")}
    recipe = {
        "model": {"init_args": {"target": str(tmp_path / "target"), "test": test}},
        "data": {"init_args": {"train": [str(tmp_path / "talk.jsonl")], "val": []}},
        "trainer": {"default_root_dir": str(tmp_path / "elsewhere")},
    }  # fmt: skip
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    other = {"data.init_args.train": f"[{tmp_path / 'own.jsonl'}]"}
    content = {"recipe": str(tmp_path / "recipe.yaml"), "variants": {"base": {}, "other": other}}
    content |= {"common": {"data.init_args.val": f"[{tmp_path / 'val.jsonl'}]"}, "out": str(tmp_path / "out")}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({**content, **fields}))
    return tmp_path / "mine.yaml"


def test_what_runs_and_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, path = Fake(monkeypatch), str(an_ablation(tmp_path, seconds=60))
    first = ["fit warm-up 12", "fit timing-1 12", "fit timing-2 12", "fit base 240", "test base"]
    assert cli.main(["ablate", path, "--only", "base"]) == 0, capsys.readouterr().err
    assert runs.taken() == first  # 60 s at the lower of the two medians
    assert cli.main(["ablate", path]) == 0
    assert runs.taken() == ["fit timing-1 12", "fit timing-2 12", "fit other 240", "test other"]
    assert runs.seen == [["base"], ["base", "other"]]
    assert cli.main(["ablate", path]) == 0
    assert runs.taken() == []
    recipe = yaml.safe_load((tmp_path / "recipe.yaml").read_text())
    (tmp_path / "recipe.yaml").write_text(f"# the same, in other words\n{yaml.safe_dump(recipe, sort_keys=False)}")
    assert cli.main(["ablate", path]) == 0
    assert runs.taken() == []
    recipe["model"]["init_args"]["seed"] = 1
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert cli.main(["ablate", path, "--only", "base"]) == 0
    assert runs.taken() == first
    assert runs.seen[-1] == ["base"]  # the other is of the recipe as it was


BASE, OTHER = ["fit base 3", "test base"], ["fit other 3", "test other"]


@pytest.mark.parametrize(
    ("changed", "again"),
    [
        ("talk.jsonl", BASE),
        ("own.jsonl", OTHER),
        ("val.jsonl", BASE + OTHER),
        ("target/model.safetensors", BASE + OTHER),
        ("prompts.jsonl", ["test base", "test other"]),
        ("out/base/last.ckpt", ["fit base 3"]),  # to the same bytes, so its test still holds
        ("out/base/drafter_report.json", ["test base"]),
    ],
)
def test_changed_bytes_run_again_what_was_made_from_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str, again: list[str]
) -> None:
    runs, path = Fake(monkeypatch), str(an_ablation(tmp_path, steps=3))
    assert cli.main(["ablate", path]) == 0
    assert runs.taken() == BASE + OTHER
    (tmp_path / changed).write_text("something else")
    assert cli.main(["ablate", path]) == 0
    assert runs.taken() == again
    assert cli.main(["ablate", path]) == 0
    assert runs.taken() == []


def test_another_version_or_number_of_steps_runs_all_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, path = Fake(monkeypatch), an_ablation(tmp_path, steps=3)
    assert cli.main(["ablate", str(path)]) == 0
    runs.taken()
    with monkeypatch.context() as patch:
        patch.setattr("dspark.bench.origins.__version__", "0.0.0")
        assert cli.main(["ablate", str(path)]) == 0
    assert runs.taken() == BASE + OTHER
    assert cli.main(["ablate", str(an_ablation(tmp_path, steps=4))]) == 0
    assert runs.taken() == ["fit base 4", "test base", "fit other 4", "test other"]


@pytest.mark.parametrize("what", ["code", "machine"])
def test_other_code_or_another_machine_runs_all_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """A change of the package that is no release yet, and operations with other bits."""
    (tmp_path / "package").mkdir()
    monkeypatch.setattr("dspark.bench.origins._PACKAGE", tmp_path / "package")
    runs, path = Fake(monkeypatch), an_ablation(tmp_path, steps=3)
    for wanted in (BASE + OTHER, []):
        assert cli.main(["ablate", str(path)]) == 0
        assert runs.taken() == wanted
    if what == "code":
        (tmp_path / "package" / "code.py").write_text("x = 1")
    else:
        monkeypatch.setattr("dspark.bench.origins.fingerprint", lambda: {"cpu": "another"})
    assert cli.main(["ablate", str(path)]) == 0
    assert runs.taken() == BASE + OTHER


def test_an_override_that_differs_runs_its_variant_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, own = Fake(monkeypatch), {"data.init_args.train": f"[{tmp_path / 'own.jsonl'}]"}
    for more, again in (({}, BASE + OTHER), ({"x.y": 2}, OTHER), ({"model.init_args.test.limit": 2}, OTHER)):
        path = an_ablation(tmp_path, steps=3, variants={"base": {}, "other": {**own, **more}})
        assert cli.main(["ablate", str(path)]) == 0
        assert runs.taken() == again


def test_what_a_run_writes_is_nothing_it_is_made_from(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    recipe = {"model": {"features": {"cache": str(tmp_path / "cache")}, "data": [str(tmp_path)]}, "trainer": {"x": "."}}
    assert list(origins(recipe, Hashes())["inputs"]) == [str(tmp_path)]
    before = origins({"data": str(tmp_path)}, Hashes())
    (tmp_path / "cache" / "new").write_text("")
    assert origins({"data": str(tmp_path)}, Hashes()) != before


def test_overrides_are_put_in_as_the_command_line_would() -> None:
    recipe = {"a": {"b": 1, "c": [1]}, "d": None}
    assert merged(recipe, {"a.b": "[x, 2]", "d.e": "true", "f": "[no yaml"}) == {
        "a": {"b": ["x", 2], "c": [1]}, "d": {"e": True}, "f": "[no yaml",
    }  # fmt: skip
    assert recipe == {"a": {"b": 1, "c": [1]}, "d": None}


def test_what_will_run_is_said_and_what_it_takes_once_that_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, path = Fake(monkeypatch), str(an_ablation(tmp_path, steps=3))
    assert cli.main(["ablate", path, "--only", "other"]) == 0
    assert "each: 3 training steps, a test; how long is known once the first is done" in capsys.readouterr().err
    assert cli.main(["ablate", path]) == 0
    said = capsys.readouterr().err
    assert "kept: other" in said
    assert "to run: base\n" in said
    assert "about 2 min in all" in said
    assert "variant 1 of 2: base, training 3 steps, about 2 min\n" in said
    assert max(map(len, said.splitlines())) <= 80 + len(str(tmp_path))
    assert cli.main(["ablate", path]) == 0
    assert "nothing left to run" in capsys.readouterr().err
    assert runs.titles[-1] == "variant 1 of 2: base, testing"


def test_two_at_once_in_one_folder_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, path = Fake(monkeypatch), str(an_ablation(tmp_path, steps=3))
    with alone_in(tmp_path / "out", "test"):
        assert cli.main(["ablate", path]) == cli.USER_ERROR
        assert "another run works there" in capsys.readouterr().err
        assert runs.taken() == []
    assert cli.main(["ablate", path]) == 0


def test_a_process_that_outlives_its_parent_keeps_the_lock(tmp_path: Path) -> None:
    with alone_in(tmp_path, "test"):
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False)
    with pytest.raises(DsparkError, match="another run"), alone_in(tmp_path, "test"):
        pass
    child.communicate(b"\n")
    with alone_in(tmp_path, "test"):
        pass


def test_a_watched_command_leaves_a_log_and_its_last_word(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_logged(["dspark", "--version"], tmp_path / "a" / "x.log", "title", None) > 0
    first, second = (tmp_path / "a" / "x.log").read_text().splitlines()
    assert first == "dspark --version"
    assert second.startswith("dspark ")
    with pytest.raises(DsparkError, match=r"title: ended with exit code 2: error: dspark: expected a verb.*y\.log"):
        run_logged(["dspark", "nothing"], tmp_path / "y.log", "title", 3.0)
    assert "\x1b" not in capsys.readouterr().err
    assert time_left(100.0, 58.0) == ", about 42 s left"
    assert (time_left(None, 5.0), time_left(3.0, 5.0)) == ("", ", longer than expected")
    assert [duration(s) for s in (0.1, 89, 720, 11100)] == ["1 s", "89 s", "12 min", "3 h 05 min"]


def test_a_run_that_was_cut_is_not_taken_for_a_finished_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, path = Fake(monkeypatch), str(an_ablation(tmp_path, seconds=60))
    assert cli.main(["ablate", path]) == 0
    runs.taken()

    def cut(*_: Any) -> float:
        raise DsparkError("cut")

    with monkeypatch.context() as patch:
        patch.setattr("dspark.commands.ablate_runs.run_logged", cut)
        assert cli.main(["ablate", path, "--seconds", "30"]) == cli.USER_ERROR
    assert cli.main(["ablate", path]) == 0
    assert runs.taken() == ["fit base 240", "test base"]


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
    capsys.readouterr()
    assert cli.main(["ablate", str(path), "--json"]) == 0, capsys.readouterr().err
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["name"], row["steps"]) == ("base", 2)
    assert row["step_seconds"] > 0
    assert row["draft_ms"]["1"] < row["draft_ms"]["32"]
    assert row["tau"]["coupled, temperature 0.2, top-p 0.9"]["value"] >= 1.0
