"""The reference's own checkpoints: imported, exported as the same format, and held against the originals."""

from __future__ import annotations

import json

import torch
from safetensors.torch import load_file

from dspark.export.formats import format_of, load_draft, write_draft
from dspark.target.checkpoint import read_config_dict

# Settings of training, of a mode that is off, and the name of the library that wrote the file.
MEANINGLESS = {"num_anchors", "max_window_layers", "transformers_version"}


def test_the_reference_format_comes_back_as_it_was(case, tmp_path):
    target, original = case.target(), case.path / "draft"
    raw = read_config_dict(case.target_path)
    assert format_of(original) == "deepspec"
    draft = load_draft(original, target)
    assert not draft.unproved
    write_draft("deepspec", tmp_path / "draft", draft.drafter, target, raw, {})
    before, after = (load_file(folder / "model.safetensors") for folder in (original, tmp_path / "draft"))
    assert before.keys() == after.keys()
    assert all(
        torch.equal(tensor, after[name]) and tensor.dtype == after[name].dtype for name, tensor in before.items()
    )
    wanted, got = (json.loads((folder / "config.json").read_text()) for folder in (original, tmp_path / "draft"))
    assert {key: got.get(key, "absent") for key in wanted.keys() - MEANINGLESS} == {
        key: value for key, value in wanted.items() if key not in MEANINGLESS
    }
    assert got.keys() - wanted.keys() == {"rope_theta", "rope_scaling"}
