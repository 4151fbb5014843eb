"""Our nested exports in the model class of the speculators project itself, where that package is installed.

It is no dependency of ours: `pip install speculators` beside dspark to run this. Written against 0.9.0.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dspark.drafter.blocks import blocks_at
from dspark.export.speculators import write_speculators

CASES: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "gated, confidence with Markov": {"markov_head": "gated", "confidence_with_markov": True},
    "rnn": {"markov_head": "rnn"},
    "rank 0": {"markov_rank": 0},
    "reduced vocabulary": {"draft_vocab_size": 12, "markov_head": "gated"},
    "after the anchor": {"sample_from_anchor": False},
    "after the anchor, reduced": {"sample_from_anchor": False, "draft_vocab_size": 12},
    "biases, yarn": {"attention_bias": True, "attention_out_bias": True, "rope_parameters": {
        "rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}},
}  # fmt: skip


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """load(folder, target) -> their model with our file's weights; what the file leaves out is the target's."""
    library = pytest.importorskip("speculators")
    core = pytest.importorskip("speculators.models.dspark.core")

    def go(folder: Any, target: Any) -> Any:
        config = library.SpeculatorModelConfig.from_pretrained(str(folder))
        config.transformer_layer_config._attn_implementation = "eager"
        config.speculators_config.verifier.name_or_path = None  # nothing to fetch
        model = core.DSparkDraftModel(config).eval()
        state = {"embed_tokens.weight": target.embed_weight, "lm_head.weight": target.head_weight}
        missing, unexpected = model.load_state_dict(state | load_file(folder / "model.safetensors"), strict=False)
        assert unexpected == []
        assert set(missing) == {"verifier_lm_head.weight", "verifier_norm.weight"}  # of their training alone
        monkeypatch.setattr(core, "compute_metrics", lambda *given, **_: (given[0], {"confidence": given[2]}))
        return model

    with torch.compiler.set_stance("force_eager"):
        yield go


@pytest.mark.parametrize("name", CASES)
def test_their_model_gives_our_logits(load, tmp_path, make_target, make_draft, raw, name):
    target = make_target()
    fields = {"target_layer_ids": (0, 1), "confidence_head": True, **CASES[name]}
    drafter = make_draft(target, **fields)
    write_speculators(tmp_path / "draft", drafter, target, raw, "t")
    ids, anchors = torch.randint(40, (20,), generator=torch.Generator().manual_seed(1)), torch.tensor([3, 7, 12])
    _, features, offsets = target.forward_sequences([ids], (0, 1))
    mask = torch.zeros(1, 20).index_fill_(1, anchors, 1.0)
    documents, last = torch.zeros(1, 20, dtype=torch.long), torch.zeros(1, 20, 16)
    with torch.no_grad():
        model = load(tmp_path / "draft", target)
        _, logits, metrics = model(features[None], ids[None], mask, last, documents, max_anchors=3)
    slots = drafter.config.num_predictions
    blocks = blocks_at(ids, offsets, torch.zeros(3).long(), anchors, num_predictions=slots)
    ours = drafter.teacher_forced(*blocks.inputs(drafter.encode(features, torch.arange(20))))
    # fp32 sums in another order; logits reach 6 here
    torch.testing.assert_close(logits.view(3, 4, -1)[:, 4 - slots :], ours.logits, rtol=0, atol=2e-5)
    confidence = metrics["confidence"].view(3, 4)[:, 4 - slots :]
    torch.testing.assert_close(confidence, ours.confidence_logits, rtol=0, atol=2e-5)
