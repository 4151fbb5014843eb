"""What users get wrong, at the command line: one clear error, exit code 2, no traceback, nothing half-written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from dspark.cli import lightning_main, main

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    shutil.copytree(ROOT / "data" / "prompts", tmp_path / "data" / "prompts")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def fails(capsys: pytest.CaptureFixture, command: list[str], *words: str, program=main) -> None:
    assert program(command) == 2
    error = capsys.readouterr().err
    assert error.count("error: ") == 1, error
    assert "Traceback" not in error
    for word in words:
        assert word in error, error


def test_unknown_keys(work: Path, capsys) -> None:
    for name in ("rollout", "prepare"):
        path = work / "recipes" / f"{name}.yaml"
        path.write_text(path.read_text() + "\ntemprature: 0.5\n")
        fails(
            capsys,
            [name, f"recipes/{name}.yaml"],
            "temprature",
            "rollout.yaml" if name == "rollout" else "prepare.yaml",
        )
    for name in ("drafter", "confidence"):
        path = work / "recipes" / f"{name}.yaml"
        path.write_text(path.read_text().replace("token_budget:", "token_budgett:"))
        fails(capsys, ["fit", f"recipes/{name}.yaml"], "token_budgett", program=lightning_main)
    assert not (work / "runs").exists()


def test_missing_files(work: Path, capsys) -> None:
    fails(capsys, ["rollout", "recipes/nothing.yaml"], "recipes/nothing.yaml")
    fails(capsys, ["replay", "runs/nothing"], "runs/nothing")
    fails(capsys, ["fit", "recipes/nothing.yaml"], "recipes/nothing.yaml", program=lightning_main)
    fails(capsys, ["prepare", "recipes/prepare.yaml", "--prompts", "nowhere"], "nowhere/train.jsonl")
    assert not (work / "runs").exists()


@pytest.mark.slow
def test_missing_data_and_draft_models(work: Path, capsys) -> None:
    fails(capsys, ["fit", "recipes/drafter.yaml"], "runs/demo/responses/train", program=lightning_main)
    fails(capsys, ["rollout", "recipes/rollout.yaml", "--quiet"], "runs/demo/bundle")
    fails(capsys, ["export", "--checkpoint", "gone.ckpt", "--out", "out"], "gone.ckpt")
    assert not (work / "out").exists()
    assert not (work / "runs" / "rollouts").exists()


@pytest.mark.slow
def test_broken_prompt_rows_are_set_aside(work: Path, capsys) -> None:
    good = {"messages": [{"role": "user", "content": "Name a colour."}], "domain": "chat"}
    rows = [json.dumps(good), "{torn", json.dumps({"messages": []}), json.dumps({"text": "no known key"})]
    (work / "mine.jsonl").write_text("\n".join(rows) + "\n")
    options = ["--prompts", "mine.jsonl", "--drafter", "", "--max_tokens", "4", "--samples_per_prompt", "1"]
    assert main(["rollout", "recipes/rollout.yaml", *options, "--out", "runs/mine", "--quiet", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["trajectories"] == 1
    assert summary["dropped_rows"] == 3
    reasons = [json.loads(line) for line in Path(summary["quarantine"]).read_text().splitlines()]
    assert len(reasons) == 3
    (work / "empty.jsonl").write_text("{torn\n")
    fails(
        capsys,
        ["rollout", "recipes/rollout.yaml", *options[2:], "--prompts", "empty.jsonl", "--out", "runs/none"],
        "empty.jsonl",
    )
    assert not (work / "runs" / "none").exists()


def test_an_export_never_replaces_a_folder_of_other_files(work: Path, capsys) -> None:
    (work / "mine").mkdir()
    (work / "mine" / "last.ckpt").write_text("precious")
    fails(capsys, ["export", "--checkpoint", "mine/last.ckpt", "--out", "mine"], "mine", "other files")
    assert (work / "mine" / "last.ckpt").read_text() == "precious"


def test_an_export_never_replaces_a_file_or_what_a_user_put_beside_a_bundle(work: Path, capsys) -> None:
    (work / "file.txt").write_text("precious")
    fails(capsys, ["export", "--checkpoint", "x.ckpt", "--out", "file.txt"], "file.txt", "there is a file")
    (work / "bundle").mkdir()
    for name in ("manifest.json", "model.safetensors", "notes.txt"):
        (work / "bundle" / name).write_text("x")
    fails(capsys, ["export", "--checkpoint", "x.ckpt", "--out", "bundle"], "other files")
    fails(capsys, ["export", "--checkpoint", "x.ckpt", "--out", "."], "the current one")
    assert (work / "file.txt").read_text() == "precious"
    assert (work / "bundle" / "notes.txt").exists()


@pytest.mark.parametrize(
    "text", ["target: !!python/object:os.system x", "limit: 2024-99-99", "? [a]\n: 1", "a: &a [*a]"]
)
def test_a_recipe_that_holds_no_plain_values(work: Path, capsys, text: str) -> None:
    (work / "odd.yaml").write_text(text + "\n")
    fails(capsys, ["rollout", "odd.yaml"], "odd.yaml")
    fails(capsys, ["fit", "odd.yaml"], "odd.yaml", program=lightning_main)


def test_options_that_hold_no_plain_or_no_possible_values(work: Path, capsys) -> None:
    fails(capsys, ["rollout", "recipes/rollout.yaml", "--limit", "2024-99-99"], "--limit")
    fails(capsys, ["rollout", "recipes/rollout.yaml/x"], "recipes/rollout.yaml/x")
    fails(capsys, ["rollout", "recipes/rollout.yaml", "--out", ""], "out")
    fails(capsys, ["rollout", "recipes/rollout.yaml", "--out", "recipes/rollout.yaml"], "there is a file")
    fails(capsys, ["prepare", "recipes/prepare.yaml", "--out", ""], "out")
    fails(capsys, ["prepare", "recipes/prepare.yaml", "--prompts", "5"], "prompts")
    fails(capsys, ["rollout", "recipes/rollout.yaml", "--commit-to-cap", "--verifier", "nonsense"], "verifier")
    assert not (work / "runs").exists()


@pytest.mark.slow
def test_prompts_and_settings_that_do_not_fit(work: Path, capsys) -> None:
    """A prompt longer than the context is set aside; the good one is answered."""
    rows = [{"prompt": "word " * 9000}, {"prompt": "Name a colour."}]
    (work / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    base = ["rollout", "recipes/rollout.yaml", "--drafter", "", "--prompts", "long.jsonl", "--samples_per_prompt", "1"]
    base += ["--max_tokens", "2", "--quiet", "--json", "--out", "runs/long"]
    assert main(base) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["trajectories"], summary["dropped_rows"]) == (1, 1)
    kept = Path(summary["quarantine"]).read_text()
    assert "max_tokens" in kept
    fails(capsys, [*base, "--prompts", "data/prompts/test.jsonl"], "runs/long")
    assert Path(summary["quarantine"]).read_text() == kept  # a refused run leaves the accepted one's record alone
    fails(capsys, [*base, "--gamma", "3"], "gamma", "--drafter")
    fails(capsys, [*base, "--stop_ids", "[99999999]"], "99999999")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--threshold", "0.3"], "threshold > 0 with policy threshold"),
        (["--policy", "threshold"], "threshold > 0 with policy threshold"),
        (["--policy", "fixed", "--curve", "curve.json"], "curve with policy early_stop, lagged_global, global alone"),
        (["--policy", "global", "--verifier", "rejection"], "fixed or threshold with the rejection verifier"),
        (["--truncation", "compact"], "compact or mask with keep_tokens > 0"),
        (["--truncation", "off", "--keep_tokens", "140"], "compact or mask with keep_tokens > 0"),
        (["--policy", "global", "--drafter", ""], "Give --drafter"),
        (["--curve", "curve.json", "--drafter", ""], "Give --drafter"),
        (["--truncation", "compact", "--keep_tokens", "140", "--drafter", ""], "decoder-decoder target"),
    ],
)
def test_ways_to_run_that_nothing_would_read(work: Path, capsys, options: list[str], words: str) -> None:
    fails(capsys, ["rollout", "recipes/rollout.yaml", "--out", "runs/x", *options], words)
    assert not (work / "runs/x").exists()
