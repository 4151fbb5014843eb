"""The draft model in slices over two processes: what one process learns, and checkpoints of the same kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch.strategies import ModelParallelStrategy

from dspark.contracts import DsparkError
from dspark.training.checkpoint import load_drafter, name_moments
from dspark.training.sharding import refuse_numbered

NUMBERED = {"optimizer_states": [{"state": {1: {"step": 4}}, "param_groups": [{"params": [1, 0], "lr": 1.0}]}]}


@pytest.fixture(scope="module")
def out(runs: Any, shared_data: dict[str, Any], tmp_path_factory: pytest.TempPathFactory, tiny: Any) -> Path:
    """Both ranks' results of every run; `from one` takes no step after it read one process's checkpoint."""
    folder = tmp_path_factory.mktemp("fsdp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dspark.training.frozen.load_target", lambda *_: tiny.make_target())
        runs.fit(folder, "one", **shared_data["idle"])
    named = [{"name": name, **shared_data[name]} for name in ("idle", "halves", "short")]
    longer = {"steps": 6, "budget": 60, "anchors": 4}
    straight = {"name": "straight", **shared_data["halves"], **longer}
    first = {**straight, "name": "first", "steps": 4}
    rest = {**straight, "name": "rest", "resume": str(folder / "first" / "last.ckpt")}
    other = {"name": "from one", **shared_data["idle"], "resume": str(folder / "one" / "last.ckpt")}
    done = runs.launch("fsdp", folder, [*named, straight, first, rest, other])
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def saved(path: Path) -> dict[str, Any]:
    return torch.load(path / "end.ckpt", weights_only=True)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "same"), [("idle", "idle"), ("halves", "idle"), ("short", "short whole")])
def test_slices_learn_what_one_process_learns(
    runs: Any, target: Any, shared_data: dict[str, Any], out: Path, name: str, same: str
) -> None:
    first, second = runs.results(out, name)
    runs.agree(runs.outcome(*runs.fit(out / "alone", name, **shared_data[same])), first)
    assert first["hashes"] == second["hashes"]


@pytest.mark.slow
def test_a_resumed_run_goes_on_bit_for_bit(runs: Any, out: Path) -> None:
    moments = saved(out / "first")["optimizer_states"][0]["state"]
    assert moments
    assert all(bool(m["exp_avg_sq"].any()) and float(m["step"]) == 4 for m in moments.values())
    for straight, rest in zip(runs.results(out, "straight"), runs.results(out, "rest"), strict=True):
        assert rest["hashes"] == straight["hashes"]
        assert rest["lines"] == straight["lines"][4:]


@pytest.mark.slow
def test_its_checkpoint_is_the_file_that_one_process_writes(target: Any, out: Path, tmp_path: Path) -> None:
    """The same keys, shapes and order; load_drafter reads it and a bundle of it passes the gate of export."""
    from dspark.export.bundle import load_bundle, save_bundle

    one, sliced = saved(out / "one"), saved(out / "idle")
    assert one.keys() == sliced.keys()
    for key in ("state_dict", "dspark_tensor_hashes", "dspark_drafter"):
        assert list(one[key]) == list(sliced[key])
    assert {n: t.shape for n, t in one["state_dict"].items()} == {n: t.shape for n, t in sliced["state_dict"].items()}
    assert type(next(iter(sliced["state_dict"].values()))) is torch.Tensor
    ours, theirs = (c["optimizer_states"][0] for c in (one, sliced))
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    drafter = load_drafter(out / "idle" / "last.ckpt", target)
    save_bundle(tmp_path / "bundle", drafter)
    for name, tensor in load_bundle(tmp_path / "bundle").drafter.state_dict().items():
        assert torch.equal(tensor, sliced["state_dict"][f"drafter.{name}"]), name


@pytest.mark.slow
def test_one_process_and_slices_resume_each_others_checkpoints(
    runs: Any, target: Any, shared_data: dict[str, Any], out: Path
) -> None:
    """Weights and both moments, parameter by parameter: no step is taken between reading and writing."""
    runs.fit(out, "from slices", **shared_data["idle"], resume=str(out / "idle" / "last.ckpt"))
    for source, copy in (("one", "from one"), ("idle", "from slices")):
        before, after = saved(out / source), saved(out / copy)
        for name, tensor in before["state_dict"].items():
            assert torch.equal(after["state_dict"][name], tensor), (copy, name)
        old, new = (c["optimizer_states"][0]["state"] for c in (before, after))
        assert old.keys() == new.keys()
        for name, moments in old.items():
            assert bool(moments["exp_avg"].any())
            for kind, value in moments.items():
                assert torch.equal(new[name][kind], value), (copy, name, kind)


def test_moments_are_named_in_the_given_order() -> None:
    checkpoint = {"optimizer_states": [dict(NUMBERED["optimizer_states"][0]), {}]}
    name_moments(checkpoint, ["a", "b"])
    assert checkpoint["optimizer_states"][0] == {
        "state": {"b": {"step": 4}}, "param_groups": [{"params": ["b", "a"], "lr": 1.0}]
    }  # fmt: skip
    refuse_numbered(checkpoint)
    with pytest.raises(DsparkError, match="numbers them"):
        refuse_numbered(NUMBERED)


def test_an_older_checkpoint_with_numbers_is_still_resumed(
    runs: Any, target: Any, shared_data: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = {**shared_data["halves"], "steps": 4}
    straight = runs.outcome(*runs.fit(tmp_path, "straight", **run))
    monkeypatch.setattr("dspark.training.drafter_module.name_moments", lambda *_: None)
    runs.fit(tmp_path, "half", **{**run, "steps": 2})
    assert set(saved(tmp_path / "half")["optimizer_states"][0]["state"]) == set(range(len(straight["hashes"]) - 1))
    resumed = runs.outcome(*runs.fit(tmp_path, "rest", **run, resume=str(tmp_path / "half" / "last.ckpt")))
    assert resumed["hashes"] == straight["hashes"]


@pytest.mark.parametrize(
    ("strategy", "match"),
    [
        (ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=1), "save_distributed_checkpoint false"),
        ("fsdp", "expected ModelParallelStrategy to shard"),
    ],
)
def test_another_kind_of_sharding_is_refused(tiny: Any, target: Any, tmp_path: Path, strategy: Any, match: str) -> None:
    """Before any step. FSDP1 wants an accelerator, so it is only looked at."""
    from lightning.pytorch.strategies import FSDPStrategy

    from dspark.training.sharding import shard

    class Asked:
        world_size = 1

    asked = Asked()
    asked.strategy = FSDPStrategy() if strategy == "fsdp" else strategy
    if strategy != "fsdp":
        strategy._device_mesh = {"data_parallel": type("Mesh", (), {"size": lambda self: 1})()}
    with pytest.raises(DsparkError, match=match):
        shard(tiny.make_module(), None, asked)


def test_a_recipe_switches_it_on(capsys: pytest.CaptureFixture[str]) -> None:
    """With the lines of recipes/drafter.yaml's comment, and the class that they name."""
    from dspark import cli

    recipe = Path(__file__).parents[2] / "recipes" / "drafter.yaml"
    text = recipe.read_text(encoding="utf-8").split("# strategy:\n")[1].splitlines()[:2]
    strategy = yaml.safe_load("\n".join(line.replace("  # ", "", 1) for line in text))
    argument = f"--trainer.strategy={json.dumps(strategy)}"
    assert cli.main(["fit", str(recipe), argument, "--trainer.devices=2", "--print_config"]) == 0
    parsed = yaml.safe_load(capsys.readouterr().out)["trainer"]["strategy"]
    assert parsed["class_path"] == "lightning.pytorch.strategies.ModelParallelStrategy"
    assert parsed["init_args"].items() >= strategy["init_args"].items()
