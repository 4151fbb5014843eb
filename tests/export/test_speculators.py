"""The nested layout: every key that is written, layer ids and draft vocabulary both ways, and what is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark.contracts import DsparkError
from dspark.export.speculators import read_speculators, refusals, speculators_keys, write_speculators

LAYERS: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": [3, 4], "head_dim": 8,
    "hidden_act": "silu", "hidden_size": 16, "initializer_range": 0.03, "intermediate_size": 24,
    "layer_types": ["full_attention", "full_attention"], "max_position_embeddings": 128, "max_window_layers": 2,
    "model_type": "qwen3", "num_attention_heads": 2, "num_hidden_layers": 2, "num_key_value_heads": 1,
    "pad_token_id": None, "rms_norm_eps": 1e-5, "rope_parameters": {"rope_theta": 5e4, "rope_type": "default"},
    "rope_scaling": None, "rope_theta": 5e4, "sliding_window": None, "tie_word_embeddings": False, "use_cache": True,
    "use_sliding_window": False, "vocab_size": 40,
}  # fmt: skip
EXPECTED: dict[str, Any] = {
    "architectures": ["DSparkDraftModel"], "aux_hidden_state_layer_ids": [0, 2], "block_size": 4,
    "confidence_head_with_markov": True, "draft_vocab_size": 12, "dtype": "float32", "enable_confidence_head": True,
    "markov_head_type": "gated", "markov_rank": 4, "mask_token_id": 2, "sample_from_anchor": False,
    "speculators_config": {
        "algorithm": "dspark", "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "someone/tiny"},
    },
    "speculators_model_type": "dspark", "target_hidden_size": 16, "tie_word_embeddings": False,
    "transformer_layer_config": LAYERS,
}  # fmt: skip
FIELDS = {
    "markov_head": "gated", "confidence_head": True, "confidence_with_markov": True, "sample_from_anchor": False,
    "draft_vocab_size": 12,
}  # fmt: skip


@pytest.fixture
def written(tmp_path, make_target, make_draft, raw) -> Path:
    """With a reduced vocabulary: 1, 4, 7, ... of 40 ids."""
    target = make_target()
    write_speculators(tmp_path / "draft", make_draft(target, **FIELDS), target, raw, "someone/tiny")
    return tmp_path / "draft"


def change_tensors(folder: Path, change: Any) -> None:
    """As another tool would: without our record of hashes."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    (folder / "dspark_export.json").unlink(missing_ok=True)


def test_every_written_key(written):
    assert json.loads((written / "config.json").read_text()) == EXPECTED


def test_the_anchor_and_the_confidence_are_always_said(make_target, make_draft, raw):
    """A reader's defaults differ from project to project."""
    keys = speculators_keys(make_draft(make_target(), markov_rank=0).config, "bfloat16", raw, "someone/tiny")
    assert keys.keys() == EXPECTED.keys()
    assert keys["sample_from_anchor"] is True
    assert keys["enable_confidence_head"] is False
    assert keys["confidence_head_with_markov"] is False
    assert keys["draft_vocab_size"] == 40
    assert keys["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4


@pytest.mark.parametrize("ids", [(-1,), (-1, 0, 2), (1, 2)])
def test_layer_ids_both_ways(tmp_path, make_target, make_draft, raw, ids):
    target = make_target()
    write_speculators(tmp_path / "draft", make_draft(target, target_layer_ids=ids), target, raw, "t")
    stored = json.loads((tmp_path / "draft" / "config.json").read_text())["aux_hidden_state_layer_ids"]
    assert stored == [i + 1 for i in ids]
    assert read_speculators(tmp_path / "draft", 3)[0].target_layer_ids == ids


def test_nothing_of_the_target_with_the_whole_vocabulary(tmp_path, make_target, make_draft, raw):
    target = make_target()
    drafter = make_draft(target, **{**FIELDS, "draft_vocab_size": 0})
    write_speculators(tmp_path / "draft", drafter, target, raw, "t")
    tensors = load_file(tmp_path / "draft" / "model.safetensors")
    assert tensors.keys() == drafter.state_dict().keys() - {"draft_ids"}


def test_the_reduced_vocabulary(written, make_target):
    tensors, target = load_file(written / "model.safetensors"), make_target()
    ids = torch.arange(12) * 3 + 1
    assert torch.equal(tensors["d2t"], ids - torch.arange(12))
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["t2d"].dtype == torch.bool
    assert tensors["t2d"].nonzero().flatten().tolist() == ids.tolist()
    assert torch.equal(tensors["lm_head.weight"], target.head_weight[ids])
    assert "embed_tokens.weight" not in tensors
    assert tensors["markov_head.markov_w1.weight"].shape == (40, 4)
    assert tensors["markov_head.markov_w2.weight"].shape == (12, 4)
    _, state, lent = read_speculators(written, 3)
    assert torch.equal(state["draft_ids"], ids)
    assert list(lent) == ["lm_head.weight"]


def test_copies_of_the_target_are_read_where_a_file_has_them(written):
    change_tensors(written, lambda t: t.update({"embed_tokens.weight": torch.zeros(40, 16)}))
    assert sorted(read_speculators(written, 3)[2]) == ["embed_tokens.weight", "lm_head.weight"]


def shuffle(tensors: dict[str, torch.Tensor]) -> None:
    ids = (tensors["d2t"] + torch.arange(12)).flip(0)
    tensors["d2t"] = ids - torch.arange(12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("d2t"), "missing: d2t"),
        (lambda t: t.pop("t2d"), "missing: t2d"),
        (lambda t: t.pop("lm_head.weight"), "missing: lm_head.weight"),
        (lambda t: t.pop("fc.weight"), "missing: fc.weight"),
        (lambda t: t.pop("confidence_head.proj.weight"), "missing: confidence_head.proj.weight"),
        (lambda t: t.update(verifier_norm=torch.ones(16)), "unexpected: verifier_norm"),
        (lambda t: t.update(d2t=t["d2t"][:7].clone()), r"d2t of shape \[12\], but got \[7\]"),
        (lambda t: t["d2t"].add_(1), "d2t .* and t2d .* to name the same 12 target ids"),
        (lambda t: t.update(t2d=t["t2d"].to(torch.uint8)), "but they differ .torch.int64, torch.uint8"),
        (shuffle, "in ascending order"),
    ],
)
def test_damaged_tensors_are_named(written, change, message):
    change_tensors(written, change)
    with pytest.raises(DsparkError, match=message):
        read_speculators(written, 3)


