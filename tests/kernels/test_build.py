"""The compiled library: its cache, its errors, its thread pool, and bits that do not depend on the instruction set."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dspark import ops
from dspark.contracts import DsparkError
from dspark.ops.cpu import native
from dspark_kernels import build


def test_the_sources_are_data_of_the_package() -> None:
    assert {"linear.c", "attention.c", "noise.c", "rows.c", "sampling.c"} <= {p.name for p in build.SOURCES.glob("*.c")}
    assert len(build.source_hash()) == 64


def test_the_cache_lies_where_the_user_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("DSPARK_KERNEL_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build.cache_dir() == tmp_path / "dspark" / "kernels"
    monkeypatch.setenv("DSPARK_KERNEL_CACHE", str(tmp_path / "here"))
    assert build.cache_dir() == tmp_path / "here"


def test_without_a_compiler_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    build.compiler.cache_clear()
    try:
        with pytest.raises(RuntimeError, match="apt install gcc"):
            build.compiler()
    finally:
        build.compiler.cache_clear()


def test_a_failed_build_reaches_the_user_as_a_dspark_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> ctypes.CDLL:
        raise RuntimeError("kernels: expected a C compiler")

    monkeypatch.setattr(native.dspark_kernels, "library", fail)
    native.lib.cache_clear()
    try:
        with pytest.raises(DsparkError, match="C compiler"):
            ops.linear(torch.zeros(1, 1), torch.zeros(1, 1))
    finally:
        native.lib.cache_clear()


def test_a_compiler_that_fails_is_quoted(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)failed:.*Set CC"):
        build.run([sys.executable, "-c", "import sys; sys.exit('no such flag')"])


def test_a_compiler_that_is_named_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/nowhere/cc")
    build.compiler.cache_clear()
    try:
        with pytest.raises(RuntimeError, match="expected CC to name a C compiler on PATH, but got '/nowhere/cc'"):
            build.compiler()
    finally:
        build.compiler.cache_clear()


def test_a_damaged_library_is_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading half a library ends the process with SIGBUS, so its hash is looked at first."""
    built: list[Path] = []
    whole = Path(native.lib()._name).read_bytes()

    def replace(target: Path, content: bytes) -> None:  # never into a file that this process has mapped
        target.unlink(missing_ok=True)
        target.write_bytes(content)

    def make(target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        replace(target, whole)
        target.with_suffix(".sha256").write_text(build._hash(target))
        built.append(target)

    monkeypatch.setenv("DSPARK_KERNEL_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "build", make)
    for damage in (None, b"", b"half", None):
        if built and damage is not None:
            replace(built[-1], damage)
        build.library.cache_clear()
        assert build.library().dspark_panel_width() > 0
    build.library.cache_clear()
    assert len(built) == 3, "once new, once for each damage, and not again"


POOL = """
import os, torch
torch.set_num_threads(2)
from dspark import ops
x, w = torch.randn(64, 512), torch.randn(512, 512)
def tasks():
    return len(os.listdir("/proc/self/task"))
torch.randn(2000, 2000).exp().sum()
before = tasks()
ops.linear(x, w)
print(before, tasks(), ops.cpu.native.lib().dspark_team_size(2))
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
def test_torch_and_the_kernels_share_one_pool() -> None:
    done = subprocess.run([sys.executable, "-c", POOL], capture_output=True, text=True, check=True)
    before, after, team = map(int, done.stdout.split())
    assert team == 2
    assert after == before, "the kernels started threads of their own"


@pytest.mark.slow
@pytest.mark.skipif(
    not build.cpu_flags() or "avx2" not in build.cpu_flags(), reason="compares an AVX2 with a plain build"
)
def test_bits_do_not_depend_on_the_instruction_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same sources without AVX and FMA instructions (fmaf in software) give the same bits."""
    flags = tuple(flag for flag in build.FLAGS if not flag.startswith("-march"))
    build.build(tmp_path / "plain.so", flags)
    plain = build.declare(ctypes.CDLL(str(tmp_path / "plain.so")))
    calls = {
        "linear": lambda: ops.linear(torch.ones(3, 40).cumsum(1).sin(), torch.ones(33, 40).cumsum(0).cos()),
        "rms_norm": lambda: ops.rms_norm(torch.arange(100.0).view(2, 50).sin(), torch.arange(50.0), 1e-5),
        "silu_mul": lambda: ops.silu_mul(torch.linspace(-90, 90, 160).view(2, 80)),
        "attention": _small_attention,
        "shape_probs": lambda: ops.shape_probs(
            torch.arange(900.0).sin().view(1, 900) * 4, torch.tensor([0.8]), torch.tensor([0]), torch.tensor([0.9]),
            torch.tensor([0.0]),
        ),
        "raw_logprob": lambda: ops.raw_logprob(torch.arange(900.0).sin().view(1, 900), torch.tensor([5])),
        "log_softmax": lambda: ops.log_softmax(torch.arange(900.0).cos().view(1, 900) * 9),
        "uniform": lambda: ops.uniform(torch.arange(9), 2, torch.arange(9)),
    }  # fmt: skip
    fast = {name: call() for name, call in calls.items()}
    assert plain.dspark_has_fma() == 0
    for module in ("linear", "rows", "attention", "sampling"):
        monkeypatch.setattr(sys.modules[f"dspark.ops.cpu.{module}"], "lib", lambda: plain)
    for name, call in calls.items():
        assert torch.equal(call(), fast[name]), name


def _small_attention() -> torch.Tensor:
    q, k, v = (torch.arange(float(n * h * 24)).sin().view(n, h, 24) for n, h in ((5, 4), (30, 2), (30, 2)))
    return ops.attention(q, k, v, torch.zeros(5, dtype=torch.int64), torch.arange(26, 31), 0.3)
