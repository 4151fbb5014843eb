"""The optimizer's groups: every trainable parameter once, decay on matrices, fresh parts at their own rate."""

from __future__ import annotations

from typing import Any

import pytest

from dspark.contracts import DsparkError
from dspark.training.optim import lr_factor, make_optimizer
from dspark.training.options import OptimizerOptions


@pytest.mark.parametrize("ratio", [1.0, 6.0])
def test_groups(tiny: Any, target: Any, data_dir: Any, tmp_path: Any, ratio: float) -> None:
    from dspark.training.data import TrajectoryDataModule

    module = tiny.make_module(input_fusion=True)
    module.trainer = tiny.make_trainer(tmp_path, 1)
    module.trainer.datamodule = TrajectoryDataModule([str(data_dir)])
    module.setup("fit")
    named = dict(module.drafter.named_parameters())
    named["fc.weight"].requires_grad_(False)
    options = OptimizerOptions(lr=0.5, fresh_lr_ratio=ratio, weight_decay=0.1, warmup_steps=2)
    optimizer, schedule = make_optimizer(named.items(), options, 10)
    names = {id(p): n for n, p in named.items()}
    seen = [names[id(p)] for g in optimizer.param_groups for p in g["params"]]
    assert sorted(seen) == sorted(set(named) - {"fc.weight"})
    optimizer.step()
    schedule.step()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            fresh = name.startswith(("layers.", "confidence_head."))
            assert group["lr"] == 0.5 * (ratio if fresh else 1.0) * lr_factor(1, 10, options)
            assert group["weight_decay"] == (0.1 if parameter.ndim >= 2 else 0.0)


def test_the_confidence_module_hands_over_the_names_that_count(tmp_path: Any) -> None:
    from dspark.training.confidence_module import ConfidenceModule
    from tests.drafter.conftest import make_drafter

    module = ConfidenceModule("tiny", "nowhere", optimizer=OptimizerOptions(lr=0.5, fresh_lr_ratio=2.0, total_steps=4))
    module.drafter = make_drafter(confidence_head=True).requires_grad_(False)
    module.drafter.confidence_head.requires_grad_(True)
    optimizer = module.configure_optimizers()["optimizer"]
    assert {g["initial_lr"] for g in optimizer.param_groups} == {1.0}


def test_a_rate_of_nothing_is_refused() -> None:
    with pytest.raises(DsparkError, match="fresh_lr_ratio > 0"):
        OptimizerOptions(fresh_lr_ratio=0.0)
