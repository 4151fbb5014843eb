"""The confidence head: one logit per slot for "the verifier accepts this token, given that it accepted all before".

logit_k = w^T [h_k; W1[x_{k-1}]] + b, without the Markov part when markov_rank is 0. The probability is
sigmoid(logit / T_k). Temperatures come from calibration: they stay out of the state dict (and of any cast to bf16), so
the weights' hash does not change when a calibration is written.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dspark.contracts import DsparkError
from dspark.drafter.layers import Dense, sigmoid


class ConfidenceHead(nn.Module):
    """n_embed: hidden size H. markov_rank: width of the Markov embedding it reads too (0 = hidden state only).
    num_steps: slots P, each with a temperature (1.0 until calibrated)."""

    def __init__(self, n_embed: int, markov_rank: int, num_steps: int):
        super().__init__()
        self.markov_rank, self.num_steps = markov_rank, num_steps
        self.proj = Dense(n_embed + markov_rank, 1, bias=True, out_fp32=True)
        self.temperatures: tuple[float, ...] = (1.0,) * num_steps

    def forward(self, hidden: Tensor, markov_embedding: Tensor | None) -> Tensor:
        """hidden [..., H], markov_embedding [..., r] (unused at markov_rank 0) -> raw logits [...] fp32."""
        if self.markov_rank:
            assert markov_embedding is not None, "this head reads the previous token's Markov embedding too"
            hidden = torch.cat([hidden, markov_embedding], dim=-1)
        return self.proj(hidden).squeeze(-1)

    def set_temperatures(self, temperatures: Sequence[float]) -> None:
        """Raises DsparkError unless there is one positive finite number per slot."""
        values = tuple(float(t) for t in temperatures)
        if len(values) != self.num_steps or not all(1e-30 < t < 1e30 for t in values):
            raise DsparkError(
                f"confidence temperatures: expected {self.num_steps} positive numbers, one per slot, but got "
                f"{list(temperatures)}. Calibrate this draft model again."
            )
        self.temperatures = values

    def rates(self, logits: Tensor) -> Tensor:
        """Raw logits [..., g], the first g slots -> acceptance probabilities [..., g] fp32."""
        table = torch.tensor(self.temperatures[: logits.shape[-1]], dtype=torch.float32, device=logits.device)
        return sigmoid(logits.float() / table, self.training)
