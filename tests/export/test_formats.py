"""A draft model through every format and back, bit for bit, and the command that does it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark.commands import export as command
from dspark.contracts import DsparkError
from dspark.drafter.model import Drafter
from dspark.export import tensors
from dspark.export.bundle import drafter_hash, load_bundle, save_bundle, write_calibration
from dspark.export.formats import FORMATS, Draft, check_sayable, format_of, load_draft, notes, write_draft
from dspark.export.gate import check_same
from dspark.slot_maps import of_temperatures
from dspark.target.decoder import Target
from dspark.training.checkpoint import PREFIX, seal

MARKOV = {"confidence_head": True, "confidence_with_markov": True}
CASES: dict[str, dict[str, Any]] = {
    "vanilla": MARKOV,
    "gated": {"markov_head": "gated", **MARKOV},
    "rnn": {"markov_head": "rnn", "confidence_head": True},
    "no heads": {"markov_rank": 0},
    "confidence alone": {"markov_rank": 0, "confidence_head": True},
    "biases": {"attention_bias": True, "attention_out_bias": True},
    "one layer, yarn": {"num_layers": 1, "rope_parameters": {
        "rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}},
}  # fmt: skip
NESTED_ONLY = {
    "reduced": {"draft_vocab_size": 12, "markov_head": "gated", **MARKOV},
    "reduced, after the anchor": {"draft_vocab_size": 12, "sample_from_anchor": False},
    "after the anchor": {"sample_from_anchor": False, **MARKOV},
}
FOREIGN = FORMATS[1:]
ALL = [(kind, name) for kind in FOREIGN for name in (CASES | (NESTED_ONLY if kind == "speculators" else {}))]


def drafted(drafter: Drafter, target: Target) -> torch.Tensor:
    """What the draft loop proposes, greedily, at a few anchors of a sequence [B, P]."""
    generator = torch.Generator().manual_seed(8)
    ids = torch.randint(target.vocab_size, (24,), generator=generator)
    _, features, _ = target.forward_sequences([ids], drafter.config.target_layer_ids)
    drafter = drafter.to(target.dtype)
    context, anchors = drafter.encode(features, torch.arange(24)), torch.tensor([1, 5, 11, 23])

    def choose(slot: int, logits: torch.Tensor) -> torch.Tensor:
        return drafter.vocab_ids(logits.argmax(-1))

    return drafter.propose(ids[anchors], anchors, context, torch.zeros(4).long(), anchors, choose).token_ids


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("kind", "name"), ALL)
def test_round_trip(tmp_path, make_target, make_draft, raw, kind, name, dtype):
    target = make_target(tied=name in ("gated", "reduced"), dtype=dtype)
    original = make_draft(target, dtype, **(CASES | NESTED_ONLY)[name])
    write_draft(kind, tmp_path / "draft", original, target, raw, {"target": "tiny"})
    assert format_of(tmp_path / "draft") == kind
    reloaded = load_draft(tmp_path / "draft", target).drafter
    assert reloaded.config == original.config
    before, after = original.state_dict(), reloaded.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[key]) and tensor.dtype == after[key].dtype for key, tensor in before.items())
    assert drafter_hash(reloaded) == drafter_hash(original)
    assert command.gate(original, tmp_path / "draft", target) > 0
    assert torch.equal(drafted(reloaded, target), drafted(original, target))


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize(("draft", "of_target"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_a_draft_model_of_another_dtype_than_its_target(tmp_path, make_target, make_draft, raw, kind, draft, of_target):
    target = make_target(dtype=of_target)
    fields = {"draft_vocab_size": 12} if kind == "speculators" else {}
    original = make_draft(target, draft, **fields)
    write_draft(kind, tmp_path / "draft", original, target, raw, {"target": "tiny"})
    stored = load_file(tmp_path / "draft" / "model.safetensors")
    assert {t.dtype for t in stored.values() if t.is_floating_point()} == {draft}
    assert command.gate(original, tmp_path / "draft", target) > 0


def test_a_draft_model_of_another_target(tmp_path, make_target, make_draft, raw):
    target, other = make_target(), make_target(tied=True)
    for kind, fields in (("deepspec", {}), ("speculators", {"draft_vocab_size": 12})):
        write_draft(kind, tmp_path / kind, make_draft(target, **fields), target, raw, {"target": "tiny"})
        with pytest.raises(DsparkError, match=r"lm_head\.weight to be a copy of the target's"):
            load_draft(tmp_path / kind, other)
    deeper = json.loads((tmp_path / "deepspec" / "config.json").read_text()) | {"num_target_layers": 9}
    (tmp_path / "deepspec" / "config.json").write_text(json.dumps(deeper))
    with pytest.raises(DsparkError, match="a target of 9 layers, but got tiny with 3"):
        load_draft(tmp_path / "deepspec", target)


def test_mixed_and_quantised_dtypes(tmp_path, make_target, make_draft, raw):
    target = make_target()
    write_draft("deepspec", tmp_path / "draft", make_draft(target), target, raw, {})
    weights, stored = tmp_path / "draft" / "model.safetensors", load_file(tmp_path / "draft" / "model.safetensors")
    (tmp_path / "draft" / "dspark_export.json").unlink()
    save_file({**stored, "norm.weight": stored["norm.weight"].bfloat16()}, weights)
    with pytest.raises(DsparkError, match=r"one dtype, float32 or bfloat16, but got torch\.bfloat16, torch\.float32"):
        load_draft(tmp_path / "draft", target)
    save_file({name: tensor.half() for name, tensor in stored.items()}, weights)
    with pytest.raises(DsparkError, match=r"but got torch\.float16"):
        load_draft(tmp_path / "draft", target)


def test_which_format_a_folder_is(tmp_path, make_target, raw):
    target = make_target()
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(DsparkError, match=r"expected a draft model: a bundle .* but got architectures"):
        load_draft(tmp_path, target)
    (tmp_path / "config.json").write_text(json.dumps({**raw, "speculators_model_type": "eagle3"}))
    with pytest.raises(DsparkError, match="speculators_model_type \"dspark\", but got 'eagle3'"):
        load_draft(tmp_path, target)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DsparkError, match="found none"):
        load_draft(tmp_path / "empty", target)


def test_the_gate_compares_config_and_tensors(make_target, make_draft):
    target = make_target()
    original, other = make_draft(target), make_draft(target)
    assert check_same(original, other) == len(original.state_dict())
    other.config = replace(other.config, mask_token_id=3, stop_gradient=True, target_fingerprint="")
    with torch.no_grad():
        other.fc.weight[0, 0] += 1e-6
    with pytest.raises(DsparkError, match=r"these differ: mask_token_id 3 instead of 2, fc\.weight\."):
        check_same(original, other)


def test_notes(make_target, make_draft):
    target = make_target()
    plain = make_draft(target, target_layer_ids=(0, 1))
    assert notes("deepspec", Draft(plain)) == []
    assert notes("bundle", Draft(plain, {"maps": [1.0]})) == []
    assert "no place for a calibration" in notes("speculators", Draft(plain, {"maps": []}))[0]
    assert "was not checked" in notes("bundle", Draft(plain, unproved=True))[0]
    fields = {"markov_head": "rnn", "stop_gradient": True, "target_layer_ids": (1, 2)}
    found = notes("deepspec", Draft(make_draft(target, **fields)))
    assert [text for text in found if "not apply this rnn head" in text]
    assert [text for text in found if "stop_gradient" in text]
    assert [text for text in found if "last layer (2)" in text]
    assert "markov_rank 0" in notes("speculators", Draft(make_draft(target, markov_rank=0, markov_head="gated")))[0]


def test_check_sayable(make_target, make_draft):
    target = make_target()
    check_sayable("bundle", make_draft(target, input_fusion=True, draft_vocab_size=12).config)
    with pytest.raises(DsparkError, match=r"deepspec format can hold, but it has input_fusion true .*; draft_vocab"):
        check_sayable("deepspec", make_draft(target, input_fusion=True, draft_vocab_size=12).config)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input_fusion": True}, "input_fusion: false"),
    ({"layer_fusion": True}, "layer_fusion: false"),
    ({"convolution": True}, "convolution: false"),
    ({"candidates": 3}, "candidates: 0"),
    ({"markov_head": "pair"}, "markov_head: vanilla"),
    ({"markov_head": "rnn", "sample_from_anchor": False}, "markov_head: vanilla|sample_from_anchor: true"),
    ({"qk_norm": False}, "qk_norm: true"),
    ({"sliding_window": 4}, "sliding_window: 0"),
    ({"architecture": "mtp", "num_layers": 4}, "architecture: dspark"),
]


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize(("fields", "remedy"), REFUSED)
def test_a_refusal_names_the_recipes_field(make_target, make_draft, kind, fields, remedy):
    with pytest.raises(DsparkError, match=rf"can be said: ({remedy})"):
        check_sayable(kind, make_draft(make_target(), **fields).config)


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("name", ["attention_bias", "mlp_bias"])
def test_what_no_recipe_can_avoid_is_said(make_target, make_draft, kind, name):
    """Beside something a recipe could avoid, too: it would not help."""
    for more in ({}, {"candidates": 3}):
        with pytest.raises(DsparkError, match=rf"as a bundle, which alone fits this target: {name} can be set by no"):
            check_sayable(kind, make_draft(make_target(), **{name: True}, **more).config)


def test_what_the_flat_layout_alone_refuses_has_a_field_too(make_target, make_draft):
    config = make_draft(make_target(), sample_from_anchor=False, draft_vocab_size=12).config
    with pytest.raises(DsparkError, match=r"sample_from_anchor: true; draft_vocab_size: 0 .in model"):
        check_sayable("deepspec", config)


# The command


@pytest.fixture
def run(tmp_path, make_target, target_folder, monkeypatch):
    """run(checkpoint, kind, out) -> export's result, in a folder of its own with a target on disk."""
    folder = target_folder(make_target())
    monkeypatch.chdir(tmp_path)

    def go(checkpoint: str, kind: str, out: str, calibration: str = "") -> dict[str, Any]:
        return command.export(checkpoint, str(folder), "float32", out, calibration, kind)

    return go


