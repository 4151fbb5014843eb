"""The optimizer's groups: every trainable parameter once, decay on matrices, fresh parts at their own rate."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import pytest

from dspark.contracts import DsparkError
from dspark.training.confidence_module import ConfidenceModule
from dspark.training.optim import lr_factor, make_optimizer
from dspark.training.options import InitOptions, LossOptions, OptimizerOptions


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
    from tests.drafter.conftest import make_drafter

    module = ConfidenceModule("tiny", "nowhere", optimizer=OptimizerOptions(lr=0.5, fresh_lr_ratio=2.0, total_steps=4))
    module.drafter = make_drafter(confidence_head=True).requires_grad_(False)
    module.drafter.confidence_head.requires_grad_(True)
    optimizer = module.configure_optimizers()["optimizer"]
    assert {g["initial_lr"] for g in optimizer.param_groups} == {1.0}


def test_a_rate_of_nothing_is_refused() -> None:
    with pytest.raises(DsparkError, match="fresh_lr_ratio > 0"):
        OptimizerOptions(fresh_lr_ratio=0.0)


NAN, INF = math.nan, math.inf
BAD = [(OptimizerOptions, name, value) for name, values in {
    "lr": (0.0, -1.0, NAN, INF), "fresh_lr_ratio": (0.0, -1.0, NAN, INF), "min_lr_ratio": (-3.0, 1.5, NAN, INF),
    "weight_decay": (-1.0, NAN, INF), "beta1": (2.0, 1.0, -0.1, NAN), "beta2": (2.0, 1.0, -0.1, NAN),
    "warmup_steps": (-1,), "total_steps": (-1,),
}.items() for value in values] + [(InitOptions, name, value) for name, values in {
    "final_norm": (NAN, INF, -1.0), "residual_scale": (NAN, INF, -1.0), "regression": (-1,),
    "ridge": (0.0, -1.0, NAN, INF),
}.items() for value in values] + [(LossOptions, name, value) for name, values in {
    "ce": (NAN, INF, -1.0), "soft_ce": (NAN,), "l1": (NAN, INF), "coupled": (NAN,), "confidence": (NAN, -1.0),
    "decay": (NAN, INF, -1.0), "survival_floor": (NAN, -0.1, 1.1), "temperature": (NAN, INF, 0.0),
    "weighting": ("linear",), "label": ("observed", "none"),
}.items() for value in values]  # fmt: skip


@pytest.mark.parametrize(("kind", "name", "value"), BAD)
def test_numbers_out_of_range_are_refused(kind: Any, name: str, value: Any) -> None:
    with pytest.raises(DsparkError, match=rf"expected {name} .*but got {value!r}"):
        kind(**{name: value})


def test_every_number_of_the_options_has_a_range() -> None:
    """A field that is added without one is caught here."""
    for kind in (OptimizerOptions, InitOptions, LossOptions):
        numbers = {f.name for f in fields(kind) if "float" in str(f.type) or str(f.type) == "int"}
        assert numbers
        assert numbers <= {name for k, name, _ in BAD if k is kind}


def test_all_of_them_are_told_at_once() -> None:
    with pytest.raises(DsparkError, match=r"lr > 0 and finite, but got -1\.0; beta1 >= 0 and below 1, but got 2\.0"):
        OptimizerOptions(lr=-1.0, beta1=2.0)


def test_shares_and_temperatures_of_the_modules() -> None:
    for share in (NAN, -0.1, 1.1):
        with pytest.raises(DsparkError, match="from 0 to 1"):
            ConfidenceModule("tiny", "nowhere", max_skipped_share=share)
    for temperature in (NAN, 0.0, -1.0, INF):
        with pytest.raises(DsparkError, match="temperature > 0"):
            ConfidenceModule("tiny", "nowhere", temperature=temperature)


def test_the_edges_of_the_ranges_are_inside() -> None:
    OptimizerOptions(min_lr_ratio=1.0, weight_decay=0.0, beta1=0.0, warmup_steps=0)
    InitOptions(final_norm=None, residual_scale=0.0)
    LossOptions(ce=0.0, decay=0.0, survival_floor=0.0)
