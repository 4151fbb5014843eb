"""The draft model: context features in, a block of token proposals with confidences out.

    features [N, n*H] -> fc, norm -> context: keys and values per draft layer (cached by the caller)
    anchor + mask tokens, or fused inputs -> draft layers -> hidden [B, P, H]
    hidden -> LM head + Markov bias -> logits [B, P, Vd]
Two arithmetic paths, one code: ``train()`` is plain torch with autograd, ``eval()`` the inference ops, in which a
block's bits depend on the block and its context alone, and ``teacher_forced`` equals ``propose`` bit for bit.
The target's embedding and LM head are bound from outside (``bind``): they are no parameters, get no gradient and are
in no checkpoint. Caching context keys, choosing tokens and verifying live in the runner.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dspark.contracts import DsparkError
from dspark.drafter.attention import Spans
from dspark.drafter.backbone import DraftLayer
from dspark.drafter.confidence import ConfidenceHead
from dspark.drafter.config import DrafterConfig
from dspark.drafter.context import Context
from dspark.drafter.fusion import InputFusion
from dspark.drafter.layers import Dense, RMSNorm, linear, start
from dspark.drafter.rope import Rope
from dspark.drafter.sequential import markov_head
from dspark.drafter.vocabulary import BoundVocabulary

Choose = Callable[[int, Tensor], Tensor]  # slot, logits [B, Vd] fp32 -> vocabulary ids [B]


@dataclass(frozen=True, slots=True)
class DraftOutput:
    """hidden [B,P,H]; logits [B,P,Vd] fp32 (Markov bias included); confidence_logits [B,P] fp32 before temperature."""

    hidden: Tensor
    logits: Tensor
    confidence_logits: Tensor | None


@dataclass(frozen=True, slots=True)
class Proposal:
    """token_ids [B,g] vocabulary ids; confidence_logits [B,g] fp32 before temperature, None without the head."""

    token_ids: Tensor
    confidence_logits: Tensor | None


@dataclass(frozen=True, slots=True)
class BlockStates:
    """Whole blocks short of their logits, as the losses read them. hidden [B,P,H]; phi [B,P,r] of the sequential head,
    None at rank 0; confidence_logits [B,P] fp32 before temperature, None without the head."""

    hidden: Tensor
    phi: Tensor | None
    confidence_logits: Tensor | None


class Drafter(nn.Module):
    """A draft model with fresh weights (from `seed`). draft_ids [Vd] int64 ascending: the reduced draft vocabulary,
    given here or by a state dict when config.draft_vocab_size > 0."""

    draft_ids: Tensor | None

    def __init__(self, config: DrafterConfig, draft_ids: Tensor | None = None, seed: int = 0):
        super().__init__()
        self.config = config
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.fc = Dense(len(config.target_layer_ids) * hidden, hidden)
        self.hidden_norm = RMSNorm(hidden, eps)
        self.fusion = InputFusion(config) if config.input_fusion else None
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(hidden, eps)
        self.markov_head = markov_head(config)
        rank = config.markov_rank if config.confidence_with_markov else 0
        self.confidence_head = ConfidenceHead(hidden, rank, config.num_predictions) if config.confidence_head else None
        self.register_buffer("draft_ids", _draft_ids(config, draft_ids))
        self.rope = Rope(config.rope_parameters, config.head_dim)
        self._bound: BoundVocabulary | None = None
        start(self, torch.Generator().manual_seed(seed))

    @property
    def draft_layers(self) -> list[DraftLayer]:
        return [layer for layer in self.layers if isinstance(layer, DraftLayer)]

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    def bind(self, embed_weight: Tensor, head_weight: Tensor) -> Drafter:
        """Lends the target's embedding and LM head [V,H], in any dtype. Raises DsparkError when the shapes differ."""
        self._bound = BoundVocabulary(embed_weight, head_weight, self.config)
        return self

    def embed(self, ids: Tensor) -> Tensor:
        """The target's embeddings [...,H] of ids [...]."""
        return self._vocabulary.embed(ids, self.dtype)

    # Context

    def encode(self, features: Tensor, positions: Tensor) -> Context:
        """features [N, n*H]: the tapped target layers side by side, of tokens at positions [N] -> their context."""
        with self._grad():
            states = self.hidden_norm(self.fc(features.to(self.dtype)))
            rotary = self.rope(positions)
            layers = [layer.self_attn.keys_values(states, rotary) for layer in self.draft_layers]
        return Context(layers, states if self.fusion is not None else None)

    # The block

    def backbone(
        self, anchor_ids: Tensor, anchor_positions: Tensor, context: Context, begin: Tensor, end: Tensor
    ) -> Tensor:
        """anchor_ids, anchor_positions [B]; context rows begin:end of each block, begin = its sequence's first row
        (a sliding window is applied here) -> hidden [B,P,H] of the predicting slots, normed."""
        slots = self.config.block_size
        rotary = self.rope(anchor_positions[:, None] + torch.arange(slots, device=anchor_ids.device))
        spans = Spans(begin, end, self.config.sliding_window)
        with self._grad():
            x = self._block_inputs(anchor_ids, context, begin, end)
            for layer, kv in zip(self.draft_layers, context.layers, strict=True):
                x = layer(x, rotary, kv, spans)
            return self.norm(x[:, slots - self.config.num_predictions :])

    def _block_inputs(self, anchor_ids: Tensor, context: Context, begin: Tensor, end: Tensor) -> Tensor:
        """[B,K,H]: fused inputs, or the anchor's embedding and then the mask token's."""
        if self.fusion is not None:
            return self.fusion(context.last(begin, end), self.embed(anchor_ids))
        shape = (anchor_ids.shape[0], self.config.block_size)
        ids = torch.full(shape, self.config.mask_token_id, device=anchor_ids.device)
        ids[:, 0] = anchor_ids
        return self.embed(ids)

    # Heads

    def head_columns(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The target's LM head rows [Vd,H] of the draft vocabulary."""
        return self._vocabulary.head(self.draft_ids, dtype, self.fc.weight.device)

    def base_logits(self, hidden: Tensor) -> Tensor:
        """hidden [...,H] -> the target's LM head at the draft columns [...,Vd] fp32."""
        with self._grad():
            head = self.head_columns(hidden.dtype)
            # The head is frozen and packed: where no gradient is recorded (fused losses), our product is the faster one
            # on a CPU.
            plain = self.training and (torch.is_grad_enabled() or not hidden.is_cpu)
            return linear(hidden, head, None, plain, torch.float32)

    def slot_bias(
        self, state: Tensor | None, hidden: Tensor, prev_ids: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """One slot: state (None at the block's start), hidden [B,H], previous tokens [B] -> bias [B,Vd] fp32, new
        state, Markov embedding [B,r]; all None at rank 0."""
        if self.markov_head is None:
            return None, None, None
        with self._grad():
            embedding = self.markov_head.markov_w1(prev_ids)
            phi, state = self.markov_head.step(state, hidden, embedding)
            return self.markov_head.markov_w2(phi), state, embedding

    def confidence_logits(self, hidden: Tensor, markov_embedding: Tensor | None) -> Tensor:
        """hidden [M,H], markov_embedding [M,r] -> raw logits [M] fp32."""
        head = self.confidence_head
        assert head is not None, "this draft model has no confidence head"
        if self.config.stop_gradient or not self.training:  # the head may train while the rest is in eval mode
            hidden = hidden.detach()
            markov_embedding = None if markov_embedding is None else markov_embedding.detach()
        with torch.set_grad_enabled(head.training and torch.is_grad_enabled()):
            return head(hidden, markov_embedding)

    # Whole blocks: with known tokens, or token by token

    def slot_logits(self, hidden: Tensor, phi: Tensor | None) -> Tensor:
        """hidden [...,H], phi [...,r] of the sequential head -> logits [...,Vd] fp32. Every slot for itself: the losses
        call it with some slots at a time."""
        logits = self.base_logits(hidden)
        if self.markov_head is None or phi is None:
            return logits
        with self._grad():
            return logits.add_(self.markov_head.markov_w2(phi))

    def block_phi(self, hidden: Tensor, embedding: Tensor | None) -> Tensor | None:
        """hidden [B,P,H], Markov embeddings of the tokens before [B,P,r] -> phi [B,P,r]; None at rank 0."""
        if self.markov_head is None or embedding is None:
            return None
        with self._grad():
            return self.markov_head.block(hidden, embedding)

    def draft_logits(self, hidden: Tensor, anchor_ids: Tensor, labels: Tensor) -> Tensor:
        """hidden [B,P,H], the block's tokens [B,P] -> logits [B,P,Vd] fp32, each slot given the tokens before it."""
        return self.slot_logits(hidden, self.block_phi(hidden, self._markov_embedding(anchor_ids, labels)))

    def draft_confidence(self, hidden: Tensor, anchor_ids: Tensor, labels: Tensor) -> Tensor | None:
        """As draft_logits -> raw confidence logits [B,P] fp32; None without the head. No vocabulary-sized work."""
        if self.confidence_head is None:
            return None
        return self.confidence_logits(hidden, self._markov_embedding(anchor_ids, labels))

    def _markov_embedding(self, anchor_ids: Tensor, labels: Tensor) -> Tensor | None:
        """W1 [B,P,r] of the token before each prediction; None at rank 0."""
        if self.markov_head is None:
            return None
        with self._grad():
            return self.markov_head.markov_w1(_previous(anchor_ids, labels))

    def block_states(
        self,
        anchor_ids: Tensor,
        anchor_positions: Tensor,
        labels: Tensor,
        context: Context,
        begin: Tensor,
        end: Tensor,
    ) -> BlockStates:
        """Whole blocks given the true tokens, labels [B,P], without any vocabulary-sized work."""
        hidden = self.backbone(anchor_ids, anchor_positions, context, begin, end)
        embedding = self._markov_embedding(anchor_ids, labels)
        confidence = None if self.confidence_head is None else self.confidence_logits(hidden, embedding)
        return BlockStates(hidden, self.block_phi(hidden, embedding), confidence)

    def teacher_forced(
        self,
        anchor_ids: Tensor,
        anchor_positions: Tensor,
        labels: Tensor,
        context: Context,
        begin: Tensor,
        end: Tensor,
    ) -> DraftOutput:
        """Logits of whole blocks given the true tokens: labels [B,P], the token at anchor + j + 1."""
        states = self.block_states(anchor_ids, anchor_positions, labels, context, begin, end)
        return DraftOutput(states.hidden, self.slot_logits(states.hidden, states.phi), states.confidence_logits)

    @torch.no_grad()
    def propose(
        self,
        anchor_ids: Tensor,
        anchor_positions: Tensor,
        context: Context,
        begin: Tensor,
        end: Tensor,
        choose: Choose,
        gamma: int | None = None,
    ) -> Proposal:
        """Draws the first gamma (default: all P) tokens of each block, left to right, with `choose`."""
        gamma = self.config.num_predictions if gamma is None else gamma
        assert not self.training, "propose: call eval() first"
        assert 1 <= gamma <= self.config.num_predictions, f"propose: gamma {gamma}"
        hidden = self.backbone(anchor_ids, anchor_positions, context, begin, end)[:, :gamma]
        base, previous, state = self.base_logits(hidden), anchor_ids, None
        tokens = []
        for slot in range(gamma):
            bias, state, _ = self.slot_bias(state, hidden[:, slot], previous)
            previous = choose(slot, base[:, slot].contiguous() if bias is None else base[:, slot] + bias)
            tokens.append(previous)
        token_ids = torch.stack(tokens, dim=1)
        return Proposal(token_ids, self.draft_confidence(hidden, anchor_ids, token_ids))

    def to_columns(self, ids: Tensor) -> Tensor:
        """Vocabulary ids [...] -> logit columns [...], -1 where the draft vocabulary lacks the id."""
        if self.draft_ids is None:
            return ids
        columns = torch.searchsorted(self.draft_ids, ids.contiguous()).clamp_(max=self.draft_ids.shape[0] - 1)
        return torch.where(self.draft_ids[columns] == ids, columns, -1)

    def vocab_ids(self, columns: Tensor) -> Tensor:
        return columns if self.draft_ids is None else self.draft_ids[columns]

    @property
    def _vocabulary(self) -> BoundVocabulary:
        assert self._bound is not None, "call bind(embed_weight, head_weight) before drafting"
        return self._bound

    def _grad(self) -> torch.set_grad_enabled:
        """Inference ops have no autograd: outside training nothing is recorded."""
        return torch.set_grad_enabled(self.training and torch.is_grad_enabled())


def _previous(anchor_ids: Tensor, labels: Tensor) -> Tensor:
    """The token before each prediction [B,P]: the anchor, then the labels shifted by one."""
    return torch.cat([anchor_ids[:, None], labels[:, :-1]], dim=1)


def _draft_ids(config: DrafterConfig, draft_ids: Tensor | None) -> Tensor | None:
    if config.draft_vocab_size == 0:
        assert draft_ids is None, "draft_ids need config.draft_vocab_size > 0"
        return None
    if draft_ids is None:  # to be filled from a state dict; -1 is refused on use
        return torch.full((config.draft_vocab_size,), -1, dtype=torch.int64)
    if draft_ids.shape != (config.draft_vocab_size,):
        raise DsparkError(
            f"draft vocabulary: expected {config.draft_vocab_size} ids (draft_vocab_size), but got "
            f"{tuple(draft_ids.shape)}."
        )
    return draft_ids.detach().to(torch.int64).clone()
