"""Compiles every GPU kernel ahead of time, with no GPU present, and reads what it needs from the compiled file.

``python -m dspark_kernels.gpu.aot [--arch 80 90 100] [--only NAME]`` prints one JSON list of ``Usage``. A kernel's file
lists its ``AOT`` cases: the argument types and constants that its launcher really uses. Run it without
TRITON_INTERPRET: interpreted kernels cannot be compiled.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

MODULES = (  # files of this folder with an AOT list
    "matmul", "norm", "pointwise", "attention", "logsoftmax",
    "philox", "markov", "confidence", "acceptance", "verify", "draw", "schedule",
)  # fmt: skip
ARCHITECTURES = (80, 90, 100)
SHARED_LIMIT = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}  # bytes a block may use (CUDA C++ programming guide)


@dataclass(frozen=True, slots=True)
class Case:
    """One compilation. signature: argument -> Triton type ("*bf16", "i32", "fp32"); constants: the constexpr arguments.

    Pointers are taken to be multiples of 16 bytes; write "i32:16" for an integer that is a multiple of 16, which the
    launcher would pass on and which decides how wide loads are.
    fp_fusion False forbids contracting a * b + c, where the bits of a formula are fixed elsewhere (the noise).
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    fp_fusion: bool = True


@dataclass(frozen=True, slots=True)
class Usage:
    """What one compiled kernel takes per thread (registers, stack and local bytes: spills) and per block (shared)."""

    name: str
    arch: int
    registers: int
    stack: int
    local: int
    shared: int
    instructions: dict[str, int] = field(default_factory=dict)


def compile_case(case: Case, arch: int) -> Usage:
    """Compiles for sm_<arch>. Raises what Triton raises when it cannot."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {**case.signature, **dict.fromkeys(case.constants, "constexpr")}
    signature = {name: types[name].removesuffix(":16") for name in case.kernel.arg_names}
    aligned = [(i,) for i, name in enumerate(signature) if types[name].startswith("*") or types[name].endswith(":16")]
    source = ASTSource(
        case.kernel, signature=signature, constexprs=dict(case.constants),
        attrs={place: [["tt.divisibility", 16]] for place in aligned},
    )  # fmt: skip
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages, "enable_fp_fusion": case.fp_fusion}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    found = _resources(compiled.asm["cubin"])
    counts = {word: compiled.asm["ptx"].count(word) for word in ("wgmma.mma_async", "tcgen05.mma", "mma.sync")}
    return Usage(case.name, arch, **{**found, "shared": int(compiled.metadata.shared)}, instructions=counts)


def _resources(cubin: bytes) -> dict[str, int]:
    """REG, STACK and LOCAL as the bundled cuobjdump reports them."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run([str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = {key: max(int(n) for n in re.findall(rf"{key}:(\d+)", told)) for key in ("REG", "STACK", "LOCAL")}
    return {"registers": found["REG"], "stack": found["STACK"], "local": found["LOCAL"]}


def cases() -> list[Case]:
    """Every case of every kernel file."""
    return [case for name in MODULES for case in importlib.import_module(f"dspark_kernels.gpu.{name}").AOT]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, nargs="*", default=list(ARCHITECTURES))
    parser.add_argument("--only", help="cases whose name contains this")
    args = parser.parse_args()
    chosen = [case for case in cases() if not args.only or args.only in case.name]
    print(json.dumps([asdict(compile_case(case, arch)) for case in chosen for arch in args.arch], indent=1))


if __name__ == "__main__":
    main()
