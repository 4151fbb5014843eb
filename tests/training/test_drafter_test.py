"""`lightning test` of the draft model: the checkpoint as its bundle would run, on prompts, into a report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import TQDMProgressBar

from dspark import cli
from dspark.contracts import DsparkError
from dspark.corpus.prompts import Prompt, PromptSet
from dspark.export.bundle import load_bundle, save_bundle
from dspark.scorecard.measure import RunOptions, measure
from dspark.scorecard.report import load_report
from dspark.scorecard.setting import Setting
from dspark.training import drafter_test
from dspark.training.callbacks import LastCheckpoint, PurgeOnResume, ResumableTensorBoard
from dspark.training.checkpoint import load_drafter, served
from dspark.training.data import TrajectoryDataModule
from dspark.training.options import RolloutOptions, as_options, plain

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint.*")
SETTINGS = [{"verifier": "coupled", "temperature": 1.0}, {"verifier": "rejection", "temperature": 1.0}]


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[Prompt]:
    generator = torch.Generator().manual_seed(4)
    ids = [tuple(torch.randint(5, 25, (4,), generator=generator).tolist()) for _ in range(6)]
    made = [Prompt(f"{i:016x}", ("math", "code")[i % 2], (), one) for i, one in enumerate(ids)]
    monkeypatch.setattr(drafter_test, "_prompts", lambda *_: PromptSet(made, [], [], 6, 0, ""))
    return made


@pytest.fixture
def checkpoint(tiny: Any, target: Any, data_dir: Path, tmp_path: Path) -> Path:
    """last.ckpt of two steps, with TensorBoard beside it."""
    module = tiny.make_module(draft_vocab_size=25)
    trainer = tiny.make_trainer(
        tmp_path, 2, callbacks=[LastCheckpoint(every_n_train_steps=2), PurgeOnResume()], enable_checkpointing=True,
        logger=ResumableTensorBoard("run", str(tmp_path / "tb")), limit_val_batches=0,
    )  # fmt: skip
    trainer.fit(module, TrajectoryDataModule([str(data_dir)], token_budget=60))
    return tmp_path / "last.ckpt"


def module_with(tiny: Any, **shape: Any) -> Any:
    made = tiny.make_module(**{"draft_vocab_size": 25, **shape})
    made.test = RolloutOptions(prompts="prompts.jsonl", limit=4, max_tokens=9, settings=SETTINGS)  # type: ignore[arg-type]
    return made


def run_test(
    tiny: Any, module: Any, tmp_path: Path, path: Path | None, seqs: list[str] | None = None, **kw: Any
) -> Any:
    data = TrajectoryDataModule(["/nowhere"], test=seqs)  # the training data are not there any more
    return tiny.make_trainer(tmp_path, 1, **kw).test(module, data, ckpt_path=path, verbose=False)


def test_the_report_is_of_the_checkpoint_as_its_bundle_runs(
    tiny: Any, target: Any, prompts: list[Prompt], checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_test(tiny, module_with(tiny), tmp_path, checkpoint)
    report = load_report(tmp_path)
    drafter = load_drafter(checkpoint, target)
    assert report["drafter"]["hash"] == save_bundle(tmp_path / "bundle", drafter)
    assert (report["drafter"]["step"], report["drafter"]["checkpoint"]) == (2, str(checkpoint))
    running = load_bundle(tmp_path / "bundle").drafter.to(target.dtype)
    running.bind(target.embed_weight, target.head_weight).eval()
    for entry in report["settings"]:
        wanted = measure(target, running, prompts[:4], Setting(**entry["setting"]), RunOptions(9))
        assert [c["passed"] for c in entry["conversations"]] == [list(c.counts.passed) for c in wanted.conversations]
        assert (entry["drafted"], entry["tokens"]) == (wanted.drafted, wanted.tokens)
    assert report["settings"][0]["differing"] == 0
    assert report["settings"][1]["differing"] is None
    assert (tmp_path / "drafter_slots.png").read_bytes().startswith(b"\x89PNG")
    assert "tau (own included)" in capsys.readouterr().out


def test_a_served_copy_is_in_the_targets_dtype_and_eval_mode(tiny: Any, target: Any, checkpoint: Path) -> None:
    drafter = load_drafter(checkpoint, target).train()
    with torch.inference_mode():  # as the trainer's test is
        running = served(drafter, target.remade(lambda _, tensor: tensor.bfloat16()))
    assert drafter.training
    assert not running.training
    assert running.dtype == torch.bfloat16
    assert not any(p.is_inference() for p in running.parameters())
    for name, tensor in running.state_dict().items():
        assert torch.equal(tensor, drafter.state_dict()[name].to(tensor.dtype)), name


def test_two_runs_write_the_same_bytes(
    tiny: Any, target: Any, prompts: list[Prompt], checkpoint: Path, tmp_path: Path
) -> None:
    files = []
    for name in ("a", "b"):
        module = module_with(tiny)
        module.test.out = str(tmp_path / name)
        run_test(tiny, module, tmp_path, checkpoint)
        files.append({p.name: p.read_bytes() for p in (tmp_path / name).iterdir()})
    assert files[0] == files[1]
    assert set(files[0]) == {"drafter_report.json", "drafter_slots.png"}


def test_after_a_fit_the_weights_in_memory_are_run_test(
    tiny: Any, target: Any, data_dir: Path, prompts: list[Prompt], tmp_path: Path
) -> None:
    module = module_with(tiny)
    trainer = tiny.make_trainer(tmp_path, 1, limit_val_batches=0)
    data = TrajectoryDataModule([str(data_dir)], token_budget=60)
    trainer.fit(module, data)
    trainer.test(module, data, verbose=False)
    facts = load_report(tmp_path)["drafter"]
    assert (facts["checkpoint"], facts["step"]) == ("", 1)


def test_sequences_still_give_the_analytic_figures(
    tiny: Any, target: Any, data_dir: Path, prompts: list[Prompt], checkpoint: Path, tmp_path: Path
) -> None:
    module = module_with(tiny)
    module.test.prompts = ""
    (logged,) = run_test(tiny, module, tmp_path, checkpoint, seqs=[str(data_dir)])
    assert 1.0 <= logged["val/tau"] <= 4.0
    assert not (tmp_path / "drafter_report.json").exists()
    (logged,) = run_test(tiny, module_with(tiny), tmp_path, checkpoint, seqs=[str(data_dir)])
    assert "val/tau" in logged
    assert (tmp_path / "drafter_report.json").exists()


def test_what_is_missing_is_one_error(
    tiny: Any, target: Any, prompts: list[Prompt], checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises(DsparkError, match=r"expected a trained draft model.*train first"):
        run_test(tiny, module_with(tiny), tmp_path, None)
    module = module_with(tiny)
    module.test.prompts = ""
    with pytest.raises(DsparkError, match="expected prompts to roll out"):
        run_test(tiny, module, tmp_path, checkpoint)


def test_a_difference_from_plain_decoding_fails_after_the_report(
    tiny: Any, target: Any, prompts: list[Prompt], checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dspark.scorecard.measure.differing", lambda *_: 1)
    with pytest.raises(DsparkError, match="run `dspark doctor`"):
        run_test(tiny, module_with(tiny), tmp_path, checkpoint)
    assert json.loads((tmp_path / "drafter_report.json").read_text())["settings"][0]["verdict"] == "different"


def test_tensorboard_gets_figures_and_picture_and_loses_no_curve(
    tiny: Any, target: Any, prompts: list[Prompt], checkpoint: Path, tmp_path: Path
) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    logger = ResumableTensorBoard("run", str(tmp_path / "tb"))
    run_test(tiny, module_with(tiny), tmp_path, checkpoint, logger=logger, callbacks=[PurgeOnResume()])
    assert logger.resumed_at is None
    board = accumulator.EventAccumulator(str(tmp_path / "tb" / "run"), size_guidance={"images": 0})
    board.Reload()
    (point,) = board.Scalars("test/coupled, temperature 1, top-p 1/tau")
    wanted = load_report(tmp_path)["settings"][0]["figures"]["overall"]["tau"]["value"]
    assert (point.step, point.value) == (2, pytest.approx(wanted))
    assert board.Images("test/acceptance by slot")
    assert "train/loss" in board.Tags()["scalars"]


def test_options_are_plain_in_a_checkpoint_and_come_back() -> None:
    given = RolloutOptions(prompts="x", settings=SETTINGS)  # type: ignore[arg-type]
    saved = plain(test=given)["test"]
    assert saved["settings"][0] == {"verifier": "coupled", "temperature": 1.0, "top_p": 1.0}
    assert as_options(RolloutOptions, json.loads(json.dumps(saved))) == given
    assert [s.title for s in RolloutOptions().settings] == [
        "coupled, temperature 0.2, top-p 0.9", "greedy, temperature 0, top-p 1", "coupled, temperature 1, top-p 1",
        "rejection, temperature 0.2, top-p 0.9", "rejection, temperature 1, top-p 1",
    ]  # fmt: skip


@pytest.mark.parametrize("bad", [{"limit": -1}, {"max_tokens": 0}, {"batch_size": 0}, {"settings": []},
                                 {"settings": [SETTINGS[0]] * 2}])  # fmt: skip
def test_options_that_cannot_be_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(DsparkError, match="test: expected"):
        RolloutOptions(**bad)


def test_the_recipe_without_a_checkpoint_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["test", str(ROOT / "recipes" / "drafter.yaml")]) == cli.USER_ERROR
    error = capsys.readouterr().err
    assert "runs/demo/drafter/last.ckpt: expected a checkpoint" in error
    assert "train first: lightning fit" in error
    assert list(tmp_path.iterdir()) == []


def test_a_test_of_rollouts_shows_their_bar_alone(
    tiny: Any, target: Any, data_dir: Path, prompts: list[Prompt], checkpoint: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    shown = TQDMProgressBar()
    kw = {"enable_progress_bar": True, "callbacks": [shown]}
    run_test(tiny, module_with(tiny), tmp_path, checkpoint, **kw)
    said = capsys.readouterr()
    assert "Testing" not in said.out + said.err
    assert said.out.startswith("draft model")
    assert "rollouts: " in said.err
    assert "\x1b" not in said.out + said.err
    assert shown.is_enabled
    run_test(tiny, module_with(tiny), tmp_path, checkpoint, seqs=[str(data_dir)], **kw)  # two bars, one below the other
    said = capsys.readouterr()
    assert "Testing" in said.out
    assert "\x1b" not in said.out + said.err


def test_without_a_progress_bar_nothing_is_shown(
    tiny: Any, target: Any, prompts: list[Prompt], checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_test(tiny, module_with(tiny), tmp_path, checkpoint, enable_progress_bar=False)
    assert "rollouts" not in capsys.readouterr().err


def test_the_trainers_bar_is_back_after_a_test_that_was_cut(
    tiny: Any, target: Any, data_dir: Path, prompts: list[Prompt], checkpoint: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    module, shown = module_with(tiny), TQDMProgressBar()
    trainer = tiny.make_trainer(tmp_path, 1, enable_progress_bar=True, callbacks=[shown], limit_val_batches=0)
    monkeypatch.setattr("dspark.scorecard.measure.differing", lambda *_: 1)
    with pytest.raises(DsparkError, match="plain decoding"):
        trainer.test(module, TrajectoryDataModule(["/nowhere"]), ckpt_path=checkpoint, verbose=False)
    assert not shown.is_enabled
    trainer.validate(module, TrajectoryDataModule(["/nowhere"], val=[str(data_dir)]), verbose=False)
    assert shown.is_enabled
