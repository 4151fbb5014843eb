"""`dspark bench verify|acceptance|replay`, `profile` and `simulate`, end to end on a small target on disk."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from dspark import cli
from dspark.bench import verifying
from dspark.runner.curve import CapacityCurve
from tests.bench.conftest import World, models, narrow, rollout

pytestmark = pytest.mark.slow
Capture = pytest.CaptureFixture[str]


def told(capsys: Capture, code: int, *argv: str) -> str:
    """What a command printed, after it ended with the code that was expected."""
    got = cli.main([*argv, "--quiet"])
    out, err = capsys.readouterr()
    assert got == code, err
    assert "Traceback" not in err
    return err if code == cli.USER_ERROR else out


def refused(capsys: Capture, *argv: str) -> str:
    text = told(capsys, cli.USER_ERROR, *argv)
    assert text.startswith("error: ")
    return text


def verify(world: World, *options: str) -> list[str]:
    given = ["--prompts", world.prompts, "--curve", world.curve, "--limit", "2", "--max_tokens", "10", "--repeats", "1"]
    return ["bench", "verify", *models(world), *given, *options]


def replay(world: World, *options: str) -> list[str]:
    given = ["--target", world.target, "--dtype", "float32", "--max_tokens", "4", "--repeats", "1", "--limit", "2"]
    return ["bench", "replay", *given, *options]


def simulate(world: World, out: Path, *options: str) -> list[str]:
    return ["simulate", "--curve", world.curve, "--rollouts", world.rollouts, "--out", str(out), *options]


def test_profile(world: World, tmp_path: Path, capsys: Capture) -> None:
    out = str(tmp_path / "curve.json")
    small = ["profile", *models(world), "--requests", "2", "--context", "9", "--repeats", "1", "--out", out]
    lines = narrow(told(capsys, 0, *small))
    assert sum("(prompt)" in line for line in lines) == 3
    curve = CapacityCurve.load(out)
    assert (curve.rows, curve.requests, curve.prompt_rows) == ((2, 4, 6, 8, 10), (2,), (16, 64, 256))
    assert json.loads(told(capsys, 0, *small, "--json"))["rows"] == [2, 4, 6, 8, 10]
    assert "context" in refused(capsys, *small[:-2], "--context", "0")
    long = refused(capsys, *small, "--context", "600")
    assert "at most 559 for 2 requests" in long  # 1, five chunks of 256, twice 1 + ... + 5, and 5 to spare: 41
    assert "Lower --context" in long


def test_bench_verify(world: World, capsys: Capture) -> None:
    """In this small world no output that must be plain's is put to the test: that is no success."""
    rows = narrow(told(capsys, 1, *verify(world)))
    assert rows[-1].startswith("inconclusive: ")
    assert len(rows) == 1 + 16 + 11 + 11 + 1
    assert sum("refused: changes the law" in row for row in rows) == 3
    got = json.loads(told(capsys, 1, *verify(world, "--json")))
    assert {row["same"] for row in got if row["verifier"] in ("greedy", "coupled")} == {2}
    assert sum(row["accepted"] for row in got) > 0


def test_a_prompt_that_does_not_fit_is_said(world: World, capsys: Capture) -> None:
    long = refused(capsys, *verify(world, "--max_tokens", "600"))
    assert "at most 600 tokens" in long
    assert "Lower --max_tokens." in long


