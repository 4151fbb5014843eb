"""Compiles ``cpu/*.c`` once with the machine's C compiler and loads the library with ctypes.

The library lies in ``$XDG_CACHE_HOME/dspark/kernels/<key>/`` (``~/.cache`` by default); the key is a hash of sources,
compiler version, flags and CPU, so a changed source or another machine never meets a stale build. It is written
under a temporary name and renamed: processes that race build the same bytes and the last one wins.
``$DSPARK_KERNEL_CACHE`` names another folder. Linked to torch's own libgomp, so torch and the kernels share one
pool of threads. Raises RuntimeError with a remedy when there is no compiler or it fails.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

SOURCES = Path(__file__).parent / "cpu"
FLAGS = (
    "-std=gnu11",
    "-O3",
    "-march=native",
    "-fPIC",
    "-fopenmp",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fvisibility=hidden",
)
SIGNATURES: dict[str, tuple[str, str]] = {  # name -> (result, arguments); p pointer, l int64, i int, f float
    "dspark_team_size": ("i", "i"),
    "dspark_vector_width": ("i", ""),
    "dspark_panel_width": ("i", ""),
    "dspark_has_fma": ("i", ""),
    "dspark_packed_bytes": ("l", "lli"),
    "dspark_pack_weight": ("", "ppllii"),
    "dspark_huge_pages": ("", "pl"),
    "dspark_linear": ("i", "ppppp" + "lll" + "iii"),
    "dspark_rms_norm": ("", "ppp" + "llll" + "fii"),
    "dspark_add_rms_norm": ("", "ppppp" + "ll" + "fii"),
    "dspark_rotary": ("", "pppp" + "llll" + "ii"),
    "dspark_silu_mul": ("", "pp" + "ll" + "ii"),
    "dspark_attention": ("i", "pppppppppp" + "llllll" + "fii"),
    "dspark_layers_words": ("l", ""),
    "dspark_layers_scratch": ("l", "p"),
    "dspark_layers": ("i", "plppppppppff" + "ii"),
    "dspark_gumbel_argmax": ("l", "ppppp" + "i" + "ll" + "i"),
    "dspark_uniform": ("", "ppp" + "i" + "l"),
    "dspark_gumbel": ("", "pppp" + "i" + "ll"),
    "dspark_shape_probs": ("i", "pppppp" + "ll" + "i"),
    "dspark_raw_logprob": ("i", "ppp" + "ll" + "i"),
    "dspark_log_softmax": ("i", "pp" + "ll" + "i"),
    "dspark_log_of": ("i", "ppp" + "ll"),
}
_CTYPES = {"": None, "p": ctypes.c_void_p, "l": ctypes.c_int64, "i": ctypes.c_int, "f": ctypes.c_float}


@functools.cache
def compiler() -> str:
    """Path of the C compiler: ``$CC``, else cc, gcc or clang."""
    named = os.environ.get("CC")
    for name in (named,) if named else ("cc", "gcc", "clang"):
        path = shutil.which(name)
        if path:
            return path
    if named:
        raise RuntimeError(f"kernels: expected CC to name a C compiler on PATH, but got {named!r}. Mend or unset it.")
    raise RuntimeError(
        "kernels: expected a C compiler (cc, gcc or clang) on PATH, but found none. "
        "Install one (Debian: apt install gcc) or set CC to its path."
    )


@functools.cache
def compiler_version() -> str:
    """First line of ``cc --version``."""
    done = subprocess.run([compiler(), "--version"], capture_output=True, text=True, check=False)
    return (done.stdout or done.stderr).splitlines()[0].strip() if done.stdout or done.stderr else "unknown"


@functools.cache
def cpu_model() -> str:
    """Model name and instruction set flags that -march=native looks at, from /proc/cpuinfo where it exists."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    wanted = ("model name", "cpu family", "model\t", "CPU part")
    found = [line.split(":", 1)[1].strip() for line in lines if line.startswith(wanted) and ":" in line]
    return " / ".join(dict.fromkeys(found)) or platform.machine()