@pytest.fixture
def checkpoint(tmp_path, make_target, make_draft) -> str:
    """A training checkpoint."""
    drafter = make_draft(make_target(), confidence_head=True)
    saved: dict[str, Any] = {"state_dict": {PREFIX + name: tensor for name, tensor in drafter.state_dict().items()}}
    seal(saved, drafter.config)
    torch.save(saved, tmp_path / "last.ckpt")
    return "last.ckpt"


@pytest.mark.parametrize("kind", FORMATS)
def test_from_a_checkpoint_to_a_format_and_to_a_bundle(run, checkpoint, kind):
    first = run(checkpoint, kind, "exported")
    assert first["compared"] > 0
    assert run("exported", "bundle", "bundle")["drafter_hash"] == first["drafter_hash"]
    assert load_bundle("bundle").hash == first["drafter_hash"]


def test_around_all_formats(run, checkpoint):
    run(checkpoint, "deepspec", "a")
    run("a", "speculators", "b")
    run("b", "bundle", "c")
    run("c", "deepspec", "d")
    for name in ("config.json", "model.safetensors", "dspark_export.json"):
        assert Path("a", name).read_bytes() == Path("d", name).read_bytes()


def test_an_import_that_proves_no_target_says_so(run, checkpoint):
    assert run(checkpoint, "speculators", "theirs")["notes"] == []
    assert run("theirs", "bundle", "ours")["notes"] == [
        "nothing in the checkpoint ties it to a target: that it was trained for this one was not checked"
    ]


