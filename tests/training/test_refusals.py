"""What cannot be trained is one clear error, before the target has looked at anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dspark.contracts import DsparkError
from dspark.training.confidence_module import ConfidenceModule
from dspark.training.data import RoundsDataModule, TrajectoryDataModule


@pytest.fixture
def draft(tiny: Any, target: Any, data_dir: Path, tmp_path: Path) -> Path:
    trainer = tiny.make_trainer(tmp_path, 1, limit_val_batches=0)
    trainer.fit(tiny.make_module(), TrajectoryDataModule([str(data_dir)], token_budget=60))
    trainer.save_checkpoint(tmp_path / "draft.ckpt")
    return tmp_path / "draft.ckpt"


@pytest.mark.parametrize("precision", ["bf16-true", "16-true", "64-true"])
def test_weights_in_another_dtype_are_refused(
    tiny: Any, target: Any, data_dir: Path, tmp_path: Path, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dspark.training.frozen.load_target", None)  # to call it would be an error
    modules = tiny.make_module(), ConfidenceModule("tiny", "nowhere")
    datas = TrajectoryDataModule([str(data_dir)]), RoundsDataModule([str(data_dir)])
    for module, data in zip(modules, datas, strict=True):
        with pytest.raises(DsparkError, match=rf"32-true, bf16-mixed, 16-mixed, but got {precision}"):
            tiny.make_trainer(tmp_path, 1, precision=precision).fit(module, data)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_mixed_precision_trains(tiny: Any, target: Any, data_dir: Path, tmp_path: Path, precision: str) -> None:
    trainer = tiny.make_trainer(tmp_path, 2, precision=precision)
    module = tiny.make_module(regression=20, input_fusion=True)
    trainer.fit(module, TrajectoryDataModule([str(data_dir)], [str(data_dir)], token_budget=60))
    assert trainer.global_step == 2
    assert all(bool(p.isfinite().all()) for p in module.parameters())


WRONG = [({"response_ids": [5, -1, 6]}, "-1"), ({"prompt_ids": [5, 29]}, "29"), ({"response_ids": [5] * 130}, "134")]


@pytest.mark.parametrize(("change", "got"), WRONG)
@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("shape", [{}, {"draft_vocab_size": 20}, {"regression": 9, "input_fusion": True}])
def test_a_sample_that_the_target_cannot_read_is_named(
    tiny: Any, target: Any, data_dir: Path, tmp_path: Path, change: dict[str, Any], got: str, split: str,
    shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    rows = tiny.make_rows(3)
    rows[1] |= change
    paths = {"train": [str(data_dir)], "val": [str(data_dir)]}
    paths[split] = [str(tiny.write_directory(tmp_path / "bad", rows=rows))]
    monkeypatch.setattr(target, "forward_sequences", None)  # to call it would be an error
    with pytest.raises(DsparkError, match=rf"{rows[1]['trajectory_id']} has {got}"):
        tiny.make_trainer(tmp_path, 1).fit(tiny.make_module(**shape), TrajectoryDataModule(**paths))


@pytest.mark.parametrize("verb", ["fit", "validate", "test", "predict"])
def test_so_it_is_for_the_confidence_head_and_its_rounds(
    tiny: Any, target: Any, draft: Path, tmp_path: Path, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tiny.make_rows(3)
    rows[1]["response_ids"][-1] = 40
    paths = [str(tiny.write_directory(tmp_path / "bad", rows=rows))]
    monkeypatch.setattr(target, "forward_sequences", None)
    module = ConfidenceModule("tiny", str(draft), target_dtype="float32")
    with pytest.raises(DsparkError, match=rf"{rows[1]['trajectory_id']} has 40"):
        getattr(tiny.make_trainer(tmp_path, 1), verb)(module, RoundsDataModule(paths, paths, paths, paths))


def test_drafted_ids_are_looked_at_too(tiny: Any, target: Any, draft: Path, tmp_path: Path) -> None:
    whole = tiny.make_rounds

    def rounds(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        made = whole(rows)
        made[0]["drafted"] = [5, 5, 77]
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "make_rounds", rounds)
        data = RoundsDataModule([str(tiny.write_directory(tmp_path / "bad", 3))])
    with pytest.raises(DsparkError, match=r"t0-000 \(drafted\) has 77"):
        tiny.make_trainer(tmp_path, 1).fit(ConfidenceModule("tiny", str(draft), target_dtype="float32"), data)


def test_validation_that_is_switched_off_reads_nothing(tiny: Any, target: Any, data_dir: Path, tmp_path: Path) -> None:
    data = TrajectoryDataModule([str(data_dir)], val=[str(tmp_path / "nowhere")], token_budget=60)
    tiny.make_trainer(tmp_path, 1, limit_val_batches=0).fit(tiny.make_module(), data)
