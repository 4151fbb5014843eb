"""A bundle comes back bit for bit, and everything wrong with one is named."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark.contracts import DsparkError
from dspark.export.bundle import (
    check_gamma,
    check_parity,
    check_target,
    drafter_hash,
    load_bundle,
    save_bundle,
    write_calibration,
)
from dspark.sealed import sealed
from dspark.slot_maps import CALIBRATION_FORMAT, SlotMap, of_temperatures


@pytest.fixture
def saved(tmp_path, drafter):
    save_bundle(tmp_path / "draft", drafter, {"steps": 3})
    return tmp_path / "draft"


def rewrite(path, change) -> None:
    """Changes the stored tensors in place, as a foreign tool would."""
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip(tmp_path, drafter, dtype):
    drafter.to(dtype)
    identity = save_bundle(tmp_path / "draft", drafter, {"steps": 3})
    bundle = load_bundle(tmp_path / "draft")
    assert (bundle.hash, bundle.meta, bundle.calibration) == (identity, {"steps": 3}, None)
    assert bundle.config == drafter.config
    assert bundle.drafter.dtype == dtype
    assert not bundle.drafter.training
    state = bundle.drafter.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in drafter.state_dict().items())
    assert drafter_hash(bundle.drafter) == identity


def test_the_target_is_not_in_it(saved, target):
    shapes = {tuple(t.shape) for t in load_file(saved / "model.safetensors").values()}
    assert tuple(target.embed_weight.shape) not in shapes
    assert sorted(p.name for p in saved.iterdir()) == ["config.json", "manifest.json", "model.safetensors"]


def test_same_model_same_bytes(tmp_path, drafter):
    for name in ("a", "b"):
        save_bundle(tmp_path / name, drafter)
    for file in ("config.json", "manifest.json", "model.safetensors"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_missing_unexpected_misshapen_changed(saved, drafter, tmp_path):
    def rename(tensors):
        tensors["markov_head.gate"] = tensors.pop("markov_head.gate_proj.weight")

    def reshape(tensors):
        tensors["fc.weight"] = tensors["fc.weight"][:, :16].contiguous()

    def change(tensors):
        tensors["norm.weight"][3] += 1e-6

    rewrite(saved, rename)
    with pytest.raises(DsparkError, match=r"missing: markov_head\.gate_proj\.weight; unexpected: markov_head\.gate"):
        load_bundle(saved)
    for wrong, message in ((reshape, r"fc\.weight of shape \[16, 32\].*\[16, 16\]"), (change, r"norm\.weight as")):
        save_bundle(saved, drafter)
        rewrite(saved, wrong)
        with pytest.raises(DsparkError, match=message):
            load_bundle(saved)


def test_changed_config_absent_directory_foreign_directory(saved, tmp_path):
    with pytest.raises(DsparkError, match="expected a draft model"):
        load_bundle(tmp_path / "nothing")
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps({**config, "sample_from_anchor": False, "block_size": 5}))
    with pytest.raises(DsparkError, match=r"config\.json has been changed"):
        load_bundle(saved)
    (saved / "manifest.json").write_text('{"format": "other/1"}')
    with pytest.raises(DsparkError, match="no draft model of ours"):
        load_bundle(saved)
    (saved / "manifest.json").unlink()
    with pytest.raises(DsparkError, match="found none"):
        load_bundle(saved)


def test_cut_off_weights(saved):
    data = (saved / "model.safetensors").read_bytes()
    (saved / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(DsparkError, match="readable safetensors"):
        load_bundle(saved)


def test_a_failed_export_leaves_the_old_one(saved, drafter):
    before = (saved / "manifest.json").read_bytes()
    with torch.no_grad():
        drafter.norm.weight[0] = float("nan")
    with pytest.raises(DsparkError, match=r"norm\.weight holds NaN"):
        save_bundle(saved, drafter)
    assert (saved / "manifest.json").read_bytes() == before
    assert [p.name for p in saved.parent.iterdir()] == ["draft"]


def test_target_and_gamma(saved, target):
    bundle = load_bundle(saved)
    check_target(bundle, target)
    check_gamma(bundle, 4)
    target.fingerprint = "e" * 64
    with pytest.raises(DsparkError, match="trained for"):
        check_target(bundle, target)
    for gamma in (0, 5):
        with pytest.raises(DsparkError, match="from 1 to 4"):
            check_gamma(bundle, gamma)


def test_calibration_belongs_to_its_weights(saved, drafter):
    before = load_bundle(saved).hash
    write_calibration(saved, of_temperatures([1.5, 1.0, 2.0, 0.5]), "d" * 64, ece=0.01)
    bundle = load_bundle(saved)
    assert bundle.hash == before
    assert bundle.drafter.confidence_head.maps == of_temperatures([1.5, 1.0, 2.0, 0.5])
    assert (bundle.calibration["data_hash"], bundle.calibration["ece"]) == ("d" * 64, 0.01)
    with pytest.raises(DsparkError, match="4 maps"):
        write_calibration(saved, of_temperatures([1.0]), "d" * 64)
    stale = (saved / "calibration.json").read_bytes()
    with torch.no_grad():
        drafter.norm.weight[0] += 1
    save_bundle(saved, drafter)
    assert load_bundle(saved).calibration is None
    (saved / "calibration.json").write_bytes(stale)
    with pytest.raises(DsparkError, match="Calibrate again"):
        load_bundle(saved)


def test_every_kind_of_map_comes_back(saved):
    maps = (SlotMap(2.0), SlotMap(0.7, -0.3), SlotMap(knots=((-1.0, 0.25), (0.1, 1 / 3))), SlotMap())
    write_calibration(saved, maps, "d" * 64)
    assert load_bundle(saved).drafter.confidence_head.maps == maps
    path = saved / "calibration.json"
    path.write_text(path.read_text().replace('"shift":-0.3', '"shift":-0.2'))
    with pytest.raises(DsparkError, match="edited or damaged"):
        load_bundle(saved)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gate(saved, drafter, target, blocks, dtype):
    reloaded = load_bundle(saved).drafter.to(dtype).bind(target.embed_weight, target.head_weight)
    drafter.train()
    assert check_parity(drafter, reloaded, *blocks) == 4 * 4 * 12
    assert drafter.training
    assert drafter.dtype == torch.float32


def test_gate_finds_a_difference(saved, drafter, target, blocks):
    reloaded = load_bundle(saved).drafter.bind(target.embed_weight, target.head_weight)
    with torch.no_grad():
        drafter.markov_head.markov_w2.weight[7] += 1e-3
    with pytest.raises(DsparkError, match=r"logits bit for bit, but they differ by up to .*column 7"):
        check_parity(drafter, reloaded, *blocks)
    reloaded = load_bundle(saved).drafter.bind(target.embed_weight, target.head_weight)
    with torch.no_grad():
        reloaded.confidence_head.proj.bias += 1
        drafter.load_state_dict(load_bundle(saved).drafter.state_dict())
    with pytest.raises(DsparkError, match="confidence logits bit for bit"):
        check_parity(drafter, reloaded, *blocks)


def test_a_bundle_from_before_a_field_existed_is_the_same_bundle(tmp_path, drafter):
    """A later version's field with its default does not change the hash; another value does."""
    identity = save_bundle(tmp_path / "draft", drafter)
    path = tmp_path / "draft" / "config.json"
    config = json.loads(path.read_text())
    assert config.pop("sliding_window") == 0
    path.write_text(json.dumps(config))
    assert load_bundle(tmp_path / "draft").hash == identity
    path.write_text(json.dumps({**config, "sliding_window": 7}))
    with pytest.raises(DsparkError, match="has been changed"):
        load_bundle(tmp_path / "draft")


def test_a_calibration_without_maps_is_named(saved):
    identity = json.loads((saved / "manifest.json").read_text())["drafter_hash"]
    (saved / "calibration.json").write_text(
        json.dumps(sealed({"format": CALIBRATION_FORMAT, "drafter_hash": identity, "data_hash": ""}))
    )
    with pytest.raises(DsparkError, match="a list of maps"):
        load_bundle(saved)
