"""The training step's bench: both sides agree, wrong losses are not timed, options that mean nothing are refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from dspark import cli
from dspark.bench import step
from dspark.contracts import DsparkError
from dspark.training import fused
from dspark.training.options import LossOptions

SMALL = step.Shape(hidden=16, heads=2, kv_heads=1, head_dim=8, mlp=24, layers=1, vocabulary=50, block=3, rank=4,
                   anchors=4, tokens=20)  # fmt: skip


@pytest.mark.parametrize("options", [LossOptions(), LossOptions(coupled=0.5, weighting="survival", label="coupled")])
def test_figures(options: LossOptions) -> None:
    found = step.bench_step(SMALL, options, repeats=2)
    assert found.difference > 0  # of two different ways to compute; a larger one than AGREE is refused
    assert 0 < found.before_mib <= found.peak_mib
    for low, middle, high in (*found.seconds.values(), found.ratio):
        assert 0 < low <= middle <= high


def test_wrong_losses_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(setup: fused.Setup, slots: fused.Slots, shares: dict[str, float]) -> fused.Result:
        return fused.fused(
            setup, slots, {name: share * (1.1 if name == "l1" else 1.0) for name, share in shares.items()}
        )

    monkeypatch.setitem(step.SIDES, "fused", wrong)
    with pytest.raises(DsparkError, match="gradients of both sides"):
        step.bench_step(SMALL, LossOptions(), repeats=1)


def test_shape_is_checked() -> None:
    with pytest.raises(DsparkError, match="tokens - 1 anchors"):
        replace(SMALL, anchors=20)


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = [
        "hidden=16",
        "heads=2",
        "kv_heads=1",
        "head_dim=8",
        "mlp=24",
        "layers=1",
        "vocabulary=50",
        "anchors=4",
        "tokens=20",
    ]
    args = ["bench", "step", "--shape", *sizes, "--losses", "l1=0", "coupled=0.9", "--repeats", "1", "--quiet"]
    assert cli.main([*args, "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["seconds"]) == {"fused", "plain"}
    assert cli.main(args) == 0
    page = capsys.readouterr().out
    assert "s/step" in page and max(map(len, page.splitlines())) <= 80
    for wrong in (["--shape", "width=3"], ["--shape", "hidden=a"], ["--rows", "3"], ["--losses", "label=best"]):
        assert cli.main(["bench", "step", *wrong]) == 2
