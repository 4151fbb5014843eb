"""The loop: admit, draft, schedule, verify, commit, over a continuous batch.

One call of ``_Run.round`` is one target pass over a flat batch of rows: for every running request its anchor and the
drafts to be verified, for every request still prefilling the next chunk of its prompt. Every operation gives a row the
same bits whatever other rows are in the call, so what a request produces does not depend on its companions, the chunk
size, the arena row it landed in, or how many drafts were verified.

Left out here on purpose: policies that read confidences, prefix caching, preemption (a request is admitted only when
all the rows it can ever need are free).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from dspark import ops
from dspark.contracts import Completion, DsparkError, MTPPredictInfo, Request, Round, SamplingParams, VerifierName
from dspark.drafter.model import Drafter
from dspark.runner import schedule
from dspark.runner.batch import FlatBatch
from dspark.runner.draft import Drafts, DraftStage
from dspark.runner.score import Finished, check_ids, score
from dspark.runner.sequence import Sequence
from dspark.runner.verify import SamplingRows, Verdict, verify
from dspark.target.cache import Arena, KVCache
from dspark.target.decoder import Target

OnFinish = Callable[[int, Completion], None]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How the runner works. None of it changes what a request produces under the coupled and greedy verifiers.

    verifier: greedy (temperature 0 only), coupled or rejection. max_batch: requests in flight. prefill_chunk: prompt
    tokens per pass. verify_tokens: drafts verified per round (None = the whole block; 0 = none). kv_tokens: arena rows.
    commit_to_cap: verify the whole block but commit at most verify_tokens drafts, so that a capped run still records
    untruncated labels.
    """

    verifier: VerifierName = "coupled"
    max_batch: int = 32
    prefill_chunk: int = 256
    verify_tokens: int | None = None
    kv_tokens: int = 16384
    commit_to_cap: bool = False

    def __post_init__(self) -> None:
        if self.verifier not in ("greedy", "coupled", "rejection"):
            raise DsparkError(f"runner: expected verifier greedy, coupled or rejection, but got {self.verifier!r}.")
        if self.commit_to_cap and self.verifier == "rejection":
            raise DsparkError(
                "runner: commit_to_cap expects the coupled or the greedy verifier, but got rejection. Collect "
                "untruncated labels for rejection with verify_tokens unset (the whole block)."
            )
        for name in ("max_batch", "prefill_chunk", "kv_tokens"):
            if getattr(self, name) < 1:
                raise DsparkError(f"runner: expected {name} >= 1, but got {getattr(self, name)}.")


class Engine:
    """Runs requests through a target model, with or without a draft model.

    Raises DsparkError for options that do not fit the draft model (verify_tokens larger than the trained block).
    """

    def __init__(self, target: Target, drafter: Drafter | None = None, options: EngineOptions | None = None):
        self.target, self.drafter = target, drafter
        self.options = options or EngineOptions()
        self.taps = tuple(drafter.config.target_layer_ids) if drafter else ()
        block = drafter.config.num_predictions if drafter else 0
        self.verify_tokens = block if self.options.verify_tokens is None else self.options.verify_tokens
        if not 0 <= self.verify_tokens <= block and drafter is not None:
            raise DsparkError(
                f"runner: expected verify_tokens between 0 and the trained block size {block}, but got "
                f"{self.verify_tokens}. Lower it (DEEPINFER_USE_NEXTN_DECODE), or train with a larger block."
            )

    def generate(self, requests: list[Request], on_finish: OnFinish | None = None) -> list[Completion]:
        """Finish all requests; completions come back in request order, ``on_finish(index, completion)`` as they end."""
        self._check(requests)
        self.target.refresh()
        run = _Run(self, requests)
        completions: dict[int, Completion] = {}
        with torch.inference_mode():
            while run.busy:
                for sequence in run.round():
                    completions[sequence.index] = sequence.completion()
                    if on_finish:
                        on_finish(sequence.index, completions[sequence.index])
        return [completions[i] for i in range(len(requests))]

    def score(
        self, prompt_ids: tuple[int, ...], response_ids: tuple[int, ...], params: SamplingParams
    ) -> tuple[Tensor, Tensor]:
        """(logprobs, raw_logprobs) [len(response)] fp32 of a finished sequence: see score.score."""
        with torch.inference_mode():
            return score(self.target, [Finished(prompt_ids, response_ids, params)])

    def _check(self, requests: list[Request]) -> None:
        longest, rows = self.target.config.max_position_embeddings, self.options.kv_tokens
        for i, request in enumerate(requests):
            need = len(request.prompt_ids) + request.params.max_tokens
            if need > min(longest, rows):
                raise DsparkError(
                    f"request {i}: expected prompt + max_tokens <= {min(longest, rows)} (the target's longest context "
                    f"{longest}, kv_tokens {rows}), but got {need}. Shorten it, or raise kv_tokens."
                )
            check_ids(request.prompt_ids, self.target.vocab_size, f"request {i}: prompt")
            if self.options.verifier == "greedy" and request.params.temperature != 0.0:
                raise DsparkError(
                    f"request {i}: the greedy verifier expects temperature 0, but got {request.params.temperature}. "
                    "Use the coupled or the rejection verifier."
                )


