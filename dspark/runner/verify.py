"""Accept or reject drafted tokens: one target pass's logits and keyed noise come in, tokens go out.

Rows are flat: request r owns rows ``offsets[r] .. offsets[r] + lengths[r]`` (lengths[r] drafts and one more). Row j
of a request carries the target's law for the token at position anchor + j + 1. All noise is a function of (seq_seed,
stream, position, token id), so nothing here depends on the batch.

- ``coupled`` (arXiv:2408.07978): the target's own keyed sample y_j; accept while the draft equals it, emit y at the
  first difference. The output is what the target alone would have sampled. ``greedy`` is its temperature-0 case.
- ``rejection`` (arXiv:2211.17192): accept x while u * q(x) < p(x); at the first rejection draw from (p - q)+, after the
  last acceptance from p. Three separate streams: drafting, accepting, residual.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dspark import noise, ops
from dspark.contracts import SamplingParams, VerifierName


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Sampling parameters as tensors, one entry a row: what the shaping and noise operations take."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor

    @staticmethod
    def of(params: list[SamplingParams]) -> SamplingRows:
        return SamplingRows(
            temperature=torch.tensor([p.temperature for p in params], dtype=torch.float32),
            top_k=torch.tensor([p.top_k for p in params], dtype=torch.int64),
            top_p=torch.tensor([p.top_p for p in params], dtype=torch.float32),
            min_p=torch.tensor([p.min_p for p in params], dtype=torch.float32),
            seeds=torch.tensor([p.seq_seed or 0 for p in params], dtype=torch.int64),  # None: scored, never drawn from
        )

    def repeat(self, counts: Tensor) -> SamplingRows:
        """Row r repeated counts[r] times: from one entry a request to one entry a flat row."""
        fields = (self.temperature, self.top_k, self.top_p, self.min_p, self.seeds)
        return SamplingRows(*(f.repeat_interleave(counts) for f in fields))

    def shape(self, logits: Tensor) -> Tensor:
        """logits [N,V] fp32 -> the sampling law [N,V] fp32, zeros off its support."""
        return ops.shape_probs(logits, self.temperature, self.top_k, self.top_p, self.min_p)

    def logprob(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """ln of the law's entry at tokens [N] -> [N] fp32."""
        return ops.law_logprob(logits, tokens, self.temperature, self.top_k, self.top_p, self.min_p)


@dataclass(frozen=True, slots=True)
class Verdict:
    """For one request: how many drafts were accepted, and the tokens emitted (accepted ones and one more) with the flat
    row each came from."""

    accepted: int
    tokens: list[int]
    rows: list[int]


def verify(
    verifier: VerifierName,
    probs: Tensor,
    sampling: SamplingRows,
    positions: Tensor,
    drafts: list[tuple[int, ...]],
    draft_probs: Tensor | None,
) -> list[Verdict]:
    """probs [N,V]: the target's sampling law per flat row; positions [N]: position of the token each row predicts;
    drafts: the verified drafts of each request; draft_probs [sum of drafts, V]: the law each was drawn from (rejection
    only). Returns one verdict a request."""
    lengths = [len(d) for d in drafts]
    if verifier == "rejection":
        return _rejection(probs, sampling, positions, drafts, draft_probs)
    samples = ops.gumbel_argmax(probs, sampling.seeds, noise.TARGET, positions).tolist()
    verdicts, start = [], 0
    for draft, length in zip(drafts, lengths, strict=True):
        own = samples[start : start + length + 1]
        accepted = _agreeing_prefix(draft, own)
        verdicts.append(Verdict(accepted, own[: accepted + 1], list(range(start, start + accepted + 1))))
        start += length + 1
    return verdicts


def _agreeing_prefix(draft: tuple[int, ...], samples: list[int]) -> int:
    for k, token in enumerate(draft):
        if token != samples[k]:
            return k
    return len(draft)


def _rejection(
    probs: Tensor, sampling: SamplingRows, positions: Tensor, drafts: list[tuple[int, ...]], draft_probs: Tensor | None
) -> list[Verdict]:
    accepted = _accepted_counts(probs, sampling, positions, drafts, draft_probs)
    starts = _starts(drafts)
    ends = torch.tensor([s + a for s, a in zip(starts, accepted, strict=True)], dtype=torch.int64)
    residual = torch.tensor([a < len(d) for a, d in zip(accepted, drafts, strict=True)])
    last = _next_tokens(probs, sampling, positions, ends, residual, draft_probs, drafts, accepted)
    return [
        Verdict(a, [*draft[:a], token], list(range(start, start + a + 1)))
        for a, draft, token, start in zip(accepted, drafts, last, starts, strict=True)
    ]


def _starts(drafts: list[tuple[int, ...]]) -> list[int]:
    starts, row = [], 0
    for draft in drafts:
        starts.append(row)
        row += len(draft) + 1
    return starts


def _accepted_counts(
    probs: Tensor, sampling: SamplingRows, positions: Tensor, drafts: list[tuple[int, ...]], draft_probs: Tensor | None
) -> list[int]:
    flat = [token for draft in drafts for token in draft]
    if not flat:
        return [0] * len(drafts)
    assert draft_probs is not None, "the rejection verifier needs the law each draft was drawn from"
    rows = torch.tensor([s + j for s, d in zip(_starts(drafts), drafts, strict=True) for j in range(len(d))])
    tokens = torch.tensor(flat)
    p = probs[rows, tokens]
    q = draft_probs[torch.arange(len(flat)), tokens]
    u = ops.uniform(sampling.seeds[rows], noise.ACCEPT, positions[rows])
    # Strictly less: a token the target gives probability 0 is never accepted, whatever u is.
    passed = (u * q < p).tolist()
    counts, i = [], 0
    for draft in drafts:
        run = passed[i : i + len(draft)]
        counts.append(run.index(False) if False in run else len(run))
        i += len(draft)
    return counts


def _next_tokens(
    probs: Tensor,
    sampling: SamplingRows,
    positions: Tensor,
    rows: Tensor,
    rejected: Tensor,
    draft_probs: Tensor | None,
    drafts: list[tuple[int, ...]],
    accepted: list[int],
) -> list[int]:
    """The token after the accepted run: from the residual law where a draft was rejected, else from the target's."""
    tokens = ops.gumbel_argmax(probs[rows], sampling.seeds[rows], noise.TARGET, positions[rows])
    if bool(rejected.any()):
        assert draft_probs is not None, "a rejection without a draft"
        first, i = [], 0
        for draft, a in zip(drafts, accepted, strict=True):
            if a < len(draft):
                first.append(i + a)
            i += len(draft)
        at = rows[rejected]
        law = residual_rows(probs[at], draft_probs[torch.tensor(first)])
        tokens[rejected] = ops.gumbel_argmax(law, sampling.seeds[at], noise.RESIDUAL, positions[at])
    return tokens.tolist()


def residual_rows(p: Tensor, q: Tensor) -> Tensor:
    """Unnormalised (p - q)+ per row, [N,V]; p itself where nothing is left. The argmax of log law + noise does not need
    the normaliser, so no sum over the vocabulary enters and the bits stay a function of the row."""
    rest = (p - q).clamp_min(0.0)
    empty = rest.amax(dim=-1, keepdim=True) <= 0.0
    return torch.where(empty, p, rest)
