"""No evaluation leaves a mode behind: every module is in training mode in every step, whatever came before it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback

from dspark.training.data import TrajectoryDataModule


def modes(module: Any) -> dict[str, bool]:
    return {name: part.training for name, part in module.named_modules() if not name.startswith("val_metrics")}


class Watch(Callback):
    """The modes of every part at the start of each training and validation step."""

    def __init__(self) -> None:
        self.train: list[dict[str, bool]] = []
        self.evaluation: list[dict[str, bool]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.train.append(modes(pl_module))

    def on_validation_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.evaluation.append(modes(pl_module))

    on_test_batch_start = on_validation_batch_start


@pytest.fixture
def data(data_dir: Path) -> TrajectoryDataModule:
    return TrajectoryDataModule([str(data_dir)], val=[str(data_dir)], test=[str(data_dir)], token_budget=60)


@pytest.mark.parametrize("cached", [False, True])
def test_training_goes_on_in_training_mode_after_every_validation(
    tiny: Any, target: Any, data: Any, tmp_path: Path, cached: bool
) -> None:
    features = {"cache": str(tmp_path / "cache")} if cached else {}
    module, watch = tiny.make_module(regression=100, input_fusion=True, features=features), Watch()
    trainer = tiny.make_trainer(tmp_path, 6, val_check_interval=1, callbacks=[watch], num_sanity_val_steps=1)
    trainer.fit(module, data)
    assert len(watch.train) == 6
    assert len(watch.evaluation) >= 6
    assert all(all(seen.values()) for seen in watch.train)
    assert not any(any(seen.values()) for seen in watch.evaluation)
    assert all(modes(module).values())


def test_a_part_that_its_owner_froze_stays_as_it_was(tiny: Any, target: Any, data: Any, tmp_path: Path) -> None:
    """Restored means as it was, not switched on."""
    module, watch = tiny.make_module(), Watch()
    trainer = tiny.make_trainer(tmp_path, 3, val_check_interval=1, callbacks=[watch])
    watch.on_train_start = lambda trainer, module: module.drafter.norm.eval()
    trainer.fit(module, data)
    assert all([n for n, training in seen.items() if not training] == ["drafter.norm"] for seen in watch.train)


@pytest.mark.parametrize("verb", ["validate", "test"])
def test_an_evaluation_alone_leaves_the_modes_as_they_were(
    tiny: Any, target: Any, data: Any, tmp_path: Path, verb: str
) -> None:
    module, watch = tiny.make_module(), Watch()
    tiny.make_trainer(tmp_path, 1).fit(module, data)
    getattr(tiny.make_trainer(tmp_path, 1, callbacks=[watch]), verb)(module, data, verbose=False)
    assert watch.evaluation
    assert not any(any(seen.values()) for seen in watch.evaluation)
    assert all(modes(module).values())


def test_a_fit_after_an_interrupted_evaluation_trains_in_training_mode(
    tiny: Any, target: Any, data: Any, tmp_path: Path
) -> None:
    """The mode that an exception leaves behind does not outlive it."""
    module, watch = tiny.make_module(), Watch()

    def stop(*_: Any) -> None:
        raise ValueError("stop")

    trainer = tiny.make_trainer(tmp_path, 3, val_check_interval=1)
    module.on_validation_epoch_end = stop
    with pytest.raises(ValueError, match="stop"):
        trainer.fit(module, data)
    del module.on_validation_epoch_end
    tiny.make_trainer(tmp_path, 3, callbacks=[watch], limit_val_batches=0).fit(module, data)
    assert watch.train
    assert all(all(seen.values()) for seen in watch.train)
