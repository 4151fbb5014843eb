"""Every recipe is replayed: read strictly, parsed against the classes' own signatures, its overrides taking effect."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import yaml

from dspark import cli
from dspark.help_text import command_parser
from dspark.recipe import first_comment, read_recipe

ROOT = Path(__file__).resolve().parent.parent
RECIPES = sorted((ROOT / "recipes").glob("*.y*ml"))
# A recipe of the trainer names a model; any other is the recipe of the command it is named for.
MODELS = {path: yaml.safe_load(path.read_text(encoding="utf-8")).get("model") for path in RECIPES}
TRAINED = [path for path, model in MODELS.items() if model and "class_path" in model]
PLAIN = [path for path, model in MODELS.items() if not model]
OVERLAYS = [path for path, model in MODELS.items() if model and path not in TRAINED]  # laid over recipes/drafter.yaml


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def config_of(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert cli.main([*argv, "--print_config"]) == 0, capsys.readouterr().err
    config: dict[str, Any] = yaml.safe_load(capsys.readouterr().out)
    return config


def leaves(value: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> plain value, as one would override it (init_args is not written)."""
    if not isinstance(value, dict):
        return {prefix[:-1]: value}
    found: dict[str, Any] = {}
    for key, inner in value.items():
        found |= leaves(inner, prefix if key == "init_args" else f"{prefix}{key}.")
    return found


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_a_recipe_opens_with_what_it_is_for(path: Path) -> None:
    assert read_recipe(path)
    assert first_comment(path), f"{path.name} opens with no comment"


@pytest.mark.parametrize("path", TRAINED, ids=lambda path: path.name)
def test_a_trainers_recipe_parses_and_keeps_its_values(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given, config = leaves(read_recipe(path)), leaves(config_of(capsys, "fit", str(path)))
    for key, value in given.items():
        if not isinstance(value, list):
            assert config[key] == pytest.approx(value) if isinstance(value, float) else config[key] == value, key


@pytest.mark.parametrize("path", TRAINED, ids=lambda path: path.name)
def test_every_number_in_it_can_be_overridden(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbers = {key: value for key, value in leaves(read_recipe(path)).items() if type(value) in (int, float)}
    changed = {key: value + 1 for key, value in numbers.items()}
    config = leaves(config_of(capsys, "fit", str(path), *(f"--{key}={value}" for key, value in changed.items())))
    for key, value in changed.items():
        assert float(config[key]) == pytest.approx(value), key  # a union with str keeps the text


@pytest.mark.parametrize("path", TRAINED, ids=lambda path: path.name)
def test_it_serves_every_verb_and_has_a_page(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for verb in cli.RECIPE_VERBS:
        assert config_of(capsys, verb, str(path))["model"]["class_path"]
    assert cli.main(["fit", str(path), "--help"]) == 0
    page = capsys.readouterr().out
    assert max(map(len, page.splitlines())) <= max(80, len(str(path)) + 60)
    assert "required" not in page.replace("are required", "")


@pytest.mark.parametrize("path", OVERLAYS, ids=lambda path: path.name)
def test_an_overlay_changes_what_it_names_and_nothing_else(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = leaves(config_of(capsys, "fit", "recipes/drafter.yaml"))
    for verb in ("fit", "test"):
        config = leaves(config_of(capsys, verb, "recipes/drafter.yaml", "--config", str(path)))
        changed = {key: value for key, value in config.items() if base.get(key, value) != value}
        assert changed == leaves(read_recipe(path))


@pytest.mark.parametrize("path", PLAIN, ids=lambda path: path.name)
def test_a_commands_recipe_is_accepted_by_its_command(path: Path) -> None:
    name = path.stem.partition("-")[0]
    assert name in cli.VERBS, f"{path.name}: named for no command"
    parser = command_parser(f"dspark {name}", importlib.import_module(cli.VERBS[name].module))
    assert parser.parse_args([str(path)]).recipe == str(path)
