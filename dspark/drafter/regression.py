"""A start by least squares: the draft model's linear parts solved for, not learned.

What slot k should say is the target's hidden state at the position it predicts from, y. Linear in what the block knows:
    y_k ~ F_k [c ; norm(e)] + M norm(e_prev)        c = norm(fc f): context feature before the anchor, e: the anchor's
                                                    embedding, e_prev: embedding of the token before the prediction
Three ridge regressions in order: fc so that c predicts the first slot, M (shared by the slots, cut to the Markov head's
rank in the metric of the logits), F_k on what M leaves. Sequential modules (mtp.py) take one each in place of the last
two: y_k ~ M_k [norm(h) ; norm(e_prev)], h being what the module before predicts. The draft layers become the identity
by zeroed out-projections (whatever their convolutions do to zeros), and with layer_fusion each starts from a copy of
fc; training goes on from there. A few hundred answers give what gradient steps of the same cost do not come near (the
README says what was measured).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dspark.contracts import DsparkError
from dspark.drafter.model import Drafter
from dspark.drafter.mtp import Join
from dspark.drafter.sequential import set_markov_weights

_TINY = 1e-6  # share of a metric's mean diagonal that keeps it invertible when it is singular


@dataclass(frozen=True, slots=True)
class Observations:
    """B blocks. features [B, n*H]: the target's taps at the token before the anchor; anchor_ids [B]; previous_ids,
    counted [B,P]: the token before each prediction, and whether the prediction counts; hidden [B,P,H]: what the
    target's LM head reads there."""

    features: Tensor
    anchor_ids: Tensor
    previous_ids: Tensor
    counted: Tensor
    hidden: Tensor

    @classmethod
    def join(cls, parts: list[Observations]) -> Observations:
        return cls(*(torch.cat([getattr(p, name) for p in parts]) for name in cls.__slots__))


@torch.no_grad()
def start_by_regression(drafter: Drafter, seen: Observations, ridge: float = 100.0) -> None:
    """Sets fc, hidden_norm, fusion and Markov head (or joins), norm and out-projections of `drafter`, which is fp32 and
    bound to its target.

    ridge: weight of the squared norms, in rows of unit-variance inputs. Raises DsparkError without input fusion (or
    joins), or without a counted prediction in every slot.
    """
    if not drafter.config.reads_features:
        raise DsparkError("regression start: expected input_fusion: true, but got false. Switch it on, or drop it.")
    if not bool(seen.counted.any(dim=0).all()):
        raise DsparkError(
            "regression start: expected answers long enough to fill every slot of a block, but got none. Give longer "
            "answers or a smaller block_size."
        )
    for _, norm in drafter.feature_maps:
        norm.weight.fill_(1.0)
    try:
        _solve(drafter, seen, ridge)
    except torch.linalg.LinAlgError as error:
        raise DsparkError(
            f"regression start: expected a system that can be solved, but got: {error} Raise init.ridge ({ridge}), or "
            "look at more answers."
        ) from error
    for layer in drafter.draft_layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()


def _solve(drafter: Drafter, seen: Observations, ridge: float) -> None:
    anchor = _embedded(drafter, seen.anchor_ids)
    solution = _solve_fc(seen, anchor, ridge).T
    for fc, _ in drafter.feature_maps:
        fc.weight.copy_(solution)
    eps = drafter.config.rms_norm_eps
    feature = _unit(seen.features.float() @ drafter.fc.weight.T, eps)
    if drafter.joins is not None:
        return _solve_joins(drafter, drafter.joins, seen, feature, ridge)
    known = torch.cat([feature, anchor], dim=-1)
    correction = _solve_markov(drafter, seen, known, ridge)
    return _solve_fusion(drafter, seen, known, correction, ridge)


def _solve_fc(seen: Observations, anchor: Tensor, ridge: float) -> Tensor:
    """[n*H, H]: the taps' share of the first slot's regression; the anchor takes part, so fc need not explain it."""
    rows = seen.counted[:, 0]
    features = seen.features[rows].float()
    # Deep layers are far larger than early ones: every tap to unit variance, so that the ridge weighs them alike.
    scale = features.unflatten(-1, (-1, anchor.shape[1])).pow(2).mean(dim=(0, 2)).clamp_min(1e-12).rsqrt()
    scale = scale.repeat_interleave(anchor.shape[1])
    solution = _ridge(torch.cat([features * scale, anchor[rows]], dim=-1), seen.hidden[rows, 0].float(), ridge)
    fc = solution[: len(scale)] * scale[:, None]
    return fc / (features @ fc).pow(2).mean().sqrt().clamp_min(1e-12)


