"""The sequential head: a low-rank bias on a slot's logits from the token before it (a Markov correction).

bias = W2 phi, with e = W1[previous token] over the full vocabulary and W2 over the draft vocabulary:
    vanilla  phi = e
    gated    phi = sigmoid(G [h; e]) * e
    rnn      [gate, cand, out] = J [s; e; h];  phi = tanh(out), which uses the old state s (0 at the block's start);
             then s <- sigmoid(gate) * s + (1 - sigmoid(gate)) * tanh(cand)
    pair     phi = (P h + b) * e, the pair score <A(a) * H(h), B(b)> of DFlash 2 (z-lab 2026); it starts as vanilla
Shapes: e, s, phi [M,r]; h [M,H]. Rank 0 means no head: ``markov_head`` gives None.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dspark.drafter.config import DrafterConfig
from dspark.drafter.layers import Constant, Dense, Table, sigmoid, tanh

_GATE_BIAS = 2.0  # a gated head starts nearly open: sigmoid(2) = 0.88
_RNN_RANGE = 0.25  # an rnn head starts with |e| below this, where tanh(e) is e within 2 %


class MarkovHead(nn.Module):
    """The vanilla head, and what all share. A state is None where the head keeps none."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.rank = config.markov_rank
        self.markov_w1 = Table(config.vocab_size, self.rank)
        self.markov_w2 = Dense(self.rank, config.num_columns, out_fp32=True)

    def step(self, state: Tensor | None, hidden: Tensor, embedding: Tensor) -> tuple[Tensor, Tensor | None]:
        """One slot: hidden [M,H], embedding [M,r] -> phi [M,r], new state. state None = the block's start."""
        return embedding, None

    def block(self, hidden: Tensor, embedding: Tensor) -> Tensor:
        """All slots at once, previous tokens known: hidden [B,P,H], embedding [B,P,r] -> phi [B,P,r]."""
        phi, _ = self.step(None, hidden.flatten(0, 1), embedding.flatten(0, 1))
        return phi.view(embedding.shape)


class GatedMarkovHead(MarkovHead):
    """The hidden state decides how much of the previous token's embedding counts."""

    def __init__(self, config: DrafterConfig):
        super().__init__(config)
        self.gate_proj = Dense(config.hidden_size + self.rank, self.rank, bias=True)

    def step(self, state: Tensor | None, hidden: Tensor, embedding: Tensor) -> tuple[Tensor, Tensor | None]:
        gate = sigmoid(self.gate_proj(torch.cat([hidden, embedding], dim=-1)), self.training)
        return gate * embedding, None


class RecurrentMarkovHead(MarkovHead):
    """A gated state carried from slot to slot, so a bias may depend on the whole block so far."""

    def __init__(self, config: DrafterConfig):
        super().__init__(config)
        self.joint_proj = Dense(2 * self.rank + config.hidden_size, 3 * self.rank, bias=True)

    def step(self, state: Tensor | None, hidden: Tensor, embedding: Tensor) -> tuple[Tensor, Tensor | None]:
        state = torch.zeros_like(embedding) if state is None else state
        joint = self.joint_proj(torch.cat([state, embedding, hidden], dim=-1))
        gate, candidate, out = joint.chunk(3, dim=-1)
        keep = sigmoid(gate, self.training)
        new = keep * state + (1 - keep) * tanh(candidate, self.training)
        return tanh(out, self.training), new

    def block(self, hidden: Tensor, embedding: Tensor) -> Tensor:
        state, phis = None, []
        for slot in range(hidden.shape[1]):
            phi, state = self.step(state, hidden[:, slot], embedding[:, slot])
            phis.append(phi)
        return torch.stack(phis, dim=1)


class PairMarkovHead(MarkovHead):
    """The hidden state weighs the dimensions of the previous token's embedding, without bound or sign."""

    def __init__(self, config: DrafterConfig):
        super().__init__(config)
        self.pair_proj = Constant(config.hidden_size, torch.ones(self.rank))

    def step(self, state: Tensor | None, hidden: Tensor, embedding: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.pair_proj(hidden) * embedding, None


_HEADS = {"vanilla": MarkovHead, "gated": GatedMarkovHead, "rnn": RecurrentMarkovHead, "pair": PairMarkovHead}


def markov_head(config: DrafterConfig) -> MarkovHead | None:
    return _HEADS[config.markov_head](config) if config.markov_rank else None


@torch.no_grad()
def set_markov_weights(head: MarkovHead, w1: Tensor, w2: Tensor) -> None:
    """Makes the bias of every kind of head start as W2 W1[previous]: w1 [V,r], w2 [Vd,r]."""
    if isinstance(head, GatedMarkovHead):
        assert head.gate_proj.bias is not None
        head.gate_proj.weight.zero_()
        head.gate_proj.bias.fill_(_GATE_BIAS)
        w2 = w2 / torch.sigmoid(torch.tensor(_GATE_BIAS))
    if isinstance(head, PairMarkovHead):
        assert head.pair_proj.bias is not None
        head.pair_proj.weight.zero_()
        head.pair_proj.bias.fill_(1.0)
    if isinstance(head, RecurrentMarkovHead):
        shrink = _RNN_RANGE / w1.abs().amax().clamp(min=_RNN_RANGE)
        w1, w2 = w1 * shrink, w2 / shrink
        out = head.joint_proj.weight[2 * head.rank :]
        out.zero_()
        if head.joint_proj.bias is not None:
            head.joint_proj.bias[2 * head.rank :] = 0.0
        out[:, head.rank : 2 * head.rank] = torch.eye(head.rank)
    head.markov_w1.weight.copy_(w1)
    head.markov_w2.weight.copy_(w2)
