"""Acceptance by context depth, counted by hand."""

from __future__ import annotations

from dspark.bench.depth import as_lines, by_depth
from dspark.contracts import Round
from dspark.runner.acceptance import Drafted
from tests.bench.conftest import narrow


def test_spans_by_hand() -> None:
    """Depth 10: two of three accepted, three tokens; then a round that ends the sequence on its accepted draft, one
    token. Depth 70: nothing of two verified. Depth 5000: all three and one more."""
    near = Drafted("a", [Round(10, (1, 2, 3), 3, 2), Round(13, (4,), 1, 1)], last=14)
    far = Drafted("b", [Round(70, (1, 2, 3), 2, 0), Round(5000, (1, 2, 3), 3, 3)], last=9000)
    first, second, last = by_depth([near, far])
    assert (first.low, first.high, first.rounds, first.tau) == (0, 64, 2, 2.0)
    assert first.per_slot == (1.0, 1.0, 0.0)
    assert (second.low, second.high, second.rounds, second.tau) == (64, 128, 1, 1.0)
    assert second.per_slot == (0.0, None, None)
    assert (last.low, last.high, last.rounds, last.tau) == (4096, None, 1, 4.0)
    lines = narrow("\n".join(as_lines([first, second, last])))
    assert [line.split()[-3:] for line in lines[1:]] == [["100%", "100%", "0%"], ["0%", "-", "-"], ["100%"] * 3]


def test_no_rounds_no_rows_and_wide_blocks_are_told_in_parts() -> None:
    assert by_depth([Drafted("a", [], 3)]) == []
    wide = Drafted("a", [Round(5, tuple(range(16)), 16, 16)], last=99)
    lines = narrow("\n".join(as_lines(by_depth([wide]))))
    assert len(lines) == 4
    assert lines[2].split()[-1] == "16"
