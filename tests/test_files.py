"""Whole files or none, and hashes that see every bit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from dspark import files
from dspark.contracts import DsparkError


def test_atomic_write_replaces_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "new" / "a.txt"
    files.atomic_write(path, "é")
    files.atomic_write(path, b"two")
    assert path.read_bytes() == b"two"
    assert os.listdir(path.parent) == ["a.txt"]


def test_atomic_write_that_fails_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    files.atomic_write(path, "old")

    def broken(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(DsparkError, match="No space left"):
        files.atomic_write(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_atomic_write_below_a_file(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(DsparkError, match="expected a place that can be written"):
        files.atomic_write(tmp_path / "file" / "a", "x")
    with (
        pytest.raises(DsparkError, match="expected a place where a folder can be made"),
        files.atomic_dir(tmp_path / "file" / "a"),
    ):
        pass


def test_atomic_dir_appears_whole_or_not_at_all(tmp_path):
    path = tmp_path / "bundle"
    with pytest.raises(FileNotFoundError), files.atomic_dir(path) as temporary:
        (temporary / "a").write_text((temporary / "missing").read_text())
    assert os.listdir(tmp_path) == []
    for text in ("first", "second"):
        with files.atomic_dir(path) as temporary:
            (temporary / text).write_text(text)
    assert os.listdir(path) == ["second"]
    with pytest.raises(FileNotFoundError), files.atomic_dir(path) as temporary:
        (temporary / "missing").read_text()
    assert os.listdir(path) == ["second"]
    assert os.listdir(tmp_path) == ["bundle"]


def test_sha256(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    want = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert files.sha256_file(tmp_path / "a") == want
    with pytest.raises(DsparkError, match="expected a readable file"):
        files.sha256_file(tmp_path / "b")


def test_sha256_json_is_canonical():
    assert files.sha256_json({"b": 1, "a": [1.5, None]}) == files.sha256_json({"a": [1.5, None], "b": 1})
    assert files.sha256_json({"a": 1}) != files.sha256_json({"a": 2})
    with pytest.raises(ValueError):
        files.sha256_json({"a": float("nan")})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8])
def test_tensor_hash_sees_content_not_layout(dtype):
    tensor = (torch.arange(12).reshape(3, 4) % 2).to(dtype)
    assert files.tensor_hash(tensor) == files.tensor_hash(tensor.t().contiguous().t())
    assert files.tensor_hash(tensor) != files.tensor_hash(tensor.reshape(4, 3))
    assert files.tensor_hash(tensor) != files.tensor_hash(~tensor if dtype == torch.bool else tensor + 1)


def test_tensor_hash_edges():
    assert files.tensor_hash(torch.zeros(1)) != files.tensor_hash(-torch.zeros(1))
    assert files.tensor_hash(torch.zeros(2)) != files.tensor_hash(torch.zeros(2, dtype=torch.int32))
    assert files.tensor_hash(torch.zeros(0, 3)) != files.tensor_hash(torch.zeros(3, 0))
    assert len({files.tensor_hash(torch.tensor(v, requires_grad=True)) for v in (1.0, 2.0)}) == 2


@pytest.mark.parametrize(
    ("data", "message"),
    [(b"", "an empty file"), (b" \n", "an empty file"), (b"{", "does not parse"), (b"\xff", "byte 0 is not UTF-8")],
)
def test_read_json_says_what_is_wrong(tmp_path, data, message):
    (tmp_path / "a.json").write_bytes(data)
    with pytest.raises(DsparkError, match=f"^plan: expected.*{message}"):
        files.read_json(tmp_path / "a.json", "plan")


def test_read_json(tmp_path):
    with pytest.raises(DsparkError, match="No such file"):
        files.read_json(tmp_path / "a.json", "plan")
    (tmp_path / "a.json").write_text('{"a": [1]}')
    assert files.read_json(tmp_path / "a.json", "plan") == {"a": [1]}


@pytest.mark.parametrize("name", ["../a", "/a", "a/b", "..", ".", "", "a\\b", "c:a", "a\0", 1, None, ["a"]])
def test_child_path_refuses_to_leave(tmp_path, name):
    with pytest.raises(DsparkError, match="expected a plain file name"):
        files.child_path(tmp_path, name, "manifest")


def test_child_path(tmp_path):
    assert files.child_path(tmp_path, "a.txt", "manifest") == tmp_path / "a.txt"
    (tmp_path / "link").symlink_to(Path("/etc"))
    with pytest.raises(DsparkError, match="symbolic link"):
        files.child_path(tmp_path, "link", "manifest")


def test_a_place_is_checked_before_long_work(tmp_path):
    (tmp_path / "file").write_text("x")
    for path, folder in (("file", False), ("new", False), ("a/b/new", False), ("new", True), (".", True)):
        files.check_place(tmp_path / path, folder)
    for path, folder in (("file", True), (".", False), ("file/under", False), ("file/under", True)):
        with pytest.raises(DsparkError, match="Give --out another name"):
            files.check_place(tmp_path / path, folder)
    assert not (tmp_path / "new").exists()


def test_a_shared_file_is_as_readable_as_any(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_text("x")
    (tmp_path / "a").chmod(0o600)
    files.share(tmp_path / "a")
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode
