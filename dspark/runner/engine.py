"""The loop: admit, draft, schedule, verify, commit, over a continuous batch.

One call of ``Run.round`` is one target pass over a flat batch of rows: for every running request its anchor and the
drafts to be verified, for every request still prefilling the next chunk of its prompt. Every operation gives a row the
same bits whatever other rows are in the call, so what a request produces does not depend on its companions, the chunk
size, the arena row it landed in, or how many drafts were verified.

Left out here on purpose: preemption (a request is admitted only when all the rows it can ever need are free).
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor

from dspark import ops
from dspark.contracts import Completion, DsparkError, MTPPredictInfo, Request, Round, SamplingParams
from dspark.drafter.model import Drafter
from dspark.runner import schedule
from dspark.runner.batch import FlatBatch
from dspark.runner.draft import Drafts, DraftStage
from dspark.runner.options import EngineOptions
from dspark.runner.prefix import WORTH_WAITING, PrefixCount, Source, sources
from dspark.runner.schedule import Scheduler
from dspark.runner.score import Finished, check_ids, score
from dspark.runner.sequence import Sequence
from dspark.runner.verify import SamplingRows, Verdict, verify
from dspark.settings import MIN_BACKTRACKING
from dspark.target.cache import Arena, KVCache
from dspark.target.decoder import Target
from dspark.target.replay import check_replay

OnFinish = Callable[[int, Completion], None]


class Lengths(Protocol):
    """What decides how many drafts of each request are verified; see Scheduler."""

    def lengths(self, predictions: list[MTPPredictInfo], other_rows: int = 0) -> list[int]: ...


class Engine:
    """Runs requests through a target model, with or without a draft model.

    Raises DsparkError for options that do not fit the draft model (verify_tokens larger than the trained block).
    """

    def __init__(self, target: Target, drafter: Drafter | None = None, options: EngineOptions | None = None):
        self.target, self.drafter = target, drafter
        self.options = options or EngineOptions()
        self.prefixes = PrefixCount()  # of the last generate call
        self.taps = tuple(drafter.config.target_layer_ids) if drafter else ()
        block = drafter.config.num_predictions if drafter else 0
        self.verify_tokens = block if self.options.verify_tokens is None else self.options.verify_tokens
        if not 0 <= self.verify_tokens <= block:
            raise DsparkError(
                f"runner: expected verify_tokens between 0 and the trained block size {block} (0: no draft model), "
                f"but got {self.verify_tokens}. Lower it (DEEPINFER_USE_NEXTN_DECODE), or train with a larger block."
            )
        if self.options.policy != "fixed":
            _refuse_confidences(drafter, self.options)
        given = self.options.backtracking
        needed = (block if self.options.commit_to_cap else self.verify_tokens) + 1
        if given is not None and given < needed:
            raise DsparkError(
                f"runner: expected backtracking >= {needed} (a round and its anchor), but got {given}. Raise "
                "DEEPINFER_MAX_BACKTRACKING_TOKENS."
            )
        self.backtracking = max(MIN_BACKTRACKING, needed) if given is None else given
        check_replay(target.config, self.options.truncation, self.options.keep_tokens, self.backtracking, self.taps)

    def scheduler(self) -> Scheduler:
        """A run's policy, fresh."""
        options = self.options
        return Scheduler(options.policy, self.verify_tokens, options.threshold, options.curve)

    def generate(self, requests: list[Request], on_finish: OnFinish | None = None) -> list[Completion]:
        """Finish all requests; completions come back in request order, ``on_finish(index, completion)`` as they end."""
        run = self.begin(requests)
        self.prefixes = run.prefixes
        completions: dict[int, Completion] = {}
        with torch.inference_mode():
            while run.busy:
                for sequence in run.round():
                    completions[sequence.index] = sequence.completion()
                    if on_finish:
                        on_finish(sequence.index, completions[sequence.index])
        return [completions[i] for i in range(len(requests))]

    def begin(self, requests: list[Request]) -> Run:
        """The run over these requests, before its first round, for one who looks at rounds. Raises DsparkError for
        requests that the runner cannot finish."""
        self._check(requests)
        self.target.refresh()
        return Run(self, [_seeded(request) for request in requests])

    def score(
        self, prompt_ids: tuple[int, ...], response_ids: tuple[int, ...], params: SamplingParams
    ) -> tuple[Tensor, Tensor]:
        """(logprobs, raw_logprobs) [len(response)] fp32 of a finished sequence: see score.score. Raises DsparkError
        where prompts are cut: a teacher-forced pass reads them whole."""
        if self.options.truncation != "off":
            raise DsparkError(
                f"runner: expected truncation off to score with, but got {self.options.truncation}: prompts that were "
                "cut have other log-probabilities than a teacher-forced pass gives."
            )
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


def _seeded(request: Request) -> Request:
    """A request without a seed gets one of its own, from the system: two of them are not the same sample twice."""
    if request.params.seq_seed is not None:
        return request
    return replace(request, params=request.params.with_seed(secrets.randbits(63)))


def _refuse_confidences(drafter: Drafter | None, options: EngineOptions) -> None:
    if drafter is None or drafter.confidence_head is None:
        got = "there is no draft model" if drafter is None else "this one has none"
        raise DsparkError(
            f"runner: policy {options.policy} expects a draft model with a confidence head, but {got}. Use policy "
            "fixed."
        )
    if options.verifier == "rejection" and drafter.config.confidence_with_law:
        raise DsparkError(
            f"runner: policy {options.policy} with the rejection verifier expects confidences that do not know the "
            "drafted token, but this head reads the odds of it (confidence_with_law): cutting by them changes the law "
            "of the output. Use the coupled verifier, policy fixed, or a head trained with "
            "--model.init_args.with_law=false."
        )


