"""What every draft model must hold, whatever its heads and options; for the test files of this room to apply."""

from __future__ import annotations

import torch

from dspark.drafter.context import Context
from tests.drafter.conftest import Batch


def forced(model, data: Batch, blocks=None):
    blocks = data.blocks if blocks is None else blocks
    return model.teacher_forced(*blocks.inputs(model.encode(data.features, data.positions)))


def propose(model, data: Batch, gamma=None):
    """Greedy proposal, and the logits each choice saw."""
    seen = []

    def choose(slot, logits):
        assert slot == len(seen)
        seen.append(logits)
        return model.vocab_ids(logits.argmax(-1))

    b = data.blocks
    context = model.encode(data.features, data.positions)
    proposal = model.propose(b.anchor_ids, b.anchor_positions, context, b.begin, b.end, choose, gamma)
    return proposal, torch.stack(seen, dim=1)


def assert_proposes_as_forced(model, data: Batch) -> None:
    """In eval: the whole block given its own proposal equals the loop that made it, bit for bit."""
    proposal, seen = propose(model, data)
    b = data.blocks
    context = model.encode(data.features, data.positions)
    out = model.teacher_forced(b.anchor_ids, b.anchor_positions, proposal.token_ids, context, b.begin, b.end)
    assert proposal.token_ids.shape == (len(b.anchor_ids), model.config.num_predictions)
    assert torch.equal(out.logits, seen)
    assert torch.equal(out.confidence_logits, proposal.confidence_logits)


def assert_alone(model, data: Batch) -> None:
    """A block alone, the blocks reversed, and the context moved to other arena rows: the same bits."""
    b, context = data.blocks, model.encode(data.features, data.positions)
    whole, back = model.teacher_forced(*b.inputs(context)), torch.arange(len(b.anchor_ids)).flip(0)
    args = [t[back] for t in (b.anchor_ids, b.anchor_positions, b.labels)]
    turned = model.teacher_forced(*args, context, b.begin[back], b.end[back])
    assert torch.equal(turned.logits, whole.logits[back])
    moved = Context(
        [tuple(map(shifted, layer)) for layer in context.layers],
        None if context.features is None else shifted(context.features),
    )
    for i in (0, 7, 14):
        args = [t[i : i + 1] for t in (b.anchor_ids, b.anchor_positions, b.labels)]
        alone = model.teacher_forced(*args, moved, b.begin[i : i + 1] + 11, b.end[i : i + 1] + 11)
        assert torch.equal(alone.logits[0], whole.logits[i])
        assert torch.equal(alone.confidence_logits[0], whole.confidence_logits[i])
    part = model.encode(data.features[9:], data.positions[9:])
    for layer, rest in zip(context.layers, part.layers, strict=True):
        assert all(torch.equal(a[9:], b) for a, b in zip(layer, rest, strict=True))


def shifted(rows: torch.Tensor) -> torch.Tensor:
    """The rows, 11 further down, behind poison."""
    return torch.cat([torch.full_like(rows[:11], float("nan")), rows])


def assert_paths_agree(model, data: Batch, atol: float = 3e-5) -> None:
    """train() and eval() in fp32: the same numbers up to rounding, on the candidates where there are some."""
    one, two = forced(model.train(), data), forced(model.eval(), data)
    kept = two.logits.isfinite()
    assert bool((kept.sum(-1) == (model.config.candidates or model.config.num_columns)).all())
    assert bool(one.logits.isfinite().all())
    torch.testing.assert_close(one.logits[kept], two.logits[kept], rtol=0, atol=atol)
    torch.testing.assert_close(one.confidence_logits, two.confidence_logits, rtol=0, atol=atol)
    assert one.logits.requires_grad
    assert not two.logits.requires_grad


def assert_all_get_gradients(model, data: Batch) -> None:
    out = forced(model.train(), data)
    (out.logits.logsumexp(-1).sum() + out.confidence_logits.sum()).backward()
    idle = [name for name, p in model.named_parameters() if p.grad is None or not bool(p.grad.any())]
    assert not idle
