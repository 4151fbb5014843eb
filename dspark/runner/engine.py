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
from typing import Protocol

import torch
from torch import Tensor

from dspark.contracts import Completion, DsparkError, MTPPredictInfo, Request, SamplingParams
from dspark.drafter.model import Drafter
from dspark.runner import schedule
from dspark.runner.batch import FlatBatch
from dspark.runner.draft import Drafts, DraftStage, cut
from dspark.runner.emit import emit, record
from dspark.runner.gate import Gate
from dspark.runner.lookup import Lookup
from dspark.runner.mixed import MixedStage
from dspark.runner.options import EngineOptions
from dspark.runner.prefix import WORTH_WAITING, PrefixCount, Source, sources
from dspark.runner.schedule import Scheduler
from dspark.runner.score import Finished, check_ids, score
from dspark.runner.sequence import Sequence
from dspark.runner.verify import SamplingRows, verify
from dspark.settings import MIN_BACKTRACKING
from dspark.target.cache import Arena, KVCache
from dspark.target.decoder import Target
from dspark.target.replay import check_replay

OnFinish = Callable[[int, Completion], None]


class Lengths(Protocol):
    """What decides whether there are drafts, and how many of each request are verified; see Scheduler."""

    def drafts(self, requests: int) -> bool: ...

    def lengths(self, predictions: list[MTPPredictInfo], other_rows: int = 0) -> list[int]: ...


class Engine:
    """Runs requests through a target model, with or without a draft model, a lookup (lookup.py), or both.

    lookup: outlives the engine; whoever samples in many calls gives every engine the same one. Raises DsparkError for
    options that do not fit the draft model (verify_tokens larger than the trained block) or the lookup.
    """

    def __init__(
        self, target: Target, drafter: Drafter | None = None, options: EngineOptions | None = None,
        lookup: Lookup | None = None,
    ):  # fmt: skip
        self.target, self.drafter, self.lookup = target, drafter, lookup
        self.options = options or EngineOptions()
        self.prefixes = PrefixCount()  # of the last generate call
        self.gate = Gate()  # what drafting was worth so far: the next call need not find out again
        self.taps = tuple(drafter.config.target_layer_ids) if drafter else ()
        block = drafter.config.num_predictions if drafter else 0
        self.verify_tokens = block if self.options.verify_tokens is None else self.options.verify_tokens
        if not 0 <= self.verify_tokens <= block:
            raise DsparkError(
                f"runner: expected verify_tokens between 0 and the trained block size {block} (0: no draft model), "
                f"but got {self.verify_tokens}. Lower it (DEEPINFER_USE_NEXTN_DECODE), or train with a larger block."
            )
        if lookup is not None:
            _refuse_lookup(self.options)
        elif self.options.policy != "fixed":
            _refuse_confidences(drafter, self.options)
        self.width = max(self.verify_tokens, 0 if lookup is None else lookup.width)  # most drafts verified in a round
        given = self.options.backtracking
        needed = (block if self.options.commit_to_cap else self.width) + 1
        if given is not None and given < needed:
            raise DsparkError(
                f"runner: expected backtracking >= {needed} (a round and its anchor), but got {given}. Raise "
                "DEEPINFER_MAX_BACKTRACKING_TOKENS."
            )
        self.backtracking = max(MIN_BACKTRACKING, needed) if given is None else given
        check_replay(target.config, self.options.truncation, self.options.keep_tokens, self.backtracking, self.taps)

    def scheduler(self) -> Scheduler:
        """A run's policy, fresh but for the gate."""
        options = self.options
        # Under rejection a sample depends on its drafts: what other calls drafted must not show in it.
        gate = Gate() if options.verifier == "rejection" else self.gate
        return Scheduler(options.policy, self.width, options.threshold, options.curve, gate)

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
        needs = [_rows(request) for request in requests]
        run = Run(self, sum(needs), max(needs, default=0), len(requests))
        run.submit(requests)
        return run

    def open(self) -> Run:
        """A run for requests that come while others are running (Run.submit), over all of kv_tokens. The weights are
        those of now: a policy in training opens another run after an update."""
        rows = self.options.kv_tokens
        return Run(self, rows, min(rows, self.target.config.max_position_embeddings), self.options.max_batch)

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

    def check(self, requests: list[Request]) -> None:
        """Raises DsparkError for requests that the runner cannot finish."""
        longest, rows = self.target.config.max_position_embeddings, self.options.kv_tokens
        if self.lookup is not None and self.lookup.largest >= self.target.vocab_size:
            raise DsparkError(
                f"lookup: expected token ids from 0 to {self.target.vocab_size - 1} (the target's vocabulary), but it "
                f"remembers {self.lookup.largest}. Make a Lookup for each tokenizer."
            )
        for i, request in enumerate(requests):
            need = _rows(request)
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


def _rows(request: Request) -> int:
    """Arena rows it may need."""
    return len(request.prompt_ids) + request.params.max_tokens


def _seeded(request: Request) -> Request:
    """A request without a seed gets one of its own, from the system: two of them are not the same sample twice."""
    if request.params.seq_seed is not None:
        return request
    return replace(request, params=request.params.with_seed(secrets.randbits(63)))