def test_bytes_that_changed_since_we_wrote_them(written):
    tensors = load_file(written / "model.safetensors")
    tensors["norm.weight"][3] += 1e-6
    save_file(tensors, written / "model.safetensors")
    with pytest.raises(DsparkError, match=r"norm\.weight as exported"):
        read_speculators(written, 3)
    (written / "dspark_export.json").write_text("{}")
    with pytest.raises(DsparkError, match="a hash for every tensor"):
        read_speculators(written, 3)


def change_config(folder: Path, path: str, value: Any) -> None:
    """path: keys joined by dots. None removes the key."""
    raw = copy.deepcopy(EXPECTED)
    *above, last = path.split(".")
    place = raw
    for key in above:
        place = place[key]
    place[last] = value
    if value is None:
        del place[last]
    (folder / "config.json").write_text(json.dumps(raw))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("speculators_model_type", "dflash", "speculators_model_type \"dspark\", but got 'dflash'"),
        ("transformer_layer_config", None, "transformer_layer_config .an object., but it is absent"),
        ("transformer_layer_config.model_type", "llama", "transformer_layer_config: expected model_type"),
        ("transformer_layer_config.head_dim", None, "expected head_dim"),
        ("transformer_layer_config.partial_rotary_factor", 0.25, "partial_rotary_factor"),
        ("aux_hidden_state_layer_ids", None, "aux_hidden_state_layer_ids .a list of whole numbers., but it is absent"),
        ("aux_hidden_state_layer_ids", [1, 4], "layer ids from -1 .* to 2"),
        ("mask_token_id", None, "expected mask_token_id"),
        ("markov_rank", None, "expected markov_rank"),
        ("markov_rank", 5, r"markov_w1\.weight of shape|of shape"),
        ("enable_confidence_head", None, "expected enable_confidence_head"),
        ("confidence_head_with_markov", None, "expected confidence_head_with_markov"),
        ("confidence_head_with_markov", False, r"confidence_head\.proj\.weight of shape \[1, 16\], but got \[1, 20\]"),
        ("enable_confidence_head", False, r"unexpected: confidence_head\.proj\.bias"),
        ("draft_vocab_size", 99, "draft_vocab_size to be 0"),
        ("draft_vocab_size", 40, "unexpected: d2t, t2d"),
        ("target_hidden_size", 32, "target_hidden_size to be absent or 16"),
        ("speculators_config", None, "expected speculators_config"),
        ("speculators_config.proposal_methods", [], "expected speculative_tokens"),
        ("markov_head_type", "pair", "but it has markov_head pair"),
        ("markov_head_type", "rnn", "markov_head rnn with sample_from_anchor false"),
    ],
)
def test_configs_that_are_not_read(written, path, value, message):
    change_config(written, path, value)
    with pytest.raises(DsparkError, match=message):
        read_speculators(written, 3)


def test_an_absent_anchor_flag_means_false(written):
    change_config(written, "sample_from_anchor", None)
    config = read_speculators(written, 3)[0]
    assert (config.sample_from_anchor, config.num_predictions) == (False, 3)


def test_a_lost_anchor_flag_is_noticed_by_the_tokens_it_proposes(written):
    change_config(written, "speculators_config.proposal_methods", [{"speculative_tokens": 4}])
    with pytest.raises(DsparkError, match=r"speculative_tokens from 1 to 3 .*write sample_from_anchor: true"):
        read_speculators(written, 3)


def test_refusals(make_target, make_draft):
    target = make_target()
    assert refusals(make_draft(target, **FIELDS).config) == []
    for fields in ({"input_fusion": True}, {"qk_norm": False}, {"sliding_window": 5},
                   {"layer_fusion": True}, {"convolution": True}, {"candidates": 5}, {"markov_head": "pair"},
                   {"markov_head": "pair", "markov_rank": 0}, {"confidence_head": True, "confidence_with_law": True},
                   {"markov_head": "rnn", "sample_from_anchor": False}):  # fmt: skip
        assert len(refusals(make_draft(target, **fields).config)) == 1
    assert refusals(make_draft(target, markov_head="rnn", markov_rank=0, sample_from_anchor=False).config) == []
