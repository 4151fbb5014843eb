"""Every GPU kernel compiles for sm_80, sm_90 and sm_100 without a GPU, spills nothing, and fits the shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dspark_kernels.gpu.aot import ARCHITECTURES, MODULES, SHARED_LIMIT, cases


def compiled(cache: Path, arch: int) -> subprocess.Popen[str]:
    """In a process of its own: a kernel that was defined for the interpreter cannot be compiled."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-m", "dspark_kernels.gpu.aot", "--arch", str(arch)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.mark.slow
def test_compiles_without_spills_and_fits(tmp_path: Path) -> None:
    running = {arch: compiled(tmp_path / str(arch), arch) for arch in ARCHITECTURES}
    for arch, process in running.items():
        out, errors = process.communicate()
        assert process.returncode == 0, errors[-2000:]
        found = {one["name"]: one for one in json.loads(out)}
        assert set(found) == {case.name for case in cases()}
        for name, one in found.items():
            assert one["stack"] == one["local"] == 0, f"{name} spills on sm_{arch}: {one}"
            assert one["shared"] <= SHARED_LIMIT[arch], f"{name} does not fit sm_{arch}: {one}"
            if name.startswith("matmul.bf16") and arch == 90:
                assert one["instructions"]["wgmma.mma_async"], f"{name}: no wgmma on sm_90"


def test_every_kernel_file_has_cases() -> None:
    files = {path.stem for path in Path(__file__).resolve().parents[3].glob("kernels/dspark_kernels/gpu/*.py")}
    assert set(MODULES) == files - {"__init__", "aot", "arguments"}
    assert {case.name.partition(".")[0] for case in cases()} == set(MODULES)
    assert len({case.name for case in cases()}) == len(cases())
