"""What cannot be trained is one clear error, before the target has looked at anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dspark.contracts import DsparkError
from dspark.training.confidence_module import ConfidenceModule
from dspark.training.data import RoundsDataModule, TrajectoryDataModule
from dspark.training.drafter_module import DrafterModule
from dspark.training.options import DrafterOptions, InitOptions


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
        made[0]["drafted"] = [*made[0]["drafted"][: made[0]["accepted"]], 77]  # the rejected one
        made[0]["verified"] = len(made[0]["drafted"])
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "make_rounds", rounds)
        data = RoundsDataModule([str(tiny.write_directory(tmp_path / "bad", 3))])
    with pytest.raises(DsparkError, match=r"t0-000 \(drafted\) has 77"):
        tiny.make_trainer(tmp_path, 1).fit(ConfidenceModule("tiny", str(draft), target_dtype="float32"), data)


def test_validation_that_is_switched_off_reads_nothing(tiny: Any, target: Any, data_dir: Path, tmp_path: Path) -> None:
    data = TrajectoryDataModule([str(data_dir)], val=[str(tmp_path / "nowhere")], token_budget=60)
    tiny.make_trainer(tmp_path, 1, limit_val_batches=0).fit(tiny.make_module(), data)


CONTRADICTIONS = [
    ({"markov_rank": 0}, {}, ["markov_rank to be >= 1 with confidence_with_markov: true"]),
    ({"confidence_head": False}, {}, ["confidence_head to be true with confidence_with_markov: true"]),
    ({"layer_fusion": True, "num_layers": 1}, {}, ["num_layers to be at least 2 with layer_fusion"]),
    ({"markov_head": "foo"}, {}, ["markov_head to be one of vanilla"]),
    ({"target_layer_ids": [2, 2]}, {}, ["target_layer_ids to be strictly increasing"]),
    ({"target_layer_ids": []}, {}, ["target_layer_ids to be strictly increasing"]),
    ({"block_size": 0}, {}, ["block_size to be an integer >= 1"]),
    ({"num_layers": 0, "markov_rank": -1}, {}, ["num_layers to be a positive", "markov_rank to be an integer >= 0"]),
    ({"draft_vocab_size": 9, "candidates": 10}, {}, ["up to the 9 columns"]),
    ({"num_layers": 2}, {"layers": [0]}, ["init.layers: expected 2 target layers"]),
    ({}, {"layers": [-1]}, ["init.layers: expected 1 target layers from 0 on"]),
    ({}, {"regression": 5}, ["init.regression: expected drafter.input_fusion: true"]),
    (
        {"architecture": "mtp", "num_layers": 2, "convolution": True, "input_fusion": True, "markov_rank": 0,
         "sample_from_anchor": False, "block_size": 4},
        {"layers": [0]},
        ["sample_from_anchor to be true", "input_fusion to be false", "convolution to be false", "num_layers to be",
         "markov_rank to be", "init.layers: expected 2"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "init", "told"), CONTRADICTIONS)
def test_a_recipe_that_contradicts_itself_is_told_all_of_it_when_it_is_read(
    shape: dict[str, Any], init: dict[str, Any], told: list[str]
) -> None:
    options = {"mask_token_id": 28, "target_layer_ids": [0, 2], "block_size": 3, "num_layers": 1, "markov_rank": 4}
    with pytest.raises(DsparkError) as caught:
        DrafterModule("nowhere", DrafterOptions(**{**options, **shape}), init=InitOptions(**init))
    for words in told:
        assert words in str(caught.value)


def test_what_only_the_target_can_refuse_is_left_to_it() -> None:
    shape = {"mask_token_id": 10**6, "target_layer_ids": [-1, 90], "draft_vocab_size": 10**6, "convolution": True}
    DrafterModule("nowhere", DrafterOptions(**shape, candidates=10**5), init=InitOptions(layers=[]))
    DrafterModule("nowhere", DrafterOptions(**shape), init=InitOptions(from_target=False, layers=[0]))