def _solve_markov(drafter: Drafter, seen: Observations, known: Tensor, ridge: float) -> Tensor | None:
    """The map M [H,H] of the previous token's embedding, cut to the Markov head's rank, which is set to it; None
    without a head. Averaged over the slots after the first, where the previous token is the anchor: F_0 reads it."""
    head = drafter.markov_head
    if head is None or seen.counted.shape[1] < 2:
        return None
    width, total = known.shape[1], torch.zeros(())
    for slot in range(1, seen.counted.shape[1]):
        rows = seen.counted[:, slot]
        inputs = torch.cat([known[rows], _embedded(drafter, seen.previous_ids[rows, slot])], dim=-1)
        total = total + _ridge(inputs, seen.hidden[rows, slot].float(), ridge)[width:]
        if slot == 1:
            metric = _gram(inputs[:, width:], ridge)
    columns = drafter.head_columns()
    left, right = _root(metric), _root(_gram(columns, _TINY * float(columns.pow(2).sum() / columns.shape[1])))
    u, s, vh = torch.linalg.svd(left @ (total / (seen.counted.shape[1] - 1)) @ right.T, full_matrices=False)
    rank = min(head.rank, len(s))
    down = torch.linalg.solve_triangular(left, u[:, :rank] * s[:rank].sqrt(), upper=True)  # [H, r]
    up = torch.linalg.solve_triangular(right, vh[:rank].T * s[:rank].sqrt(), upper=True)  # [H, r]
    vocabulary = torch.arange(drafter.config.vocab_size)
    w1, w2 = _embedded(drafter, vocabulary) @ down, columns @ up
    pad = (0, head.rank - rank)
    set_markov_weights(head, torch.nn.functional.pad(w1, pad), torch.nn.functional.pad(w2, pad))
    return down @ up.T


def _solve_fusion(drafter: Drafter, seen: Observations, known: Tensor, correction: Tensor | None, ridge: float) -> None:
    """F_k of every slot, and the final norm's weight: the size that the predictions have."""
    assert drafter.fusion is not None
    drafter.fusion.embed_norm.weight.fill_(1.0)
    skipped = drafter.config.block_size - drafter.config.num_predictions
    parts, squares = drafter.fusion.proj.weight.unflatten(0, (drafter.config.block_size, -1)), []
    for slot in range(seen.counted.shape[1]):
        rows = seen.counted[:, slot]
        wanted = seen.hidden[rows, slot].float()
        if correction is not None:
            wanted = wanted - _embedded(drafter, seen.previous_ids[rows, slot]) @ correction
        solution = _ridge(known[rows], wanted, ridge)
        parts[skipped + slot].copy_(solution.T)
        squares.append((known[rows] @ solution).pow(2).mean())
    drafter.norm.weight.fill_(torch.stack(squares).mean().sqrt().item())


def _solve_joins(drafter: Drafter, joins: nn.ModuleList, seen: Observations, feature: Tensor, ridge: float) -> None:
    """M_k of every module in order, each on what the one before it predicts, and the final norm's weight."""
    state, squares = feature, []
    for slot, join in enumerate(joins):
        assert isinstance(join, Join)
        join.state_norm.weight.fill_(1.0)
        join.embed_norm.weight.fill_(1.0)
        known = torch.cat([_unit(state, join.state_norm.eps), _embedded(drafter, seen.previous_ids[:, slot])], dim=-1)
        rows = seen.counted[:, slot]
        solution = _ridge(known[rows], seen.hidden[rows, slot].float(), ridge)
        join.proj.weight.copy_(solution.T)
        state = known @ solution
        squares.append(state[rows].pow(2).mean())
    drafter.norm.weight.fill_(torch.stack(squares).mean().sqrt().item())


def _embedded(drafter: Drafter, ids: Tensor) -> Tensor:
    return _unit(drafter.embed(ids).float(), drafter.config.rms_norm_eps)


def _unit(x: Tensor, eps: float) -> Tensor:
    """Rows of root mean square 1, as RMSNorm with unit weight."""
    return x * (x.pow(2).mean(dim=-1, keepdim=True) + eps).rsqrt()


def _gram(x: Tensor, ridge: float) -> Tensor:
    return (x.T @ x).double().add_(torch.eye(x.shape[1], dtype=torch.float64), alpha=ridge)


def _ridge(x: Tensor, y: Tensor, ridge: float) -> Tensor:
    """argmin |x W - y|^2 + ridge |W|^2: x [N,I], y [N,O] -> [I,O] fp32, solved in fp64."""
    factor = torch.linalg.cholesky(_gram(x, ridge))
    return torch.cholesky_solve((x.T @ y).double(), factor).float()


def _root(metric: Tensor) -> Tensor:
    """Upper triangular R with R^T R = metric, fp32."""
    return torch.linalg.cholesky(metric).T.contiguous().float()