def _refuse_lookup(options: EngineOptions) -> None:
    if options.verifier == "rejection":
        raise DsparkError(
            "runner: lookup expects the coupled or the greedy verifier, but got rejection: its drafts come from other "
            "requests, and under rejection what a request becomes depends on its drafts, so it would depend on its "
            "company. Leave out the lookup, or use the coupled verifier."
        )
    if options.commit_to_cap:
        raise DsparkError(
            "runner: commit_to_cap collects the rounds of a draft model, but a lookup would take some of them away. "
            "Leave out one of the two."
        )


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
    """The state of one generate call, or of a runner that requests come to: waiting and running sequences, and the
    arenas their rows live in.

    rows: all that the requests may need (kv_tokens at most are made); longest: what one may need; most: requests that
    may be in flight. drafting_seconds: of the last round, what drafting took.
    """

    def __init__(self, engine: Engine, rows: int, longest: int, most: int):
        engine.target.refresh()
        self.engine, self.target, self.options, self.taps = engine, engine.target, engine.options, engine.taps
        capacity = max(1, min(rows, self.options.kv_tokens))
        self.largest = min(capacity, longest)  # rows of one request
        config = self.target.config
        rings = min(self.options.max_batch, most)
        self.cache = KVCache(
            config.cached_windows, capacity, config.num_kv_heads, config.head_dim, self.target.dtype,
            rings, engine.backtracking, longest,
        )  # fmt: skip
        self.rings = list(range(rings))  # free ones, of a cache that has them
        self.arena = Arena(capacity)
        self.submitted = 0
        self.waiting: deque[tuple[int, Request]] = deque()
        self.running: list[Sequence] = []
        self.kept: list[Sequence] = []  # finished, oldest first; their rows stay until the room is needed
        self.prefixes = PrefixCount()
        self.drafting = self._draft_stage(capacity)
        lookup = engine.lookup
        self.mixed = None if lookup is None else MixedStage(lookup, self.drafting, self.options.curve)
        self.scheduler: Lengths = engine.scheduler()
        self.drafting_seconds = 0.0

    def _draft_stage(self, capacity: int) -> DraftStage | None:
        drafter, options = self.engine.drafter, self.options
        if drafter is None or self.engine.verify_tokens == 0:
            return None
        width = drafter.config.num_predictions if options.commit_to_cap else self.engine.verify_tokens
        return DraftStage(drafter, capacity, options.verifier, width)

    def submit(self, requests: list[Request]) -> list[int]:
        """Puts requests behind those that wait; the indices that their sequences will have. Raises DsparkError, before
        anything of them is taken, for one that the runner cannot finish."""
        self.engine.check(requests)
        for i, request in enumerate(requests):
            if _rows(request) > self.largest:
                raise DsparkError(
                    f"request {i}: expected prompt + max_tokens <= {self.largest} (the room of this run, made for "
                    f"what it began with), but got {_rows(request)}. Use a run of Engine.open()."
                )
        indices = list(range(self.submitted, self.submitted + len(requests)))
        self.waiting.extend(zip(indices, map(_seeded, requests), strict=True))
        self.submitted += len(requests)
        return indices

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def round(self) -> list[Sequence]:
        """One target pass: draft, schedule, verify, commit. Returns the sequences that finished in it; none
        where there is nothing to do."""
        self._admit()
        self.drafting_seconds = 0.0
        if not self.running:
            return []
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
            base = self._room(_rows(request))
            if base is None:
                return
            self.waiting.popleft()
            ring = self.rings.pop() if self.cache.entries else 0
            self.running.append(Sequence(index, request, base, ring))
            self.prefixes.prompt_tokens += len(request.prompt_ids)

    def _room(self, rows: int) -> int | None:
        """A free region; finished sequences give theirs up for it, the oldest first."""
        while True:
            base = self.arena.alloc(rows) if self.rings or not self.cache.entries else None
            if base is not None or not self.kept:
                return base
            oldest = self.kept.pop(0)
            self.arena.free(oldest.base)
            if self.drafting:
                self.drafting.forget(oldest.base)
            if self.cache.entries:
                self.rings.append(oldest.ring)

    def _draft(self, decoding: list[Sequence]) -> Drafts:
        """One entry per decoding sequence; an empty prediction where no draft can be used."""
        asked = bool(self.drafting and decoding) and (
            self.options.commit_to_cap or self.scheduler.drafts(len(decoding))
        )
        if not decoding or not (asked or self.mixed):
            return Drafts([MTPPredictInfo((), None)] * len(decoding), None)
        sampling = SamplingRows.of([s.request.params for s in decoding])
        if self.mixed:
            drafts = self.mixed.propose(decoding, sampling, asked)
        else:
            assert self.drafting is not None, "or nobody was asked"
            drafts = self.drafting.propose(decoding, sampling)
        useful = [
            cut(p, schedule.draft_limit(len(p.token_ids), s.remaining))
            for p, s in zip(drafts.predictions, decoding, strict=True)
        ]
        return replace(drafts, predictions=useful)

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
            self.drafting.copy(source.donor.base, sequence.base, source.ready)
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
        laws = drafts.laws(lengths, self.target.config.vocab_size)
        verdicts = verify(self.options.verifier, probs, sampling, positions, verified, laws)
        kept = emit(sequences, verdicts, caps + [0] * len(ready), logits, probs)
        record(batch.decoding, drafts.predictions, lengths, verdicts, kept)
        return kept[: len(batch.decoding)]

    def _retire(self) -> list[Sequence]:
        finished = [s for s in self.running if s.finish_reason]
        if self.mixed:
            self.mixed.retire(finished)
        self.kept += finished
        self.running = [s for s in self.running if not s.finish_reason]
        return finished
