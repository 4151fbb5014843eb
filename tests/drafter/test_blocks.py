"""Block arithmetic against a hand-written table."""

from __future__ import annotations

import pytest
import torch

from dspark.drafter.blocks import blocks_at


def test_labels_and_context_rows():
    ids, offsets = torch.tensor([10, 11, 12, 13, 20, 21]), torch.tensor([0, 4, 6])
    blocks = blocks_at(ids, offsets, torch.tensor([0, 0, 1]), torch.tensor([0, 2, 1]), 2)
    assert blocks.anchor_ids.tolist() == [10, 12, 21]
    assert blocks.labels.tolist() == [[11, 12], [13, 13], [21, 21]]
    assert blocks.in_sequence.tolist() == [[True, True], [True, False], [False, False]]
    assert blocks.begin.tolist() == [0, 0, 4]
    assert blocks.end.tolist() == [0, 2, 5]


def test_anchor_outside_its_sequence():
    with pytest.raises(AssertionError, match="outside"):
        blocks_at(torch.arange(6), torch.tensor([0, 4, 6]), torch.tensor([1]), torch.tensor([2]), 2)
