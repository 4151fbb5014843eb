"""`dspark bench rollouts`: what it runs, and that a difference, or a run that proves nothing, is no success."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from dspark import cli
from dspark.bench import rolling
from dspark.bench.rolling import Rolled, Table, Way
from dspark.commands import bench_rollouts
from dspark.contracts import DsparkError
from tests.bench.conftest import World, models

ROWS = [Rolled("plain", "ab" * 32, 3, 24, 500), Rolled("batch 1", "ab" * 32, 3, 24, 500)]
OTHER = Rolled("3 workers", "cd" * 32, 3, 24, 500)


def test_a_difference_is_named() -> None:
    assert Table(ROWS).differing == []
    assert rolling.as_lines(Table(ROWS))[-1] == "all equal"
    assert Table([*ROWS, OTHER]).differing == ["3 workers"]
    lines = rolling.as_lines(Table([*ROWS, OTHER], {"with a draft model": "there is none"}))
    assert lines[1].split()[-1] == "ab" * 6
    assert lines[-2].split(maxsplit=4)[-1] == "not run: there is none"
    assert lines[-1] == "differing: 3 workers"


def test_every_setting_of_the_contract_is_there() -> None:
    titles = [way.title for way in rolling.ways(Path("a"), Path("b"), "bundle", 2, 3)]
    for word in ("batch 16", "batch 4", "batch 1", "shuffled", "3 workers", "1 thread ", "killed 3", "draft model"):
        assert any(word in title for title in titles), word
    assert not any("draft model" in way.title for way in rolling.ways(Path("a"), Path("b"), "", 2, 3))


def test_without_ray_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_rollouts, "find_spec", lambda name: None)
    found = rolling.table(
        rolling.ways(Path("a"), Path("b"), "", 2, 3), lambda way: ROWS[0], bench_rollouts._why_not
    )  # fmt: skip
    assert found.skipped == {"3 workers": "Ray is not installed"}


def test_a_draft_model_that_is_never_right_or_never_wrong_proves_nothing() -> None:
    way = Way("with the draft model", ("--drafter", "x"))
    for verified, accepted in ((0, 0), (9, 0), (9, 9)):
        with pytest.raises(DsparkError, match="to be accepted and to be rejected"):
            bench_rollouts._check(way, Rolled("x", "", 1, 1, 1, 0, verified, accepted))
    bench_rollouts._check(way, Rolled("x", "", 1, 1, 1, 0, 9, 4))


def test_a_run_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(DsparkError, match="'plain' to end well"):
        rolling.roll(Way("plain"), [], tmp_path)
    with pytest.raises(DsparkError, match="its start 1 ended by itself"):
        rolling.roll(Way("plain", kills=1), [], tmp_path)


@pytest.mark.slow
def test_on_a_small_target(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Of each kind of setting one: every run is a process that loads its models."""
    pytest.importorskip("ray", reason="Ray is not installed (pip install 'dspark[ray]')")
    ways, words = rolling.ways, ("batch 16", "shuffled", "workers", "killed", "draft model")
    monkeypatch.setattr(
        rolling, "ways",
        lambda *args: [w for w in ways(*args) if w.title[-7:] != "batch 1" and any(word in w.title for word in words)],
    )  # fmt: skip
    small = ["bench", "rollouts", *models(world), "--prompts", world.prompts]
    small += ["--limit", "4", "--max_tokens", "60", "--kills", "1", "--quiet", "--json"]
    code = cli.main(small)
    said = capsys.readouterr()
    assert code == 0, said
    found = json.loads(said.out)
    assert (found["differing"], found["skipped"]) == ([], {})
    assert len({row["digest"] for row in found["rows"]}) == 1
    assert len(found["rows"]) == 6
    for row in found["rows"]:
        assert (row["trajectories"], row["shards"]) == (8, 4)
        assert ("draft model" in row["title"]) == (0 < row["accepted"] < row["verified"])