@functools.cache
def cpu_flags() -> tuple[str, ...]:
    """Sorted instruction set flags, from /proc/cpuinfo where it exists."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ()
    for line in lines:
        if line.startswith(("flags", "Features")):
            return tuple(sorted(line.split(":", 1)[1].split()))
    return ()


@functools.cache
def source_hash() -> str:
    """sha256 over names and contents of the C sources and the flags: the kernels' version."""
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for path in sorted(SOURCES.glob("*.[ch]")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def cache_dir() -> Path:
    """Where builds are kept: $DSPARK_KERNEL_CACHE, else the user's cache folder."""
    named = os.environ.get("DSPARK_KERNEL_CACHE")
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "dspark" / "kernels"


def _torch_gomp() -> list[str]:
    """Linker arguments for torch's OpenMP runtime, or the compiler's own when torch ships none."""
    folder = Path(torch.__file__).parent
    for place in (folder / "lib", folder.parent / "torch.libs"):
        for path in sorted(place.glob("libgomp*.so*")):
            return [str(path), f"-Wl,-rpath,{place}"]
    return ["-fopenmp"]


def build(target: Path, flags: tuple[str, ...] = FLAGS) -> None:
    """Compiles every source with these flags and moves the shared library to ``target``."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        sources = sorted(SOURCES.glob("*.c"))
        objects = [str(Path(work) / (source.stem + ".o")) for source in sources]
        commands = [[compiler(), *flags, "-c", str(s), "-o", o] for s, o in zip(sources, objects, strict=True)]
        with ThreadPoolExecutor() as pool:
            list(pool.map(run, commands))
        built = Path(work) / target.name
        run([compiler(), "-shared", "-o", str(built), *objects, *_torch_gomp(), "-lm"])
        if not built.is_file():
            raise RuntimeError(
                f"kernels: expected {compiler()} to write a library, but it wrote none. Set CC to another."
            )
        seal = Path(work) / "seal"
        seal.write_text(_hash(built))
        os.replace(built, target)
        os.replace(seal, _seal_of(target))


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _seal_of(target: Path) -> Path:
    return target.with_suffix(".sha256")


def intact(target: Path) -> bool:
    """Is the built library there, whole, as its hash beside it says? Loading half a library kills the process."""
    return target.is_file() and _seal_of(target).is_file() and _seal_of(target).read_text() == _hash(target)


def run(command: list[str]) -> None:
    """Runs a compiler command; RuntimeError with its last words when it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(
            f"kernels: expected {command[0]} to compile the C kernels, but it failed:\n{done.stderr.strip()[-2000:]}\n"
            "Set CC to another compiler (gcc 9 or newer is known to work)."
        )


def declare(lib: ctypes.CDLL) -> ctypes.CDLL:
    """Sets argument and result types of every kernel, so that calls need no conversion code."""
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(lib, name)
        function.restype = _CTYPES[result]
        function.argtypes = [_CTYPES[a] for a in arguments]
    return lib


@functools.cache
def library() -> ctypes.CDLL:
    """The loaded kernels, built first when this machine has no build of these sources. Takes seconds then."""
    key = hashlib.sha256(
        "\n".join((source_hash(), compiler_version(), cpu_model(), *cpu_flags(), torch.__file__)).encode()
    ).hexdigest()[:32]
    target = cache_dir() / key / "libdspark.so"
    if not intact(target):
        try:
            build(target)
        except OSError as error:
            raise RuntimeError(
                f"kernels: expected a writable cache folder, but got {error}. Set DSPARK_KERNEL_CACHE to one."
            ) from error
    try:
        return declare(ctypes.CDLL(str(target)))
    except (OSError, AttributeError) as error:
        raise RuntimeError(
            f"kernels: expected {target} to load, but got {error}. Remove its folder and try again."
        ) from error
