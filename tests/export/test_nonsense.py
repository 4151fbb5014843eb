"""Values that no draft model has, in every JSON file that is read: a draft model, or one DsparkError, soon."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.commands import export as command
from dspark.contracts import DsparkError
from dspark.drafter.config import DrafterConfig
from dspark.export.bundle import check_target, load_bundle, save_bundle, write_calibration
from dspark.export.formats import load_draft, write_draft
from dspark.slot_maps import of_temperatures
from dspark.target.families import read_config

HEADS = {"confidence_head": True, "confidence_with_markov": True}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 16}
LLAMA3 = {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
NONSENSE: list[tuple[dict[str, Any], str]] = [
    *((({**PLAIN, "rope_theta": value}), "rope_theta") for value in (float("nan"), float("inf"), True, 0, -5.0, 1.0)),
    *((({**YARN, "factor": value}), "factor") for value in (0, 0.5, float("inf"))),
    *((({**LINEAR, "factor": value}), "factor") for value in (0, -2, float("nan"))),
    *((({**YARN, name: 0}), name) for name in ("attention_factor", "beta_fast", "beta_slow")),
    ({**YARN, "beta_fast": 1, "beta_slow": 2}, "beta_fast"),
    ({**YARN, "rope_theta": 1.0}, "rope_theta"),
    ({**LLAMA3, "high_freq_factor": 1.0}, "high_freq_factor"),
    ({**PLAIN, "rope_type": ["yarn"]}, "rope"),
    ({**PLAIN, "rope_type": {}}, "rope"),
]
ANY = st.one_of(
    st.none(), st.booleans(), st.text(max_size=3), st.sampled_from(["yarn", "rnn", "mtp"]),
    st.sampled_from([10**6, 2**31, 2**63, 10**400]), st.integers(-2, 70),
    st.integers(), st.floats(), st.lists(st.integers(-2, 5), max_size=3),
    st.lists(st.lists(st.none(), max_size=1), max_size=2), st.dictionaries(st.text(max_size=2), st.none(), max_size=1),
)  # fmt: skip


@pytest.mark.parametrize(("rope", "named"), NONSENSE)
def test_rotary_nonsense_is_named_for_targets_and_draft_models(config_fields, raw, rope, named):
    with pytest.raises(DsparkError, match=named):
        DrafterConfig.from_dict({**config_fields, "rope_parameters": rope}, "here/config.json")
    for key in ("rope_parameters", "rope_scaling"):
        with pytest.raises(DsparkError, match=named):
            read_config({**{k: v for k, v in raw.items() if k != "rope_parameters"}, key: rope})


@pytest.mark.parametrize("rope", [PLAIN, LINEAR, YARN, LLAMA3, {**YARN, "attention_factor": 1, "truncate": False}])
def test_what_makes_sense_is_read_by_both(config_fields, raw, rope):
    assert DrafterConfig.from_dict({**config_fields, "rope_parameters": rope}).rope_parameters == rope
    assert read_config({**raw, "rope_parameters": rope}).rope.theta == 1e4


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e30, 0, -1, True, "x", None, []])
def test_epsilons_that_are_none(config_fields, raw, value):
    with pytest.raises(DsparkError, match=r"here: expected rms_norm_eps"):
        DrafterConfig.from_dict({**config_fields, "rms_norm_eps": value}, "here")
    with pytest.raises(DsparkError, match="rms_norm_eps"):
        read_config({**raw, "rms_norm_eps": value})


@pytest.fixture
def config_fields(make_target, make_draft) -> dict[str, Any]:
    return make_draft(make_target(), **HEADS).config.to_dict()


@pytest.fixture(scope="module")
def plain_fields() -> dict[str, Any]:
    return DrafterConfig(4, 2, (0, 1), True, 40, 16, 24, 2, 2, 1, 8, 3).to_dict()


@settings(max_examples=300, deadline=1000)
@given(data=st.data())
def test_any_value_of_any_field_is_a_config_or_an_error(plain_fields, data):
    names = data.draw(st.lists(st.sampled_from(sorted(plain_fields)), min_size=1, max_size=3))
    rope = st.dictionaries(st.sampled_from(sorted({**YARN, **LLAMA3, "beta_fast": 0, "truncate": 0})), ANY)
    changed = {name: data.draw(rope | ANY if name == "rope_parameters" else ANY) for name in names}
    with suppress(DsparkError):
        json.dumps(DrafterConfig.from_dict({**plain_fields, **changed}).to_dict(), allow_nan=False)


VALUES: list[Any] = [None, -1, 0, 10**6, 10**30, float("nan"), float("inf"), True, "x", [], {}, [99], ["a"]]


def paths(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every key of every object (two of the hashes), and the first entry of every list."""
    few = 2 if at[-1:] == ("tensors",) else None
    items = (
        list(value.items())[:few]
        if isinstance(value, dict)
        else enumerate(value[:1])
        if isinstance(value, list)
        else ()
    )
    for key, inner in items:
        yield (*at, key)
        yield from paths(inner, (*at, key))


