"""The pages of `fit`, `validate`, `test` and `predict`: how a recipe is run and overridden, and what it lets one set.

Lightning's own page lists every option of its Trainer over many screens; here a page holds what a person changes, and
names the way to the rest.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dspark.contracts import DsparkError
from dspark.help_text import fill, table
from dspark.recipe import first_comment, read_recipe
from dspark.signatures import REQUIRED, Argument, arguments, class_at

WHAT = {
    "fit": "Train what a recipe describes; checkpoints hold the draft model only, never the target.",
    "validate": "Compute a recipe's losses and metrics on its validation data.",
    "test": "Make a recipe's report on its test data.",
    "predict": "Run a recipe's model over its data and return its predictions.",
}
COMMON = [
    ("--trainer.max_steps N", "stop after N steps"),
    ("--trainer.max_time HH:MM:SS", "stop after that long (written DD:HH:MM:SS)"),
    ("--trainer.limit_val_batches N", "look at no more than N validation batches"),
    ("--trainer.accelerator cpu", "where to run: cpu, gpu or auto"),
    ("--seed_everything N", "another seed (default 0)"),
    ("--ckpt_path FILE", "go on from this checkpoint, or use its weights"),
    ("--config MORE.yaml", "a second file on top of the recipe; may be repeated"),
    ("--print_config", "print the whole configuration as it would run, and stop"),
    ("--debug", "tracebacks, and the libraries' own messages"),
]
CLOSING = """
Overrides are dotted paths into the recipe, applied left to right: --section.key=value. A key that is unknown, or that
a file gives twice, stops the run before it starts. Curves go to tb_logs/, checkpoints (an earlier run's are replaced)
to trainer.default_root_dir.
"""


def verb_page(program: str, verb: str) -> str:
    """The page of a verb, with the recipes of ./recipes and the comment each opens with."""
    parts = [
        f"usage: {program} {verb} RECIPE.yaml [--section.key=value ...]",
        fill(WHAT[verb]),
        "often overridden:\n" + table(COMMON),
    ]
    found = sorted(Path("recipes").glob("*.yaml")) if Path("recipes").is_dir() else []
    recipes = [path for path in found if _has_model(path)]
    if recipes:
        parts.append("recipes here:\n" + table([(str(path), first_comment(path)) for path in recipes]))
    more = f"`{program} {verb} RECIPE.yaml --help` lists what that recipe's model and data take."
    return "\n\n".join([*parts, fill(CLOSING), fill(more)])


def _has_model(path: Path) -> bool:
    """Whether a file is a recipe of these verbs: others have no model; a broken one is none."""
    try:
        return "model" in read_recipe(path)
    except DsparkError:
        return False


def recipe_page(program: str, verb: str, path: str) -> str:
    """The page of one recipe: its model's and its data's arguments with their defaults or the recipe's values.

    Raises DsparkError when the recipe cannot be read.
    """
    content = read_recipe(path)
    parts = [f"usage: {program} {verb} {path} [--section.key=value ...]"]
    if comment := first_comment(Path(path)):
        parts.append(fill(comment + "."))
    for section in ("model", "data"):
        given = content.get(section)
        if isinstance(given, dict) and "class_path" in given:
            parts.append(_section(section, given))
    trainer = content.get("trainer")
    if isinstance(trainer, dict):
        plain = {key: value for key, value in trainer.items() if not isinstance(value, dict | list)}
        rows = [(f"--trainer.{key}", _value(value)) for key, value in plain.items()]
        parts.append("trainer, as the recipe sets it:\n" + table(rows))
    parts.append(fill(f"`{program} {verb} --help` lists what else is often overridden."))
    return "\n\n".join(parts)


def _section(section: str, given: dict[str, Any]) -> str:
    head = f"{section}: {given['class_path']}"
    cls = class_at(str(given["class_path"]))
    if cls is None:
        return f"{head}\n  (cannot be imported)"
    rows = _rows(section, list(arguments(cls)), given.get("init_args") or {})
    return f"{head}\n{table(rows)}" if rows else head


def _rows(section: str, found: list[Argument], given: dict[str, Any]) -> list[tuple[str, str]]:
    groups = {argument.name.rpartition(".")[0] for argument in found}
    rows = []
    for argument in found:
        origin, value = _origin(argument, given)
        note = "" if argument.name in groups else f"({origin})" if value is REQUIRED else f"({origin}: {_value(value)})"
        rows.append((f"--{section}.{argument.name}", f"{argument.text} {note}".strip()))
    return rows


def _origin(argument: Argument, given: Any) -> tuple[str, Any]:
    for part in argument.name.split("."):
        if not isinstance(given, dict) or part not in given:
            return ("required" if argument.default is REQUIRED else "default"), argument.default
        given = given[part]
    return "recipe", given


def _value(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
