"""A sequential draft model (MTP) as a bundle, through the gate; the layouts of other projects have no place for it."""

from __future__ import annotations

import pytest
import torch

from dspark.commands.export import export
from dspark.contracts import DsparkError
from dspark.export.bundle import load_bundle, save_bundle
from dspark.export.formats import check_sayable
from dspark.export.gate import check_parity

FIELDS = {"architecture": "mtp", "num_layers": 4, "confidence_head": True, "draft_vocab_size": 12}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bundle_comes_back_through_the_gate(make_target, make_draft, target_folder, tmp_path, dtype):
    target = make_target()
    identity = save_bundle(tmp_path / "first", make_draft(target, dtype, **FIELDS))
    folder = str(target_folder(target))
    result = export(str(tmp_path / "first"), folder, "float32", str(tmp_path / "second"))
    assert result["compared"] > 0
    assert load_bundle(tmp_path / "second").hash == result["drafter_hash"] == identity
    assert load_bundle(tmp_path / "second").config.architecture == "mtp"


def test_the_gate_reads_its_own_parts(make_target, make_draft, blocks):
    """A weight that only such a draft model has, one bit off, is noticed."""
    target = make_target()
    one, two = (make_draft(target, **FIELDS) for _ in range(2))
    chosen, features, positions = blocks
    assert check_parity(one, two, chosen, features, positions) > 0
    with torch.no_grad():
        two.joins[2].proj.weight[0, 0] *= 1.01
    with pytest.raises(DsparkError, match=r"export gate: .*logits bit for bit"):
        check_parity(one, two, chosen, features, positions)


@pytest.mark.parametrize("kind", ["deepspec", "speculators"])
def test_other_formats_say_they_cannot_hold_it(make_target, make_draft, kind):
    with pytest.raises(DsparkError, match=f"{kind} format can hold, but it has architecture mtp"):
        check_sayable(kind, make_draft(make_target(), architecture="mtp", num_layers=4).config)
