"""`lightning test` of the confidence head: calibration and report, the same from one process and from two."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.calibration.record import Calibration
from dspark.calibration.report import load_report
from dspark.contracts import DsparkError
from dspark.drafter.identity import drafter_hash
from dspark.training.confidence_module import ConfidenceModule
from dspark.training.confidence_test import events_of
from dspark.training.data import RoundsDataModule
from dspark.training.options import ReportOptions

FILES = ("calibration.json", "report.json", "report.html", "overview.png", "thresholds.png")


@pytest.fixture(scope="module")
def splits(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two disjoint folders of rounds: to calibrate on, and to report on."""
    folder = tmp_path_factory.mktemp("rounds")
    return {name: str(tiny.write_directory(folder / name, 30, seed)) for name, seed in (("predict", 5), ("test", 6))}


@pytest.fixture(scope="module")
def draft(runs: Any, tiny: Any, splits: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a draft model trained for two steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dspark.training.frozen.load_target", lambda source, dtype: tiny.make_target())
        out = tmp_path_factory.mktemp("draft")
        runs.fit(out, "draft", splits["predict"], "", 200, 2)
    return out / "draft" / "end.ckpt"


def test_it_calibrates_on_one_split_and_reports_on_the_other(
    runs: Any, target: Any, draft: Path, splits: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = runs.judge(tmp_path, "one", str(draft), **splits, method="platt")
    said = capsys.readouterr().out
    assert "Survival of the draft prefix" in said
    assert max(map(len, said.splitlines())) <= 80 or str(tmp_path) in said
    folder = tmp_path / "one" / "report"
    assert {f.name for f in folder.iterdir()} >= set(FILES)
    record = Calibration.load(folder / "calibration.json", drafter_hash(module.drafter), 3)
    report = load_report(folder).data
    assert record.method == "platt"
    assert report["calibration"] == record.to_dict()
    assert report["data_hash"] != record.data_hash
    assert {row["estimator"] for row in report["rows"]} >= {
        "head", "head_calibrated", "head_temperature", "head_isotonic", "draft_max_probability", "position_prior",
    }  # fmt: skip
    assert {row["domain"] for row in report["domain_shift"]} == {"code", "math"}


def test_an_older_report_tells_drift_from_itself(
    runs: Any, target: Any, draft: Path, splits: dict[str, str], tmp_path: Path
) -> None:
    """The same rounds again: nothing has moved, and every interval knows it."""
    runs.judge(tmp_path, "old", str(draft), **splits)
    older = tmp_path / "old" / "report"
    runs.judge(tmp_path, "new", str(draft), **splits, against=str(older))
    rows = json.loads((tmp_path / "new" / "report" / "report.json").read_text())["drift"]["rows"]
    assert [row["slot"] for row in rows[:4]] == [1, 2, 3, "mean"]
    for row in rows:
        assert row["gap_moved"] == 0
        assert row["gap_interval"][0] <= 0 <= row["gap_interval"][1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_is_judged_whole(
    runs: Any, tiny: Any, splits: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """`drafter:` names a file that may have been trained again since. What is judged is the checkpoint's own draft
    model, whose hash the calibration carries: in the runner's dtype too, of which there is a copy."""
    made = tiny.make_target(dtype=getattr(torch, dtype))
    monkeypatch.setattr("dspark.training.frozen.load_target", lambda source, dtype: made)
    drafts = []
    for steps in (1, 4):
        runs.fit(tmp_path, f"draft{steps}", splits["predict"], "", 200, steps)
        drafts.append(str(tmp_path / f"draft{steps}" / "end.ckpt"))

    def module(draft: str) -> ConfidenceModule:
        return ConfidenceModule("tiny", draft, target_dtype=dtype, report=ReportOptions(replicates=40))

    data = {name: [path] for name, path in splits.items()}
    trainer = tiny.make_trainer(tmp_path, 2, limit_val_batches=0)
    trainer.fit(module(drafts[0]), RoundsDataModule(train=data["predict"], token_budget=200))
    trainer.save_checkpoint(tmp_path / "head.ckpt")
    said = []
    for i, draft in enumerate(drafts):
        tester = tiny.make_trainer(tmp_path / str(i), 2)
        tester.test(module(draft), RoundsDataModule(**data), ckpt_path=tmp_path / "head.ckpt", verbose=False)
        said.append(json.loads((tmp_path / str(i) / "report" / "calibration.json").read_text()))
    assert said[0] == said[1]
    again = tiny.make_trainer(tmp_path, 4, limit_val_batches=0)
    with pytest.raises(DsparkError, match="trained again since"):
        again.fit(module(drafts[1]), RoundsDataModule(train=data["predict"], token_budget=200),
                  ckpt_path=tmp_path / "head.ckpt")  # fmt: skip


def test_mistakes_are_said_before_the_work(
    runs: Any, target: Any, draft: Path, splits: dict[str, str], tmp_path: Path
) -> None:
    with pytest.raises(DsparkError, match=r"data\.predict"):
        runs.judge(tmp_path, "none", str(draft), test=splits["test"])
    with pytest.raises(DsparkError, match="missing"):
        runs.judge(tmp_path, "none", str(draft), **splits, against=str(tmp_path / "missing"))
    with pytest.raises(DsparkError, match="nowhere"):
        runs.judge(tmp_path, "none", str(draft), test=splits["test"], predict=str(tmp_path / "nowhere"))
    assert not (tmp_path / "none" / "report").exists()
    with pytest.raises(DsparkError, match="replicates from 40"):
        ReportOptions(replicates=0)


def test_the_order_of_events_is_their_own(target: Any, draft: Path, splits: dict[str, str]) -> None:
    """Whatever the batches: parts reversed, or one sequence at a time."""
    module = ConfidenceModule("tiny", str(draft), target_dtype="float32")
    module.setup("predict")
    module.eval()
    hashes = set()
    for budget, turn in ((10_000, 1), (60, 1), (60, -1)):
        data = RoundsDataModule(predict=[splits["predict"], splits["test"]], token_budget=budget)
        parts = [module.predict_step(batch, 0) for batch in data.predict_dataloader()]
        hashes.add(events_of(parts[::turn]).data_hash())
    assert len(hashes) == 1


def test_sequences_with_broken_features_are_left_out(
    target: Any, draft: Path, splits: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else calibration would learn from what the head says about zeros."""
    module = ConfidenceModule("tiny", str(draft), target_dtype="float32", max_skipped_share=1.0)
    module.setup("predict")
    module.eval()
    (batch,) = RoundsDataModule(predict=[splits["test"]], token_budget=10_000).predict_dataloader()
    whole = module.predict_step(batch, 0)
    forward = module.target.forward_sequences

    def broken(*args: Any, **options: Any) -> Any:
        hidden, features, rest = forward(*args, **options)
        features = features.clone()
        features[int(batch.offsets[1])] = torch.nan
        return hidden, features, rest

    monkeypatch.setattr(module.target, "forward_sequences", broken)
    left = module.predict_step(batch, 0)
    gone = batch.sample_ids[1]
    assert gone in whole["sequence"]
    assert gone not in left["sequence"]
    assert len(left["accepted"]) == len(whole["accepted"]) - whole["sequence"].count(gone)


@pytest.mark.slow
def test_two_processes_write_the_same_report(
    runs: Any, target: Any, draft: Path, splits: dict[str, str], tmp_path: Path
) -> None:
    """Byte for byte, and the streamed figures up to the order of additions."""
    runs.judge(tmp_path, "one", str(draft), **splits)
    run = {"name": "two", "draft": str(draft), **splits}
    done = runs.launch("ddp", tmp_path, [run])
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = tmp_path / "one" / "report", tmp_path / "two" / "report"
    for name in FILES:
        assert (one / name).read_bytes() == (two / name).read_bytes(), name
    first, second = runs.results(tmp_path, "two")
    assert first["metrics"] == second["metrics"]
    assert first["metrics"]["test/survival/brier"] > 0
    assert all(n > 0 for n in (first["rounds"], second["rounds"])), "each rank judged some"
    alone = json.loads((tmp_path / "one.json").read_text())["metrics"]
    assert alone.keys() == first["metrics"].keys()
    for name, value in alone.items():
        assert first["metrics"][name] == pytest.approx(value, abs=1e-12, nan_ok=True), name