def test_bench_verify_ends_with_1_when_an_output_is_wrong(
    world: World, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = verifying.Verified(0.2, "coupled", "fixed", same=1, sequences=2)
    monkeypatch.setattr(verifying, "bench_verify", lambda *given: [wrong])
    assert "no (1 of 2)" in told(capsys, 1, *verify(world))
    right = verifying.Verified(0.2, "coupled", "fixed", same=2, sequences=2, drafted=4, accepted=1, rejected=1)
    monkeypatch.setattr(verifying, "bench_verify", lambda *given: [right])
    assert "yes" in told(capsys, 0, *verify(world))


def test_mistakes_of_bench_verify_are_said_before_anything_is_loaded(
    world: World, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dspark.commands.bench_runner.load", None)  # calling it would be a TypeError
    for option, value in (("threshold", "2"), ("threshold", "nan"), ("threshold", "x"), ("limit", "0"),
                          ("batch", "0"), ("max_tokens", "-1"), ("repeats", "0")):  # fmt: skip
        assert f"--{option}" in refused(capsys, *verify(world, f"--{option}", value))
    assert "capacity curve" in refused(capsys, *verify(world, "--curve", str(tmp_path / "nothing.json")))
    assert "--drafter" in refused(capsys, "bench", "verify")
    assert "--keep" in refused(capsys, *verify(world, "--keep", "9"))


def test_bench_replay(world: World, capsys: Capture) -> None:
    """Three consumers with a window of 8: exact from 22 on, in the default list beside the doublings of 14."""
    lines = narrow(told(capsys, 0, *replay(world)))
    assert lines[0].startswith("2 prompts, 8 tokens")
    assert [line.split()[0] for line in lines[2:]] == ["14", "22", "28", "56", "112", "full"]
    assert [line.split()[4] for line in lines[2:]] == ["differ", *["exact"] * 5]
    got = json.loads(told(capsys, 0, *replay(world, "--keep", "15", "--json")))
    assert [(row["keep"], row["exact"]) for row in got] == [(15, False), (None, True)]
    assert got[0]["kl"] > 0 == got[1]["kl"]


def test_mistakes_of_bench_replay_name_what_was_given(
    world: World, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = refused(capsys, *replay(world, "--keep", "30", "9"))
    assert "--keep of at least 14" in short
    assert "DEEPINFER" not in short
    other = refused(capsys, "bench", "replay", "--target", "smollm2-135m-instruct")
    assert "--target" in other
    assert "YocoForCausalLM" in other
    assert "DEEPINFER" not in other
    few = refused(capsys, *replay(world, "--prompts", world.prompts, "--keep", "500"))
    assert "more than 500 tokens" in few
    assert "Lower --keep" in few
    assert "at most 600 tokens" in refused(capsys, *replay(world, "--keep", "590"))
    monkeypatch.setenv("DEEPINFER_MAX_BACKTRACKING_TOKENS", "20")
    assert "--keep of at least 28" in refused(capsys, *replay(world, "--keep", "27"))


def look_up(world: World, *options: str) -> list[str]:
    given = ["--prompts", world.prompts, "--limit", "2", "--samples", "3", "--max_tokens", "20", "--repeats", "1"]
    return ["bench", "lookup", "--target", world.target, "--dtype", "float32", *given, *options]


def test_bench_lookup(world: World, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = narrow(told(capsys, 0, *look_up(world)))
    assert [" ".join(row.split()[:5]) for row in rows[1:5]] == [
        f"T 0.2 epoch {epoch} {way}" for epoch in (1, 2) for way in ("plain", "lookup")
    ]
    got = json.loads(told(capsys, 0, *look_up(world, "--drafter", world.bundle, "--curve", world.curve, "--json")))
    assert len(got) == 2 * 2 * 4
    assert {row["wrong"] for row in got} == {0}
    monkeypatch.setattr("dspark.bench.looking_up.differing", lambda *runs: 1)
    assert "1 differ" in told(capsys, 1, *look_up(world))
    for option, value in (("samples", "0"), ("width", "0"), ("batch", "0")):
        assert f"--{option}" in refused(capsys, *look_up(world, f"--{option}", value))
    assert "--samples" in refused(capsys, *verify(world, "--samples", "2"))


def test_rollouts_with_a_lookup(world: World, tmp_path: Path, capsys: Capture) -> None:
    """The same trajectories with a lookup, a draft model, both, or neither; mistakes are one error; and what reads a
    draft model's rounds says what it leaves out."""
    ways = {"none": ["--drafter", ""], "lookup": ["--drafter", "", "--lookup", "4"], "learned": [],
            "both": ["--lookup", "4"], "chosen": ["--lookup", "4", "--policy", "threshold", "--threshold", "0.2"],
            "alone": ["--drafter", "", "--lookup", "4", "--policy", "global", "--curve", world.curve]}  # fmt: skip
    hashes, again = set(), ["--samples_per_prompt", "3", "--temperature", "0.3"]
    for name, options in ways.items():
        assert rollout(world, str(tmp_path / name), *again, *options) == 0
        manifest = json.loads((tmp_path / name / "manifest.json").read_text())
        hashes.add(tuple(shard["trajectories"]["sha256"] for shard in manifest["shards"]))
    assert len(hashes) == 1
    capsys.readouterr()
    assert rollout(world, str(tmp_path / "both"), *again, "--lookup", "5") == cli.USER_ERROR
    assert "lookup was 4, now 5" in capsys.readouterr().err
    for options in (["--verifier", "rejection"], ["--commit-to-cap"], ["--drafter", "", "--commit-to-cap"]):
        assert rollout(world, str(tmp_path / "wrong"), "--lookup", "4", *options) == cli.USER_ERROR
        assert capsys.readouterr().err.count("error: ") == 1
    for options in (["--lookup", "4", "--gamma", "2"], ["--policy", "global"]):
        assert rollout(world, str(tmp_path / "wrong"), "--drafter", "", *options) == cli.USER_ERROR
        assert "expected a draft model with it" in capsys.readouterr().err
    assert not (tmp_path / "wrong").exists()
    assert cli.main(["bench", "acceptance", "--rollouts", str(tmp_path / "both"), "--json"]) == 0
    out, err = capsys.readouterr()
    assert "rounds were passed over, for a lookup drafted them" in err
    assert sum(row["rounds"] for row in json.loads(out)) > 0
    alone = ["bench", "acceptance", "--rollouts", str(tmp_path / "lookup")]
    assert "error: " in (text := told(capsys, cli.USER_ERROR, *alone))
    assert "expected rounds with drafts" in text
    assert cli.main(["replay", str(tmp_path / "both"), "--rescore", "--quiet"]) == 0


def test_bench_acceptance(world: World, tmp_path: Path, capsys: Capture) -> None:
    lines = narrow(told(capsys, 0, "bench", "acceptance", "--rollouts", world.rollouts))
    assert lines[0].split()[:3] == ["context", "rounds", "tau"]
    (row, *_) = json.loads(told(capsys, 0, "bench", "acceptance", "--rollouts", world.rollouts, "--json"))
    assert row["low"] == 0
    assert 1.0 <= row["tau"] <= 5.0
    assert len(row["per_slot"]) == 4
    assert "--rollouts" in refused(capsys, "bench", "acceptance")
    assert "manifest" in refused(capsys, "bench", "acceptance", "--rollouts", str(tmp_path))


def test_simulate_alone(world: World, tmp_path: Path, capsys: Capture) -> None:
    lines = narrow(told(capsys, 0, *simulate(world, tmp_path)))
    assert any(line.startswith("lagged_global") for line in lines)
    check_pictures(tmp_path)
    report = json.loads((tmp_path / "simulation.json").read_text())
    assert "tried" not in report
    assert len(report["rows"]) == 7 * 8


def test_simulate_beside_the_real_runner(world: World, tmp_path: Path, capsys: Capture) -> None:
    options = ["--tried", "1", "3", "--requests", "4", "--repeats", "1", "--users", "1", "4"]
    real = [*options, *models(world)]
    lines = narrow(told(capsys, 0, *simulate(world, tmp_path, *real)))
    assert any(line.startswith("the real runner") for line in lines)
    report: dict[str, Any] = json.loads((tmp_path / "simulation.json").read_text())
    assert [(r["users"], r["way"]) for r in report["tried"]] == [(n, way) for n in (1, 3) for way in report["ways"]]
    assert len(report["ways"]) == 7
    check_pictures(tmp_path)
    assert json.loads(told(capsys, 0, *simulate(world, tmp_path, *real, "--json")))["tried"]


def check_pictures(folder: Path) -> None:
    for name in ("throughput", "lengths"):
        data = (folder / f"{name}.png").read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        assert len(data) > 5000


def test_mistakes_of_simulate(world: World, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "out"
    for option, value in (("threshold", "2"), ("threshold", "-0.1"), ("users", "0"), ("each", "0"), ("seed", "-1"),
                          ("tried", "0"), ("requests", "0"), ("repeats", "0")):  # fmt: skip
        assert f"--{option}" in refused(capsys, *simulate(world, out, f"--{option}", value))
    ignored = refused(capsys, *simulate(world, out, "--tried", "4", "--dtype", "float32"))
    assert "expected --drafter with --tried, --dtype" in ignored
    assert not out.exists()


def test_rollouts_of_other_models_are_refused(world: World, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "out"
    other = [*models(world)[:-1], world.other]
    text = refused(capsys, *simulate(world, out, *other))
    assert "another draft model" in text
    assert world.other in text
    assert rollout(world, str(tmp_path / "other"), "--drafter", world.other) == 0
    capsys.readouterr()
    both = simulate(world, out)
    both.insert(both.index("--out"), str(tmp_path / "other"))
    assert "another draft model" in refused(capsys, *both)
    assert rollout(world, str(tmp_path / "rejection"), "--verifier", "rejection") == 0
    capsys.readouterr()
    for_itself = ["simulate", "--curve", world.curve, "--rollouts", str(tmp_path / "rejection"), "--out", str(out)]
    assert "got rejection" in refused(capsys, *for_itself)
    assert not out.exists()


def test_rollouts_before_a_calibration_are_refused(world: World, tmp_path: Path, capsys: Capture) -> None:
    """Its confidences decide what the runner verifies; those that were recorded are others."""
    from dspark.export.bundle import write_calibration
    from dspark.slot_maps import of_temperatures

    bundle = tmp_path / "bundle"
    shutil.copytree(world.bundle, bundle)
    write_calibration(bundle, of_temperatures([2.0] * 4), "0" * 64)
    text = refused(capsys, *simulate(world, tmp_path / "out", *models(world)[:-1], str(bundle)))
    assert "another calibration" in text
    assert "another draft model" not in text
