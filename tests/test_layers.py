"""Who may import whom, read with ``ast`` against one table; and the habits that were decided once.

The table is the house (CONTRIBUTING.md): a room imports only rooms on a line above its own, never a neighbour.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

ROOMS: tuple[tuple[str, ...], ...] = (
    ("contracts",),
    (
        "files",
        "settings",
        "probability",
        "noise",
        "help_text",
        "recipe",
        "rotary",
        "signatures",
        "slot_maps",
        "dspark_kernels",
    ),
    ("recipe_errors", "recipe_help", "sealed", "ops"),
    ("target", "corpus", "drafter"),
    ("runner",),
    ("calibration",),  # its metrics are what training's confidence module measures with
    ("scorecard",),
    ("training",),
    ("export",),
    ("rollouts",),
    ("rl",),
    ("bench",),
    ("lightning_cli", "commands"),
    ("demo",),
    ("cli",),
    ("__main__",),
)
LEVEL = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}

# Package -> the only places (rooms, or files relative to the root) that may import it.
ONLY_IN: dict[str, tuple[str, ...]] = {
    "dspark_kernels": ("ops", "dspark_kernels"),
    "transformers": ("dspark/target/load.py", "dspark/corpus/dialogue.py", "dspark/bench/peers.py"),
    "gguf": ("target",),
    "lightning": ("training", "rl", "dspark/bench/rl_ways.py", "lightning_cli"),
    "pytorch_lightning": (),
    "jsonargparse": ("lightning_cli",),
    "ray": ("dspark/rollouts/workers.py",),
    "vllm": ("dspark/rollouts/vllm_engine.py", "dspark/bench/vllm_peer.py"),
    "torchmetrics": ("training", "calibration"),
    "triton": ("dspark_kernels",),
    "datasets": ("corpus",),
    "argparse": ("commands", "help_text", "demo", "lightning_cli", "kernels/dspark_kernels/gpu/aot.py"),
    "random": (),
    "pickle": (),
    "joblib": (),
    "dill": (),
}


def sources() -> list[Path]:
    return sorted(p for top in ("dspark", "kernels/dspark_kernels") for p in (ROOT / top).rglob("*.py"))


def room_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return "dspark_kernels" if parts[0] == "kernels" else Path(parts[1]).stem


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted module) of every import in a file, those inside functions included."""
    package = path.relative_to(ROOT if path.is_relative_to(ROOT / "dspark") else ROOT / "kernels").with_suffix("").parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level]) if node.level else ""
            module = ".".join(part for part in (base, node.module or "") if part)
            if module == "dspark":  # `from dspark import ops` names rooms
                yield from ((node.lineno, f"dspark.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, module


def imported_room(module: str) -> str | None:
    head, *rest = module.split(".")
    if head == "dspark_kernels":
        return head
    return rest[0] if head == "dspark" and rest and not rest[0].startswith("__") else None


def test_every_room_stands_in_the_table() -> None:
    unknown = {room_of(path) for path in sources()} - set(LEVEL) - {"__init__"}
    assert not unknown, f"rooms that no line of the table names: {sorted(unknown)}"


def test_a_room_imports_only_rooms_above_it() -> None:
    wrong = []
    for path in sources():
        room = room_of(path)
        for line, module in imports(path):
            other = imported_room(module)
            if other is None or other == room:
                continue
            if room == "__init__" or LEVEL.get(other, len(ROOMS)) >= LEVEL[room]:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {room} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_packages_are_imported_only_where_they_belong() -> None:
    wrong = []
    for path in sources():
        here = (room_of(path), path.relative_to(ROOT).as_posix())
        for line, module in imports(path):
            allowed = ONLY_IN.get(module.partition(".")[0])
            if allowed is not None and not set(here) & set(allowed):
                wrong.append(f"{here[1]}:{line}: imports {module}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("module", ["dspark", "dspark.cli", "dspark.contracts", "dspark.settings"])
def test_importing_the_package_stays_light(module: str) -> None:
    heavy = "lightning", "triton", "transformers", "torch", "datasets"
    code = f"import sys, {module}; print(*(m for m in {heavy!r} if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.split() == []


# What was decided against, and the one place (if any) that may still name it.
DECIDED_AGAINST = {
    "../shared": "the project stands on its own",
    "trust_remote_code=True": "checkpoints bring no code",
    "weights_only=False": "checkpoints bring no objects",
    "torch.manual_seed": "randomness is a function of keys, never a global generator",
    "np.random.seed": "randomness is a function of keys, never a global generator",
    "np.random.rand": "randomness is a function of keys, never a global generator",
}


@pytest.mark.parametrize("word", DECIDED_AGAINST)
def test_what_was_decided_against_stays_out(word: str) -> None:
    found = [str(path.relative_to(ROOT)) for path in sources() if word in path.read_text(encoding="utf-8")]
    assert not found, f"{word} ({DECIDED_AGAINST[word]}) in {found}"


def test_torch_load_always_says_weights_only() -> None:
    wrong = []
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or ast.unparse(node.func) != "torch.load":
                continue
            if not any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in node.keywords):
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not wrong, wrong
