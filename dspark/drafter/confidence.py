"""The confidence head: one logit per slot for "the verifier accepts this token, given that it accepted all before".

logit_k = w^T [h_k; W1[x_{k-1}]; o_k] + b. The Markov part is missing when markov_rank is 0, and o_k unless with_law:
the log-odds that the draft's own law gives its likeliest token and the drafted one, which rank acceptance better than
a linear reading of a few thousand rounds' hidden states (docs/confidence.md). The probability is a monotone map of the
logit, sigmoid until calibrated. Maps come from calibration: they stay out of the state dict (and of any cast to bf16),
so the weights' hash does not change when a calibration is written.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dspark import ops
from dspark.contracts import DsparkError
from dspark.drafter.layers import Dense
from dspark.slot_maps import SlotMap, identity

LAW_FEATURES = 2
_MOST = 16.0  # log-odds beyond it say no more: 1 in 9 million


class ConfidenceHead(nn.Module):
    """n_embed: hidden size H. markov_rank: width of the Markov embedding it reads too (0 = hidden state only).
    num_steps: slots P, each with a map (sigmoid until calibrated). with_law: it reads `law_features` too."""

    def __init__(self, n_embed: int, markov_rank: int, num_steps: int, with_law: bool = False):
        super().__init__()
        self.markov_rank, self.num_steps, self.with_law = markov_rank, num_steps, with_law
        self.proj = Dense(n_embed + markov_rank + LAW_FEATURES * with_law, 1, bias=True, out_fp32=True)
        self.maps: tuple[SlotMap, ...] = identity(num_steps)

    def forward(self, hidden: Tensor, markov_embedding: Tensor | None, law: Tensor | None = None) -> Tensor:
        """hidden [..., H], markov_embedding [..., r] (unused at markov_rank 0), law [..., LAW_FEATURES] (unused
        without with_law) -> raw logits [...] fp32."""
        parts = [hidden]
        if self.markov_rank:
            assert markov_embedding is not None, "this head reads the previous token's Markov embedding too"
            parts.append(markov_embedding)
        if self.with_law:
            assert law is not None, "this head reads the draft's law too"
            parts.append(law.to(hidden.dtype))
        return self.proj(torch.cat(parts, dim=-1) if len(parts) > 1 else hidden).squeeze(-1)

    @torch.no_grad()
    def forget(self) -> None:
        """To where training starts: every probability 1/2, or with_law the draft's own (the mean of both log-odds)."""
        for parameter in self.proj.parameters():
            parameter.zero_()
        if self.with_law:
            self.proj.weight[:, -LAW_FEATURES:] = 1.0 / LAW_FEATURES

    def set_maps(self, maps: Sequence[SlotMap]) -> None:
        """Raises DsparkError unless there is one per slot."""
        if len(maps) != self.num_steps:
            raise DsparkError(
                f"calibration: expected {self.num_steps} maps, one per slot, but got {len(maps)}. Calibrate this draft "
                "model again."
            )
        assert all(isinstance(one, SlotMap) for one in maps), "temperatures become maps by of_temperatures"
        self.maps = tuple(maps)


@torch.no_grad()
def law_features(logits: Tensor, columns: Tensor) -> Tensor:
    """logits [..., V'] fp32 of the draft, columns [...] of the drafted tokens (-1: none of the draft vocabulary) ->
    log-odds [..., LAW_FEATURES] of the likeliest token and of the drafted one, at temperature 1."""
    flat, column = logits.flatten(0, -2), columns.flatten()
    best = flat.argmax(dim=-1)
    likeliest = log_odds(flat, best)
    drafted = torch.where(column < 0, -_MOST, likeliest)
    # Mostly they are one token: the vocabulary is read again only where they are not.
    other = ((column >= 0) & (column != best)).nonzero().flatten()
    if len(other):
        drafted[other] = log_odds(flat[other], column[other])
    return torch.stack([likeliest, drafted], dim=-1).view(*columns.shape, LAW_FEATURES)


def log_odds(logits: Tensor, columns: Tensor) -> Tensor:
    """ln(p / (1 - p)) [N] fp32 of one token of each law [N,V']: its logit less the others' ln sum exp, held within 16.

    Made of our log-softmax and subtractions alone, so a row's bits do not depend on its place.
    """
    column = columns[:, None]
    others = logits.scatter(-1, column, -torch.inf)
    best = others.argmax(dim=-1)
    rest = others.gather(-1, best[:, None]).squeeze(-1) - ops.raw_logprob(others, best)
    return (logits.gather(-1, column).squeeze(-1) - rest).clamp(-_MOST, _MOST)
