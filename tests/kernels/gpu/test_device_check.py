"""The script that a GPU machine runs is itself run here, tiny and interpreted, so that it does not fail there first."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "kernels" / "device_check.py"
FILES = {path.stem for path in (SCRIPT.parent / "dspark_kernels" / "gpu").glob("*.py")} - {
    "__init__",
    "aot",
    "arguments",
}


def run(*args: str, **extra: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | extra
    return subprocess.run(
        [sys.executable, str(SCRIPT), *args], capture_output=True, text=True, check=False, env=environment
    )


@pytest.mark.slow
def test_every_check_passes_in_the_interpreter(tmp_path: Path) -> None:
    done = run("--small", "--out", str(tmp_path / "found.json"), TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["card"] == "Triton's interpreter" and len(found["checks"]) >= 25
    assert all(check["ok"] and check["compared"] for check in found["checks"])


def test_without_a_gpu_it_says_so() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = run()
    assert done.returncode == 2
    assert "expected a CUDA device, but found none" in done.stdout


def test_no_kernel_is_left_out() -> None:
    text = SCRIPT.read_text()
    assert not [name for name in FILES if f"dspark_kernels.gpu.{name} import" not in text]