class _Run:
    """The state of one generate call: waiting and running sequences, and the arenas their rows live in."""

    def __init__(self, engine: Engine, requests: list[Request]):
        self.engine, self.target, self.options, self.taps = engine, engine.target, engine.options, engine.taps
        needs = [len(r.prompt_ids) + r.params.max_tokens for r in requests]
        capacity = max(1, min(sum(needs), self.options.kv_tokens))
        config = self.target.config
        self.cache = KVCache(config.num_layers, capacity, config.num_kv_heads, config.head_dim, self.target.dtype)
        self.arena = Arena(capacity)
        self.waiting = deque(enumerate(requests))
        self.running: list[Sequence] = []
        self.drafting = self._draft_stage(capacity)

    def _draft_stage(self, capacity: int) -> DraftStage | None:
        drafter, options = self.engine.drafter, self.options
        if drafter is None or self.engine.verify_tokens == 0:
            return None
        width = drafter.config.num_predictions if options.commit_to_cap else self.engine.verify_tokens
        return DraftStage(drafter, capacity, options.verifier, width)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def round(self) -> list[Sequence]:
        """One target pass: draft, schedule, verify, commit. Returns the sequences that finished in it."""
        self._admit()
        decoding = [s for s in self.running if not s.prefilling]
        drafts = self._draft(decoding)
        lengths = self._schedule(decoding, drafts.predictions)
        batch = FlatBatch.build(decoding, drafts.predictions, lengths, self._prefill_chunks())
        hidden, features = self.target.forward(
            batch.ids, batch.positions, batch.rows, batch.begin, batch.rows + 1, self.cache, self.taps
        )
        kept = self._verify(batch, hidden, drafts, lengths)
        if self.drafting and features is not None:
            final = batch.final_rows(kept)
            self.drafting.commit(features[final], batch.positions[final], batch.rows[final])
        return self._retire()

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.options.max_batch:
            index, request = self.waiting[0]
            base = self.arena.alloc(len(request.prompt_ids) + request.params.max_tokens)
            if base is None:
                return
            self.waiting.popleft()
            self.running.append(Sequence(index, request, base))

    def _draft(self, decoding: list[Sequence]) -> Drafts:
        """One entry per decoding sequence; an empty prediction where no draft can be used."""
        empty = MTPPredictInfo((), None)
        if self.drafting is None or not decoding:
            return Drafts([empty] * len(decoding), None)
        drafts = self.drafting.propose(decoding, SamplingRows.of([s.request.params for s in decoding]))
        limits = [schedule.draft_limit(self.drafting.width, s.remaining) for s in decoding]
        cut = [
            MTPPredictInfo(p.token_ids[:n], p.confidence_rates and p.confidence_rates[:n])
            for p, n in zip(drafts.predictions, limits, strict=True)
        ]
        return Drafts(cut, drafts.probs)

    def _schedule(self, decoding: list[Sequence], predictions: list[MTPPredictInfo]) -> list[int]:
        return schedule.fixed(predictions, self.drafting.width if self.drafting else 0)

    def _prefill_chunks(self) -> list[tuple[Sequence, int]]:
        """(sequence, prompt tokens to process now), oldest first, within the pass's budget."""
        budget, chunks = self.options.prefill_chunk, []
        for sequence in self.running:
            if sequence.prefilling and budget > 0:
                take = min(budget, sequence.prompt_length - sequence.cached)
                chunks.append((sequence, take))
                budget -= take
        return chunks

    def _verify(self, batch: FlatBatch, hidden: Tensor, drafts: Drafts, lengths: list[int]) -> list[int]:
        """Emit tokens for the decoding sequences, and the first one of those whose prompt is now complete. Returns how
        many tokens each decoding sequence kept (its first so many rows are final)."""
        ready = batch.advance_prefill()
        sequences = batch.decoding + ready
        if not sequences:
            return []
        counts = torch.tensor([n + 1 for n in lengths] + [1] * len(ready))
        sampling = SamplingRows.of([s.request.params for s in sequences]).repeat(counts)
        logits = self.target.logits(hidden[batch.logit_rows])
        probs = sampling.shape(logits)
        positions = batch.positions[batch.logit_rows] + 1
        verified = [p.token_ids[:n] for p, n in zip(drafts.predictions, lengths, strict=True)] + [()] * len(ready)
        laws = self._verified_laws(drafts.probs, lengths)
        verdicts = verify(self.options.verifier, probs, sampling, positions, verified, laws)
        kept = self._emit(sequences, verdicts, logits, probs)
        self._record(batch.decoding, drafts.predictions, lengths, verdicts, kept)
        return kept[: len(batch.decoding)]

    def _verified_laws(self, probs: Tensor | None, lengths: list[int]) -> Tensor | None:
        """Draft laws [sum of lengths, V] over the full vocabulary, for the drafts that were verified."""
        if probs is None or sum(lengths) == 0:
            return None
        rows = torch.cat([probs[i, :n] for i, n in enumerate(lengths)])
        ids = self.engine.drafter.draft_ids if self.engine.drafter else None
        if ids is None:
            return rows
        full = torch.zeros(len(rows), self.target.config.vocab_size)
        full[:, ids] = rows
        return full

    def _emit(self, sequences: list[Sequence], verdicts: list[Verdict], logits: Tensor, probs: Tensor) -> list[int]:
        """Append each verdict's tokens with their log-probabilities. Returns how many each sequence kept."""
        cap = self.engine.verify_tokens + 1
        verdicts = [Verdict(v.accepted, v.tokens[:cap], v.rows[:cap]) for v in verdicts] if self.drafting else verdicts
        rows = torch.tensor([row for v in verdicts for row in v.rows])
        tokens = torch.tensor([token for v in verdicts for token in v.tokens])
        logprobs = iter(ops.log_of(probs[rows], tokens).tolist())
        raw = iter(ops.raw_logprob(logits[rows], tokens).tolist())
        kept = []
        for sequence, verdict in zip(sequences, verdicts, strict=True):
            n = len(verdict.tokens)
            kept.append(sequence.append(verdict.tokens, list(islice(logprobs, n)), list(islice(raw, n))))
            sequence.cached = len(sequence.tokens) - 1
        return kept

    def _record(
        self,
        decoding: list[Sequence],
        predictions: list[MTPPredictInfo],
        lengths: list[int],
        verdicts: list[Verdict],
        kept: list[int],
    ) -> None:
        """Note the round of each sequence that had drafts. Where the sequence ended inside the block, the drafts behind
        its end never mattered and are cut from the record."""
        for sequence, prediction, length, verdict, n in zip(
            decoding, predictions, lengths, verdicts, kept, strict=False
        ):
            if not prediction.token_ids:
                continue
            end = n if sequence.finish_reason else len(prediction.token_ids)
            sequence.rounds.append(
                Round(
                    anchor=sequence.anchor - n,
                    drafted=prediction.token_ids[:end],
                    verified=min(length, end),
                    accepted=min(verdict.accepted, end),
                    confidences=(prediction.confidence_rates or ())[:end],
                )
            )

    def _retire(self) -> list[Sequence]:
        finished = [s for s in self.running if s.finish_reason]
        for sequence in finished:
            self.arena.free(sequence.base)
        self.running = [s for s in self.running if not s.finish_reason]
        return finished