def test_a_calibration_goes_along_or_is_said_to_be_left_out(run, checkpoint):
    run(checkpoint, "bundle", "bundle")
    write_calibration("bundle", of_temperatures([1.5, 1.0, 2.0, 0.5]), "d" * 64, ece=0.01)
    assert "left out" in run("bundle", "deepspec", "flat")["notes"][0]
    run("bundle", "bundle", "again")
    assert Path("again", "calibration.json").read_bytes() == Path("bundle", "calibration.json").read_bytes()


def test_a_bundle_keeps_its_dtype(run, tmp_path, make_target, make_draft):
    identity = save_bundle(tmp_path / "bundle", make_draft(make_target(), torch.bfloat16))
    run("bundle", "deepspec", "flat")
    assert json.loads(Path("flat", "config.json").read_text())["dtype"] == "bfloat16"
    assert run("flat", "bundle", "again")["drafter_hash"] == identity


def test_only_an_earlier_export_of_the_same_format_is_replaced(run, checkpoint):
    for kind in FORMATS:
        run(checkpoint, kind, kind)
    for kind in FORMATS:
        run(checkpoint, kind, kind)
        for other in set(FORMATS) - {kind}:
            with pytest.raises(DsparkError, match=f"an earlier {kind} export to replace, but the folder holds other"):
                run(checkpoint, kind, other)
    Path("deepspec", "README.md").write_text("mine")
    with pytest.raises(DsparkError, match="other files"):
        run(checkpoint, "deepspec", "deepspec")
    Path("speculators", "dspark_export.json").unlink()  # now it may be anybody's
    with pytest.raises(DsparkError, match="other files"):
        run(checkpoint, "speculators", "speculators")
    with pytest.raises(DsparkError, match="other files"):
        run(checkpoint, "deepspec", "target")


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError("no space left on device")])
def test_an_interrupted_write_leaves_nothing(run, checkpoint, monkeypatch, kind, error):
    run(checkpoint, kind, "kept")
    before = {path: path.read_bytes() for path in Path("kept").iterdir()}

    def torn(state: Any, path: Path, metadata: Any = None) -> None:
        path.write_bytes(b"half")
        raise error

    monkeypatch.setattr(tensors, "save_file", torn)
    for out in ("kept", "new"):
        with pytest.raises((KeyboardInterrupt, DsparkError)):
            run(checkpoint, kind, out)
    assert {path: path.read_bytes() for path in Path("kept").iterdir()} == before
    assert sorted(path.name for path in Path.cwd().iterdir()) == ["kept", "last.ckpt", "target"]


