"""The export gate: what training measured is what the draft loop will propose, bit for bit.

The training module's whole-block pass (teacher forced) on given blocks is held against the reloaded draft model's
slot-by-slot loop on the same tokens, both in the arithmetic of inference and the reloaded one's dtype. Before that the
reloaded one's config and tensors are compared, by hash.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor

from dspark.contracts import DsparkError
from dspark.drafter.blocks import Blocks
from dspark.drafter.config import DrafterConfig
from dspark.drafter.identity import tensor_hashes
from dspark.drafter.model import Drafter


def check_same(original: Drafter, reloaded: Drafter) -> int:
    """Returns how many tensors were compared. Raises DsparkError, naming them, when a field of the config that drafting
    reads, or a tensor, came back from disk as another one."""
    wanted, got = _as_drafted(original.config).to_dict(), _as_drafted(reloaded.config).to_dict()
    fields = [f"{name} {got[name]!r} instead of {value!r}" for name, value in wanted.items() if got[name] != value]
    before, after = tensor_hashes(original.state_dict()), tensor_hashes(reloaded.state_dict())
    tensors = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    if fields or tensors:
        raise DsparkError(
            "export gate: expected the draft model back as it was written, but these differ: "
            f"{', '.join([*fields, *tensors])}. Please report this."
        )
    return len(before)


def _as_drafted(config: DrafterConfig) -> DrafterConfig:
    """Without what only training reads (stop_gradient), what formats need not hold (the target's fingerprint), and the
    kind of a head that is not there."""
    kind = config.markov_head if config.markov_rank else "vanilla"
    return replace(config, stop_gradient=False, target_fingerprint="", markov_head=kind)


@torch.no_grad()
def check_parity(
    module_drafter: Drafter, reloaded: Drafter, blocks: Blocks, features: Tensor, positions: Tensor
) -> int:
    """Returns how many logits were compared (> 0). Both draft models are bound to their target.

    blocks: B >= 1 blocks over the packed context whose features [N, n*H] and positions [N] follow. Raises DsparkError
    with the largest difference and where it is. `module_drafter` is not changed (a copy is cast and compared).
    """
    if not blocks.anchor_ids.numel():
        raise DsparkError("export gate: expected at least one block to compare, but got none.")
    trained = copy.deepcopy(module_drafter).to(reloaded.dtype).eval()
    reloaded = reloaded.eval()
    expected = trained.teacher_forced(*blocks.inputs(trained.encode(features, positions)))
    logits, confidence = _replay(reloaded, blocks, features, positions)
    _compare("logits", expected.logits, logits)
    if expected.confidence_logits is not None and confidence is not None:
        _compare("confidence logits", expected.confidence_logits, confidence)
    elif expected.confidence_logits is not confidence:
        raise DsparkError("export gate: expected a confidence head in both draft models or in none.")
    return logits.numel()


def _replay(drafter: Drafter, blocks: Blocks, features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor | None]:
    """The draft loop made to choose the blocks' labels: logits [B,P,Vd] as seen slot by slot, confidence logits."""
    seen: list[Tensor] = []

    def choose(slot: int, logits: Tensor) -> Tensor:
        seen.append(logits)
        return blocks.labels[:, slot]

    context = drafter.encode(features, positions)
    proposal = drafter.propose(blocks.anchor_ids, blocks.anchor_positions, context, blocks.begin, blocks.end, choose)
    return torch.stack(seen, dim=1), proposal.confidence_logits


def _compare(what: str, expected: Tensor, got: Tensor) -> None:
    if expected.shape != got.shape:
        raise DsparkError(
            f"export gate: expected {what} of shape {list(expected.shape)}, but the reloaded draft model gives "
            f"{list(got.shape)}."
        )
    if torch.equal(expected, got):
        return
    difference = (expected.double() - got.double()).abs().nan_to_num(nan=float("inf"))
    difference = difference.masked_fill(expected == got, 0.0)  # two equal -inf, off the candidates, are no difference
    where = torch.unravel_index(difference.argmax(), difference.shape)
    place = ", ".join(f"{n} {int(i)}" for n, i in zip(("block", "slot", "column"), where, strict=False))
    raise DsparkError(
        f"export gate: expected the reloaded draft loop to give the training module's {what} bit for bit, but they "
        f"differ by up to {float(difference.max()):.3g} (at {place}). Nothing that fails here can be trusted to draft: "
        "export again from the checkpoint that was trained."
    )
