"""The draft model: context features in, a block of token proposals with confidences out.

    features [N, n*H] -> fc, norm -> context: keys and values per draft layer (cached by the caller); with layer_fusion
                         a map and a norm for each layer
    a block of slots, all at once (parallel.py) or in sequence (mtp.py) -> draft layers -> hidden [B, P, H]
    hidden -> LM head + Markov bias -> logits [B, P, Vd]
Two arithmetic paths, one code: ``train()`` is plain torch with autograd, ``eval()`` the inference ops, in which a
block's bits depend on the block and its context alone, and ``teacher_forced`` equals ``propose`` bit for bit.
With `candidates` the draft law is cut to a few tokens in eval() alone. In train() it keeps the whole vocabulary: a
label among the dropped ones would have logit -inf, an infinite loss, and no gradient to bring it back.
The target's embedding and LM head are bound from outside (``bind``): they are no parameters, get no gradient and are
in no checkpoint. Caching context keys, choosing tokens and verifying live in the runner.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dspark.contracts import DsparkError
from dspark.drafter.backbone import DraftLayer
from dspark.drafter.candidates import keep_candidates
from dspark.drafter.confidence import ConfidenceHead, law_features
from dspark.drafter.config import DrafterConfig
from dspark.drafter.context import Context
from dspark.drafter.features import LayerFeatures
from dspark.drafter.fusion import InputFusion
from dspark.drafter.layers import Dense, RMSNorm, linear, start
from dspark.drafter.mtp import SequentialBlock, joins
from dspark.drafter.parallel import ParallelBlock
from dspark.drafter.rope import Rope
from dspark.drafter.sequential import markov_head
from dspark.drafter.vocabulary import BoundVocabulary

Choose = Callable[[int, Tensor], Tensor]  # slot, logits [B, Vd] fp32 -> vocabulary ids [B]


@dataclass(frozen=True, slots=True)
class DraftOutput:
    """hidden [B,P,H]; logits [B,P,Vd] fp32 (Markov bias included; in eval -inf off the candidates); confidence_logits
    [B,P] fp32 before temperature."""

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
        self.joins = joins(config)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(hidden, eps)
        self.markov_head = markov_head(config)
        rank, reads = config.markov_rank if config.confidence_with_markov else 0, config.confidence_with_law
        head = ConfidenceHead(hidden, rank, config.num_predictions, reads) if config.confidence_head else None
        self.confidence_head = head
        own = config.num_layers - 1 if config.layer_fusion else 0  # last, so that all before it starts as without it
        self.layer_features = nn.ModuleList(LayerFeatures(config) for _ in range(own))
        self.register_buffer("draft_ids", _draft_ids(config, draft_ids))
        self.rope = Rope(config.rope_parameters, config.head_dim)
        self._bound: BoundVocabulary | None = None
        start(self, torch.Generator().manual_seed(seed))

    @property
    def draft_layers(self) -> list[DraftLayer]:
        return [layer for layer in self.layers if isinstance(layer, DraftLayer)]

    @property
    def feature_maps(self) -> list[tuple[Dense, RMSNorm]]:
        """fc and hidden_norm: the pair that all draft layers read, or with layer_fusion one pair per draft layer."""
        own = [part for part in self.layer_features if isinstance(part, LayerFeatures)]
        return [(self.fc, self.hidden_norm), *((part.fc, part.hidden_norm) for part in own)]

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
            states = self._layer_states(features.to(self.dtype))
            rotary = self.rope(positions)
            pairs = zip(self.draft_layers, states, strict=True)
            layers = [layer.keys_values(x, rotary) for layer, x in pairs]
        return Context(layers, states[0] if self.config.reads_features else None)

    def _layer_states(self, features: Tensor) -> list[Tensor]:
        """features [N, n*H] -> context features [N,H] of each draft layer: its own, or the first one's for all."""
        states = [norm(fc(features)) for fc, norm in self.feature_maps]
        return states if self.config.layer_fusion else states * self.config.num_layers

    # The block

    def backbone(
        self,
        anchor_ids: Tensor,
        anchor_positions: Tensor,
        labels: Tensor,
        context: Context,
        begin: Tensor,
        end: Tensor,
    ) -> Tensor:
        """anchor_ids, anchor_positions [B], the block's tokens [B,P]; context rows begin:end of each block, begin = its
        sequence's first row (a sliding window is applied here) -> hidden [B,P,H] of the predicting slots, normed."""
        previous = _previous(anchor_ids, labels)
        with self._grad():
            return self._block(anchor_ids, anchor_positions, context, begin, end, labels.shape[1]).known(previous)

    def _block(
        self, anchor_ids: Tensor, anchor_positions: Tensor, context: Context, begin: Tensor, end: Tensor, count: int
    ) -> ParallelBlock | SequentialBlock:
        if self.joins is not None:
            return SequentialBlock(self, self.joins, anchor_positions, context, begin, end)
        return ParallelBlock(self, anchor_ids, anchor_positions, context, begin, end, count)

    # Heads

    def head_columns(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The target's LM head rows [Vd,H] of the draft vocabulary."""
        return self._vocabulary.head(self.draft_ids, dtype, self.fc.weight.device)

    def base_logits(self, hidden: Tensor) -> Tensor:
        """hidden [...,H] -> the target's LM head at the draft columns [...,Vd] fp32; in eval cut to the candidates."""
        with self._grad():
            head = self.head_columns(hidden.dtype)
            # The head is frozen and packed: where no gradient is recorded (fused losses), our product is the faster one
            # on a CPU.
            plain = self.training and (torch.is_grad_enabled() or not hidden.is_cpu)
            logits = linear(hidden, head, None, plain, torch.float32)
            return logits if self.training else keep_candidates(logits, self.config.candidates)

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

    def confidence_logits(self, hidden: Tensor, markov_embedding: Tensor | None, law: Tensor | None = None) -> Tensor:
        """hidden [M,H], markov_embedding [M,r], law [M,2] for a head that reads it -> raw logits [M] fp32."""
        head = self.confidence_head
        assert head is not None, "this draft model has no confidence head"
        if self.config.stop_gradient or not self.training:  # the head may train while the rest is in eval mode
            hidden = hidden.detach()
            markov_embedding = None if markov_embedding is None else markov_embedding.detach()
        with torch.set_grad_enabled(head.training and torch.is_grad_enabled()):
            return head(hidden, markov_embedding, law)

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

    def draft_confidence(
        self, hidden: Tensor, anchor_ids: Tensor, labels: Tensor, law: Tensor | None = None
    ) -> Tensor | None:
        """As draft_logits, law [B,P,2] as `law` gives it -> raw confidence logits [B,P] fp32; None without the head. No
        vocabulary-sized work."""
        if self.confidence_head is None:
            return None
        return self.confidence_logits(hidden, self._markov_embedding(anchor_ids, labels), law)

    def law(self, logits: Tensor, ids: Tensor) -> Tensor | None:
        """The draft's logits [...,Vd] and the drafted tokens [...] -> what a confidence head with_law reads [...,2];
        None for one that does not."""
        return law_features(logits, self.to_columns(ids)) if self.config.confidence_with_law else None

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
        """Whole blocks given the true tokens, labels [B,P], without any vocabulary-sized work: so no confidence of a
        head that reads the law."""
        hidden = self.backbone(anchor_ids, anchor_positions, labels, context, begin, end)
        embedding = self._markov_embedding(anchor_ids, labels)
        silent = self.confidence_head is None or self.config.confidence_with_law
        confidence = None if silent else self.confidence_logits(hidden, embedding)
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
        logits, confidence = self.slot_logits(states.hidden, states.phi), states.confidence_logits
        if self.config.confidence_with_law:
            confidence = self.draft_confidence(states.hidden, anchor_ids, labels, self.law(logits.detach(), labels))
        return DraftOutput(states.hidden, logits, confidence)

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
        block = self._block(anchor_ids, anchor_positions, context, begin, end, gamma)
        previous, state = anchor_ids, None
        states, tokens, drawn = [], [], []
        for slot in range(gamma):
            hidden, logits = block.step(slot, previous)
            bias, state, _ = self.slot_bias(state, hidden, previous)
            logits = logits if bias is None else logits + bias
            previous = choose(slot, logits)
            states.append(hidden)
            tokens.append(previous)
            if self.config.confidence_with_law:
                drawn.append(logits)
        token_ids = torch.stack(tokens, dim=1)
        law = self.law(torch.stack(drawn, dim=1), token_ids) if drawn else None
        return Proposal(token_ids, self.draft_confidence(torch.stack(states, dim=1), anchor_ids, token_ids, law))

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