def damaged(content: Any) -> Iterator[Any]:
    for path in paths(content):
        for value in [*VALUES, "remove"]:
            copy = json.loads(json.dumps(content))
            place = copy
            for key in path[:-1]:
                place = place[key]
            if value == "remove":
                place.pop(path[-1])
            else:
                place[path[-1]] = value
            yield copy


@pytest.mark.parametrize("kind", ["bundle", "deepspec", "speculators"])
def test_every_key_damaged_in_every_way(tmp_path, make_target, make_draft, raw, kind):
    target, folder = make_target(), tmp_path / "draft"
    fields = {} if kind == "deepspec" else {"draft_vocab_size": 12}
    write_draft(kind, folder, make_draft(target, **HEADS, **fields), target, raw, {"target": "tiny"})
    if kind == "bundle":
        write_calibration(folder, of_temperatures([1.5, 1.0, 2.0, 0.5]), "d" * 64)
    refused = 0
    for file in sorted(folder.glob("*.json")):
        whole = file.read_text()
        for content in damaged(json.loads(whole)):
            file.write_text(json.dumps(content))
            begin = time.perf_counter()
            try:
                load_draft(folder, target)
            except DsparkError:
                refused += 1
            assert time.perf_counter() - begin < 5  # a hang, on a machine under load
        file.write_text(whole)
    assert refused > 100
    load_draft(folder, target)


def test_a_config_of_many_layers_is_refused_before_one_is_built(tmp_path, make_target, make_draft):
    save_bundle(tmp_path / "draft", make_draft(make_target()))
    file = tmp_path / "draft" / "config.json"
    for count, says in ((10**6, "config.json: expected num_layers"), (900, "config has been changed|has been changed")):
        file.write_text(json.dumps({**json.loads(file.read_text()), "num_layers": count}))
        with pytest.raises(DsparkError, match=says):
            load_bundle(tmp_path / "draft")


def test_a_huge_config_and_a_number_of_many_digits(tmp_path, make_target, make_draft, raw):
    target = make_target()
    write_draft("deepspec", tmp_path / "draft", make_draft(target), target, raw, {})
    file = tmp_path / "draft" / "config.json"
    file.write_text('{"block_size": ' + "1" * 5000 + "}")
    with pytest.raises(DsparkError, match=r"expected JSON in .*config\.json"):
        load_draft(tmp_path / "draft", target)
    with open(file, "wb") as stream:
        stream.truncate(1 << 40)  # sparse
    with pytest.raises(DsparkError, match="expected JSON of at most 64 MiB"):
        load_draft(tmp_path / "draft", target)


@pytest.mark.parametrize("size", [1, 31, 32, 46, 47, 48, 49, 100])
def test_the_gate_takes_every_block_size(tmp_path, make_target, make_draft, size):
    target = make_target()
    drafter = make_draft(target, block_size=size)
    save_bundle(tmp_path / "draft", drafter)
    assert command.gate(drafter, tmp_path / "draft", target) >= 4 * size * target.vocab_size


def test_the_other_dtype_of_the_same_target_is_said(tmp_path, make_target, make_draft):
    narrow = make_target(dtype=torch.bfloat16)
    save_bundle(tmp_path / "draft", make_draft(narrow, torch.bfloat16))
    wide = narrow.remade(lambda _, tensor: tensor.float())
    with pytest.raises(DsparkError, match="the same target in bfloat16, not float32: give --dtype bfloat16"):
        check_target(load_bundle(tmp_path / "draft"), wide)
    assert "one in bfloat16, not float32" in wide.told_apart("0" * 64, "bfloat16")
    assert "another one" in wide.told_apart("0" * 64, "float32")


def test_a_file_and_nothing_at_all_are_told_apart(tmp_path):
    with pytest.raises(DsparkError, match=r"but there is nothing\. Check the path"):
        load_bundle(tmp_path / "gone")
    (tmp_path / "last.ckpt").write_bytes(b"x")
    with pytest.raises(DsparkError, match=r"but got a file\. .* dspark export --checkpoint .*last\.ckpt --out"):
        load_bundle(tmp_path / "last.ckpt")


def test_a_folder_of_links_is_read_and_a_broken_link_is_named(tmp_path, make_target, make_draft, raw):
    """As hub caches lay their files out."""
    target = make_target()
    write_draft("deepspec", tmp_path / "draft", make_draft(target), target, raw, {})
    (tmp_path / "links").mkdir()
    for file in (tmp_path / "draft").iterdir():
        (tmp_path / "links" / file.name).symlink_to(file)
    load_draft(tmp_path / "links", target)
    shutil.move(tmp_path / "draft" / "model.safetensors", tmp_path / "elsewhere")
    with pytest.raises(DsparkError, match=r"links/model\.safetensors: expected a readable"):
        load_draft(Path(tmp_path / "links"), target)


def test_a_target_config_that_no_json_can_hold(tmp_path, make_target, make_draft, raw):
    target = make_target()
    with pytest.raises(DsparkError, match=r"finite numbers in the target's config\.json"):
        write_draft(
            "deepspec", tmp_path / "x", make_draft(target), target, {**raw, "initializer_range": float("nan")}, {}
        )
    assert not (tmp_path / "x").exists()
