"""Where a source leads, and one clear error for each way a checkpoint can be wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark.contracts import DsparkError
from dspark.target.load import EMBEDDED, load_target, load_tokenizer


def rewrite(directory: Path, **tensors: torch.Tensor | None) -> None:
    """Replaces tensors of a single-file checkpoint; None removes."""
    path = directory / "model.safetensors"
    state = {**load_file(path), **{k.replace("__", "."): v for k, v in tensors.items()}}
    save_file({k: v for k, v in state.items() if v is not None}, path, metadata={"format": "pt"})


def refused(source: str | Path, *says: str) -> None:
    with pytest.raises(DsparkError) as caught:
        load_target(source)
    assert "expected" in str(caught.value)
    assert "but got" in str(caught.value)
    for text in says:
        assert text in str(caught.value)


def test_sharded_and_single_checkpoints_are_the_same_target(save_checkpoint):
    directory, model = save_checkpoint("Qwen2", max_shard_size="20KB")
    assert len(list(directory.glob("*.safetensors"))) > 1
    sharded = load_target(directory)
    for shard in directory.glob("model*"):
        shard.unlink()
    model.save_pretrained(directory)
    single = load_target(directory)
    assert single.fingerprint == sharded.fingerprint
    assert single.dtype == torch.bfloat16
    assert single.name == "Qwen2"


def test_fingerprint_covers_weights_config_and_dtype(save_checkpoint):
    directory, _ = save_checkpoint("Llama", tie_word_embeddings=True, eos_token_id=[3, 9])
    target = load_target(directory, torch.float32)
    assert target.head_weight is target.embed_weight
    assert target.eos_ids == (3, 9)
    seen = [target.fingerprint, load_target(directory, "bfloat16").fingerprint]
    assert load_target(directory, "float32").fingerprint == seen[0]
    raw = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**raw, "rms_norm_eps": 1e-5}))
    seen.append(load_target(directory, "float32").fingerprint)
    norm = load_file(directory / "model.safetensors")["model.norm.weight"]
    rewrite(directory, model__norm__weight=norm.nextafter(torch.tensor(9.0)))
    seen.append(load_target(directory, "float32").fingerprint)
    assert len(set(seen)) == 4


def test_weights_are_copied_out_of_the_file(save_checkpoint):
    directory, _ = save_checkpoint("Llama")
    target = load_target(directory, "float32")
    before = target.forward_sequences([torch.arange(6)])[0]
    (directory / "model.safetensors").write_bytes(b"")
    assert torch.equal(before, target.forward_sequences([torch.arange(6)])[0])


def test_missing_unexpected_and_misshapen_tensors(save_checkpoint):
    directory, _ = save_checkpoint("Llama", tie_word_embeddings=True)
    rewrite(directory, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4))
    load_target(directory)  # a derived value that old checkpoints stored: harmless
    rewrite(directory, lm_head__weight=load_file(directory / "model.safetensors")["model.embed_tokens.weight"])
    load_target(directory)  # tied, and stored all the same
    rewrite(directory, lm_head__weight=torch.ones(97, 32))
    refused(directory, "lm_head.weight", "tie_word_embeddings")
    rewrite(directory, lm_head__weight=None, model__layers__1__mlp__up_proj__bias=torch.ones(48))
    refused(directory, "1 unexpected", "model.layers.1.mlp.up_proj.bias")
    rewrite(directory, model__layers__1__mlp__up_proj__bias=None, model__norm__weight=torch.ones(31))
    refused(directory, "model.norm.weight", "[32]", "[31]")
    rewrite(directory, model__norm__weight=None)
    refused(directory, "1 missing", "model.norm.weight")


def test_files_that_are_absent_or_broken(save_checkpoint, tmp_path):
    refused(tmp_path / "nowhere" / "at" / "all", "nowhere")
    refused("no-such-model", "no-such-model", EMBEDDED)
    refused(tmp_path / "model.gguf", "model.gguf", "does not exist")
    refused(tmp_path, "config.json")
    with pytest.raises(DsparkError, match="bfloat16 or float32, but got int8"):
        load_target(tmp_path, "int8")
    directory, _ = save_checkpoint("Llama")
    with pytest.raises(DsparkError, match="tokenizer files"):
        load_tokenizer(directory)
    path = directory / "model.safetensors"
    whole = path.read_bytes()
    for cut in (len(whole) // 2, 100, 0):
        path.write_bytes(whole[:cut])
        refused(directory, "model.safetensors")
    path.unlink()
    refused(directory, "Only safetensors")
    (directory / "config.json").write_text("{")
    refused(directory, "config.json")


def test_broken_shard_indexes(save_checkpoint):
    directory, _ = save_checkpoint("Llama", max_shard_size="20KB")
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    home = index["weight_map"]
    other = next(shard for shard in home.values() if shard != home["model.norm.weight"])
    outside = ("../elsewhere.safetensors", "/etc/passwd", "..", ".", "", "a/b", "a\x00b", None, 3, ["x"], {})
    for wrong in outside:
        path.write_text(json.dumps({"weight_map": {**home, "model.norm.weight": wrong}}))
        refused(directory, "plain file name")
    wrongs = {"gone.safetensors": "gone", other: "without it"}
    for wrong, says in wrongs.items():
        path.write_text(json.dumps({"weight_map": {**home, "model.norm.weight": wrong}}))
        refused(directory, says)


def test_an_unsupported_architecture_is_refused_by_name(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GPTNeoXForCausalLM"]}))
    refused(tmp_path, "GPTNeoXForCausalLM")


def test_a_hub_id_without_a_network_is_one_clear_error(monkeypatch, tmp_path):
    import huggingface_hub

    def offline(*args, **kwargs):
        raise huggingface_hub.errors.LocalEntryNotFoundError("no connection\nand a long story")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    refused("someone/some-model", "someone/some-model", "no connection", "Check the name and the network")


def test_a_hub_id_leads_to_its_snapshot(monkeypatch, save_checkpoint):
    import huggingface_hub

    directory, _ = save_checkpoint("Llama")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo_id, **kwargs: str(directory))
    assert load_target("someone/some-model").name == "someone/some-model"


def test_a_broken_gguf_file_is_one_clear_error_and_leaves_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(60))
    refused(tmp_path / "broken.gguf", "broken.gguf")
    assert list((tmp_path / "cache" / "dspark" / "targets").iterdir()) == []
