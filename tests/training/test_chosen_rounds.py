"""Rounds that a policy chose by their confidences are no sample of all rounds, and are not taken for one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dspark.contracts import DsparkError
from dspark.training.sources import read_samples


@pytest.mark.parametrize(
    ("config", "ok"),
    [({}, True), ({"policy": ""}, True), ({"policy": "fixed"}, True), ({"policy": "global"}, False),
     ({"policy": "threshold", "commit_to_cap": False}, False), ({"policy": "global", "commit_to_cap": True}, True)],
)  # fmt: skip
def test_chosen_rounds_are_refused(tiny: Any, tmp_path: Path, config: dict[str, Any], ok: bool) -> None:
    folder = tiny.write_directory(tmp_path / "train", count=4)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "run": {"config": config}}))
    assert read_samples([str(folder)], rounds=False).samples
    if ok:
        assert read_samples([str(folder)], rounds=True).samples
        return
    with pytest.raises(DsparkError, match=f"policy {config['policy']} chose"):
        read_samples([str(folder)], rounds=True).samples
