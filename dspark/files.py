"""Files that are either whole or not there, and hashes of what they hold.

Writes go to a hidden temporary neighbour, are fsynced and then renamed, so that a reader (or a killed run that starts
again) never sees half a file. Hashes are sha256 in lower-case hex. Left out on purpose: locking and journals, which
only rollouts need (rollouts/journal.py), and any knowledge of what the files mean.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from dspark.contracts import DsparkError

_CHUNK = 1 << 20  # bytes read at a time when hashing
_LARGEST_JSON = 64 << 20  # bytes: parsing takes a second or two, and no file of ours comes near


def atomic_write(path: str | Path, data: bytes | memoryview | str) -> None:
    """Writes `data` (text as UTF-8) to `path`: afterwards the file holds all of it, or what it held before.

    Missing parent folders are made. Raises DsparkError when the place cannot be written.
    """
    path = Path(path)
    temporary = _temporary(path)
    payload = data.encode("utf-8") if isinstance(data, str) else data
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as stream:
            stream.write(payload)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
        sync_dir(path.parent)
    except OSError as error:
        raise DsparkError(
            f"{path}: expected a place that can be written, but got: {error.strerror or error}. Make room or make it "
            "writable and run again; what was there is as it was."
        ) from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def check_place(path: str | Path, folder: bool = False) -> None:
    """Before long work: raises DsparkError where its result could not be written to `path`, a file or a folder."""
    path = Path(path)
    wrong = path.is_file() if folder else path.is_dir()
    above = next(p for p in (path, *path.absolute().parents) if p.exists())
    if wrong or not os.access(above, os.W_OK) or not (above == path or above.is_dir()):
        kind, got = ("folder", "a file") if folder else ("file", "a folder")
        raise DsparkError(
            f"{path}: expected a {kind} that can be written, but {above} is {got if wrong else 'not writable'}. Give "
            "--out another name."
        )


def share(path: str | Path) -> None:
    """Gives a file that a library made for its owner alone the permissions that any other file gets."""
    mask = os.umask(0)
    os.umask(mask)
    os.chmod(path, 0o666 & ~mask)


@contextmanager
def atomic_dir(path: str | Path) -> Iterator[Path]:
    """Yields a fresh temporary folder beside `path`; at a normal exit it is synced and becomes `path`.

    What was at `path` before is replaced only then. An exception removes the temporary folder and leaves `path` alone.
    """
    path = Path(path)
    temporary, old = _temporary(path), _temporary(path, "old")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise DsparkError(
            f"{path}: expected a place where a folder can be made, but got: {error.strerror or error}."
        ) from error
    try:
        yield temporary
        _sync_tree(temporary)
        if path.exists():
            os.replace(path, old)
        os.replace(temporary, path)
        sync_dir(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if old.exists():
            if not path.exists():  # the second rename failed: put back what was there
                os.replace(old, path)
            else:
                _remove(old)


def sha256_file(path: str | Path) -> str:
    """sha256 of a file's bytes. Raises DsparkError when it cannot be read."""
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as stream:
            while chunk := stream.read(_CHUNK):
                digest.update(chunk)
    except OSError as error:
        raise DsparkError(f"{path}: expected a readable file, but got: {error.strerror or error}.") from error
    return digest.hexdigest()


def canonical_json(obj: Any) -> str:
    """The one JSON text of `obj`: sorted keys, no spaces, floats in Python's shortest exact form, no NaN."""
    return json.dumps(obj, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def sha256_json(obj: Any) -> str:
    """sha256 of `obj`'s canonical JSON: equal for equal content, whatever the keys' order."""
    return hashlib.sha256(canonical_json(obj).encode("utf-8")).hexdigest()


def tensor_hash(tensor: torch.Tensor) -> str:
    """sha256 over dtype, shape and the values' bytes in row-major order: independent of strides and device."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    digest = hashlib.sha256(f"{tensor.dtype}{list(tensor.shape)}".encode())
    if flat.numel():
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def read_json(path: str | Path, what: str) -> Any:
    """Parses a JSON file. `what` names it in the error ("manifest", "drafter config").

    Raises DsparkError when it is absent, empty, above 64 MiB, not UTF-8 or not JSON.
    """
    path = Path(path)
    try:
        if path.stat().st_size > _LARGEST_JSON:
            raise DsparkError(
                f"{what}: expected JSON of at most {_LARGEST_JSON >> 20} MiB in {path}, but it has "
                f"{path.stat().st_size >> 20} MiB. Is this the right file?"
            )
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise DsparkError(
            f"{what}: expected a JSON file at {path}, but got: {error.strerror or error}. Check the path."
        ) from error
    except UnicodeDecodeError as error:
        raise DsparkError(f"{what}: expected UTF-8 JSON in {path}, but byte {error.start} is not UTF-8.") from error
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: also a number of thousands of digits
        got = "an empty file" if not text.strip() else f"something that does not parse ({error})"
        raise DsparkError(f"{what}: expected JSON in {path}, but got {got}. Make the file again.") from error


def child_path(root: str | Path, name: Any, what: str) -> Path:
    """`root/name` for a name read from a file that others may have written: a plain file name, inside `root`.

    Raises DsparkError for anything else: another type, an empty name, separators, "..", absolute or device names, or
    a symbolic link.
    """
    plain = isinstance(name, str) and name not in ("", ".", "..") and not any(c in name for c in "/\\\0:")
    if not plain:
        raise DsparkError(f"{what}: expected a plain file name, but got {name!r}. It would lie outside {root}.")
    path = Path(root) / name
    if path.is_symlink():
        raise DsparkError(f"{what}: expected {name!r} to be a file in {root}, but got a symbolic link.")
    return path


def sync_dir(path: str | Path) -> None:
    """Makes renames and removals in a folder durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sync_tree(root: Path) -> None:
    for folder, _, names in os.walk(root):
        for name in names:
            handle = os.open(os.path.join(folder, name), os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
        sync_dir(folder)


def _temporary(path: Path, suffix: str = "tmp") -> Path:
    return path.parent / f".{path.name}.{os.getpid()}.{suffix}"


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