@pytest.mark.parametrize("kind", FORMATS)
def test_a_failed_gate_leaves_nothing(run, checkpoint, monkeypatch, kind):
    write = command.write_draft

    def careless(kind: str, folder: Path, drafter: Drafter, *rest: Any) -> str:
        with torch.no_grad():
            drafter.norm.weight[0] += 1
        identity = write(kind, folder, drafter, *rest)
        with torch.no_grad():
            drafter.norm.weight[0] -= 2
        return identity

    monkeypatch.setattr(command, "write_draft", careless)
    with pytest.raises(DsparkError, match=r"export gate: .*norm\.weight"):
        run(checkpoint, kind, "out")
    assert not Path("out").exists()


def test_a_refusal_comes_before_anything_is_written(run, tmp_path, make_target, make_draft):
    save_bundle(tmp_path / "bundle", make_draft(make_target(), input_fusion=True, sample_from_anchor=False))
    with pytest.raises(DsparkError, match=r"input_fusion true .*; sample_from_anchor false"):
        run("bundle", "deepspec", "out")
    assert not Path("out").exists()


def test_notes_are_printed(tmp_path, make_target, make_draft, target_folder, capsys, monkeypatch):
    from dspark import cli

    target = make_target()
    folder = target_folder(target)
    monkeypatch.chdir(tmp_path)
    save_bundle(tmp_path / "bundle", make_draft(target, markov_head="gated"))
    options = ["--checkpoint", "bundle", "--target", str(folder), "--dtype", "float32", "--out", "out"]
    assert cli.main(["export", *options, "--format", "speculators"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "note: vLLM 0.32 applies vanilla heads alone: it will not apply this gated head."
    assert lines[-1].endswith("written to out")
