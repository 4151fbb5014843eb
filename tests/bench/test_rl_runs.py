"""`dspark bench rl-runs`: what it runs, and that a difference, or a run that proves nothing, is no success."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dspark import cli
from dspark.bench import rl_runs
from dspark.bench.rl_runs import Ran, Way
from dspark.contracts import DsparkError

ROW = Ran("as the recipe says", 8, 256, "ab" * 32, "cd" * 32, 0, 0)
ROOT = Path(__file__).resolve().parents[2]


def test_a_difference_is_named() -> None:
    other = replace(ROW, title="lookup", policy="ef" * 32)
    assert rl_runs.as_lines([ROW, ROW])[-1] == "all equal"
    assert rl_runs.as_lines([ROW, other])[-1] == "differing: lookup"
    assert rl_runs.differing([ROW, replace(ROW, title="x", shards="")]) == ["x"]


def test_every_setting_is_there_and_fits() -> None:
    titles = [way.title for way in rl_runs.ways("bundle", 2)]
    for word in ("recipe", "in flight", "killed", "lookup", "frozen", "following"):
        assert any(word in title for title in titles), word
    assert not any("draft" in way.title for way in rl_runs.ways("", 2))
    assert max(map(len, rl_runs.as_lines([replace(ROW, title=title) for title in titles]))) <= 80


def test_a_run_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(DsparkError, match="'plain' to end well"):
        rl_runs.run(Way("plain"), "x.yaml", [], tmp_path)
    with pytest.raises(DsparkError, match="its start 1 ended by itself"):
        rl_runs.run(Way("plain", kills=1), "x.yaml", [], tmp_path)


@pytest.mark.slow
def test_on_the_digits_task(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Three settings: every run is a process of its own. Drafts looked up are right and wrong."""
    all_ways = rl_runs.ways
    titles = ("as the recipe says", "killed 1 times and resumed", "lookup")
    monkeypatch.setattr(rl_runs, "ways", lambda *args: [way for way in all_ways(*args) if way.title in titles])
    monkeypatch.chdir(ROOT)
    code = cli.main(["bench", "rl-runs", "--recipe", "recipes/rl-digits.yaml", "--steps", "6", "--kills", "1",
                     "--quiet", "--json"])  # fmt: skip
    said = capsys.readouterr()
    assert code == 0, said
    found = json.loads(said.out)
    assert found["differing"] == []
    assert [row["title"] for row in found["rows"]] == list(titles)
    assert {row["rollouts"] for row in found["rows"]} == {6}
    assert 0 < found["rows"][2]["accepted"] < found["rows"][2]["verified"]