class Run:
    """The state of one generate call: waiting and running sequences, and the arenas their rows live in.

    drafting_seconds: of the last round, what drafting took.
    """

    def __init__(self, engine: Engine, requests: list[Request]):
        self.engine, self.target, self.options, self.taps = engine, engine.target, engine.options, engine.taps
        needs = [len(r.prompt_ids) + r.params.max_tokens for r in requests]
        capacity = max(1, min(sum(needs), self.options.kv_tokens))
        config = self.target.config
        rings = min(self.options.max_batch, len(requests))
        self.cache = KVCache(
            config.cached_windows, capacity, config.num_kv_heads, config.head_dim, self.target.dtype,
            rings, engine.backtracking, max(needs, default=0),
        )  # fmt: skip
        self.rings = list(range(rings)) if self.cache.entries else [0] * len(requests)  # free ones
        self.arena = Arena(capacity)
        self.waiting = deque(enumerate(requests))
        self.running: list[Sequence] = []
        self.kept: list[Sequence] = []  # finished, oldest first; their rows stay until the room is needed
        self.prefixes = PrefixCount()
        self.drafting = self._draft_stage(capacity)
        self.scheduler: Lengths = engine.scheduler()
        self.drafting_seconds = 0.0

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
        begin = time.perf_counter()
        drafts = self._draft(decoding)
        self.drafting_seconds = time.perf_counter() - begin
        chunks = self._prefill_chunks()
        caps = self.scheduler.lengths(drafts.predictions, sum(take for _, take in chunks))
        lengths = [len(p.token_ids) for p in drafts.predictions] if self.options.commit_to_cap else caps
        batch = FlatBatch.build(decoding, drafts.predictions, lengths, chunks)
        replay = batch.replay(self.options.truncation, self.options.keep_tokens)
        hidden, features = self.target.forward(
            batch.ids, batch.positions, batch.rows, batch.begin, batch.rows + 1, self.cache, self.taps, batch.spans,
            replay,
        )  # fmt: skip
        kept = self._verify(batch, hidden, drafts, caps)
        if self.drafting and features is not None:
            final = batch.final_rows(kept, self.drafting.window)
            self.drafting.commit(features[final], batch.positions[final], batch.rows[final])
        return self._retire()

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.options.max_batch:
            index, request = self.waiting[0]
            base = self._room(len(request.prompt_ids) + request.params.max_tokens)
            if base is None:
                return
            self.waiting.popleft()
            self.running.append(Sequence(index, request, base, self.rings.pop()))
            self.prefixes.prompt_tokens += len(request.prompt_ids)

    def _room(self, rows: int) -> int | None:
        """A free region; finished sequences give theirs up for it, the oldest first."""
        while True:
            base = self.arena.alloc(rows) if self.rings else None
            if base is not None or not self.kept:
                return base
            oldest = self.kept.pop(0)
            self.arena.free(oldest.base)
            self.rings.append(oldest.ring)

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

    def _prefill_chunks(self) -> list[tuple[Sequence, int]]:
        """(sequence, prompt tokens to process now), oldest first, within the pass's budget."""
        budget, chunks = self.options.prefill_chunk, []
        for i, sequence in enumerate(self.running):
            if sequence.prefilling and budget > 0 and not self._waits(sequence, self.running[:i]):
                take = min(budget, sequence.prompt_length - sequence.cached)
                chunks.append((sequence, take))
                budget -= take
        return chunks

    def _waits(self, sequence: Sequence, older: list[Sequence]) -> bool:
        """Takes over what another prompt has of this one, before its first chunk. True while one that was admitted
        earlier is about to compute more of it. Nobody waits for a later one, so the oldest goes on."""
        if sequence.cached or not self.options.reuse_prefixes:
            return False
        source, later = sources(sequence, [*self.kept, *older], self._whole)
        if later and later.coming - (source.ready if source else 0) > WORTH_WAITING:
            return True
        if not source:
            return False
        self.cache.copy(source.donor.base, sequence.base, source.ready, source.donor.ring, sequence.ring)
        if self.drafting:
            self.drafting.context.copy(source.donor.base, sequence.base, source.ready)
        sequence.cached = source.ready
        self.prefixes.hits += 1
        self.prefixes.reused += source.ready
        return False

    def _whole(self, source: Source, sequence: Sequence) -> bool:
        """Whether the donor has, or will have, every row that this sequence would look at."""
        theirs, mine = source.donor.prompt_length, sequence.prompt_length
        if self.cache.entries and not source.in_rings:
            return False
        if self.options.truncation != "off" and theirs != mine:  # another prompt's suffix begins elsewhere
            return False
        return theirs <= mine or not (self.drafting and self.drafting.window)

    def _verify(self, batch: FlatBatch, hidden: Tensor, drafts: Drafts, caps: list[int]) -> list[int]:
        """Emit tokens for the decoding sequences, at most caps[r] drafts and one more, and the first one of those whose
        prompt is now complete. Returns how many tokens each decoding sequence kept (its first so many rows are
        final)."""
        ready = batch.advance_prefill()
        sequences, lengths = batch.decoding + ready, batch.lengths
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
        kept = self._emit(sequences, verdicts, caps + [0] * len(ready), logits, probs)
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

    def _emit(
        self, sequences: list[Sequence], verdicts: list[Verdict], caps: list[int], logits: Tensor, probs: Tensor
    ) -> list[int]:
        """Append the first caps[r] + 1 of each verdict's tokens with their log-probabilities. Returns how many each
        sequence kept."""
        verdicts = [
            Verdict(v.accepted, v.tokens[: c + 1], v.rows[: c + 1]) for v, c in zip(verdicts, caps, strict=True)
        ]
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
        self.kept += finished
        self.running = [s for s in self.running if not s.finish_reason]
        return finished
