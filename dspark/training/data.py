"""Lightning data modules: whole sequences for the draft model, observed rounds for the confidence head.

Splits are directories, never a ratio: the corpus is split by prompt before anything is sampled. No workers and no
padding: a batch is a few concatenations, and its order and anchors are keyed (batches.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor

from dspark.calibration.events import ALL
from dspark.contracts import DsparkError, Round
from dspark.target.load import load_tokenizer
from dspark.training.batches import BatchPlan, BatchStream, RoundBatch, SequenceBatch, TrainStream, generator, pack
from dspark.training.labels import anchor_candidates
from dspark.training.sources import Sample, drafted_by, drafted_ids, read_samples, refuse_foreign

NOTHING_TO_PREDICT = (
    "predict: expected observed rounds, which recipes/confidence.yaml reads, but this recipe trains the draft model. "
    "For its proposals use `dspark rollout`."
)
Collate = Callable[[int, list[int]], SequenceBatch]


def draw_anchors(sample: Sample, count: int, seed: int, epoch: int) -> Tensor:
    """Anchor positions [A] int64, ascending: all candidates when `count` is 0, else up to `count` without replacement,
    a function of (seed, epoch, sample id) alone."""
    candidates = anchor_candidates(sample.loss_mask)
    if count == 0 or len(candidates) <= count:
        return candidates
    chosen = torch.randperm(len(candidates), generator=generator("anchors", seed, epoch, sample.sample_id))[:count]
    return candidates[chosen.sort().values]


def sequence_batch(samples: Sequence[Sample], anchors: Sequence[Tensor]) -> SequenceBatch:
    """Pack R samples with their anchors [A_r]; none at all gives the empty batch."""
    ids, offsets = pack([s.ids for s in samples])
    mask = torch.cat([torch.zeros(0, dtype=torch.bool), *(s.loss_mask for s in samples)])
    positions, starts = pack(anchors)
    sequence = torch.arange(len(samples)).repeat_interleave(starts.diff())
    names, domains = tuple(s.sample_id for s in samples), tuple(s.domain for s in samples)
    return SequenceBatch(ids, offsets, mask, sequence, positions, names, domains)


def round_batch(samples: Sequence[Sample], slots: int) -> RoundBatch:
    """Pack R samples and their untruncated rounds, `slots` wide (slots a round did not draft are not verified)."""
    rounds = [uncensored(s) for s in samples]
    flat = [r for group in rounds for r in group]
    base = sequence_batch(samples, [torch.tensor([r.anchor for r in g], dtype=torch.int64) for g in rounds])
    drafted = torch.zeros(len(flat), slots, dtype=torch.int64)
    for row, r in enumerate(flat):
        drafted[row, : len(r.drafted)] = torch.tensor(r.drafted[:slots], dtype=torch.int64)
    counts = torch.tensor([(r.accepted, r.verified) for r in flat], dtype=torch.int64).reshape(-1, 2)
    names = tuple(s.prompt_id for s, group in zip(samples, rounds, strict=True) for _ in group)
    fields = {name: getattr(base, name) for name in SequenceBatch.__slots__}
    return RoundBatch(**fields, drafted=drafted, accepted=counts[:, 0], verified=counts[:, 1], conversations=names)


def uncensored(sample: Sample) -> list[Round]:
    """A sample's rounds whose labels are not censored: something drafted and all of it verified."""
    return [r for r in sample.rounds if r.drafted and r.verified == len(r.drafted)]


class _SplitDataModule(LightningDataModule):
    """What both data modules share: split directories, token-budget batches, ranks."""

    _with_rounds = False

    def __init__(self, train: list[str], val: list[str], test: list[str], predict: list[str], token_budget: int,
                 seed: int, tokenizer: str | None):  # fmt: skip
        super().__init__()
        self.paths = {"train": train, "val": val, "test": test, "predict": predict}
        self.token_budget, self.seed = token_budget, seed
        self.tokenizer_source = tokenizer
        self._samples: dict[str, list[Sample]] = {}

    def samples(self, split: str) -> list[Sample]:
        """The usable samples of one split, read once. Raises DsparkError when the split has no path."""
        if split not in self._samples:
            if not self.paths[split]:
                raise DsparkError(
                    f"data: expected at least one path in data.{split}, but got none. Give "
                    f"--data.init_args.{split}='[FOLDER]'."
                )
            tokenizer = load_tokenizer(self.tokenizer_source) if self.tokenizer_source else None
            read = read_samples(self.paths[split], tokenizer, self._with_rounds, self._quarantine(split))
            if self.trainer is None or self.trainer.is_global_zero:
                for reason, count in read.dropped.items():
                    print(f"data.{split}: left out {count} rows: {reason}", file=sys.stderr)
            self._samples[split] = self._usable(split, read.samples)
        return self._samples[split]

    def refuse_foreign(self, split: str, vocab_size: int, longest: int) -> None:
        """Raises DsparkError when a sample of the split, or what was drafted in it, is not a target's with
        `vocab_size` ids and `longest` positions."""
        for sample in self.samples(split) if self.paths[split] else ():
            refuse_foreign(sample.sample_id, sample.ids, vocab_size, longest)
            refuse_foreign(f"{sample.sample_id} (drafted)", drafted_ids(sample), vocab_size, sys.maxsize)

    def _quarantine(self, split: str) -> Path | None:
        """Where the broken rows of a conversations file go: into the run's own folder, by the first rank."""
        trainer = self.trainer
        if trainer is None or not trainer.is_global_zero:
            return None
        return Path(trainer.default_root_dir) / "quarantine" / split

    def _usable(self, split: str, samples: list[Sample]) -> list[Sample]:
        return samples

    def _collate(self, samples: list[Sample], train: bool) -> Collate:
        raise NotImplementedError

    def _stream(self, split: str, train: bool) -> BatchStream:
        samples = self.samples(split)
        trainer = self.trainer
        rank, world = (trainer.global_rank, trainer.world_size) if trainer is not None else (0, 1)
        sizes = [len(s.ids) for s in samples]
        plan = BatchPlan(sizes, self.token_budget, self.seed, shuffle=train, rank=rank, world_size=world)
        return (TrainStream if train else BatchStream)(plan, self._collate(samples, train))

    def train_dataloader(self) -> BatchStream:
        return self._stream("train", train=True)

    def val_dataloader(self) -> BatchStream | list[BatchStream]:
        return self._stream("val", train=False) if self.paths["val"] else []

    def test_dataloader(self) -> BatchStream:
        return self._stream("test", train=False)

    def predict_dataloader(self) -> BatchStream:
        return self._stream("predict", train=False)


class TrajectoryDataModule(_SplitDataModule):
    """Sequences to train the draft model on: prompt + response, loss on the response.

    Args:
        train: trajectory directories, or JSONL files of {"messages": [...]} (these need `tokenizer`).
        val: the same, for validation; empty switches validation off.
        test: the same, for analytic estimates in `lightning test` beside its rollouts (model.init_args.test).
        token_budget: tokens a batch aims at, prompts included; whole sequences, so a batch may be somewhat larger.
        anchors_per_sequence: blocks drawn per sequence and epoch; 0 takes every candidate position.
        seed: keys the order of the batches and the anchors.
        tokenizer: where the tokenizer of a conversations file comes from (a target source).
        train_prompts: learn from the answers to the first so many prompts only; 0 takes all. The others are for the
            confidence head: more of a draft is accepted on what the draft model has learned by heart.
    """

    def __init__(
        self,
        train: list[str],
        val: list[str] | None = None,
        test: list[str] | None = None,
        token_budget: int = 1024,
        anchors_per_sequence: int = 0,
        seed: int = 0,
        tokenizer: str | None = None,
        train_prompts: int = 0,
    ):
        super().__init__(train, val or [], test or [], [], token_budget, seed, tokenizer)
        if anchors_per_sequence < 0 or train_prompts < 0:
            raise DsparkError(
                f"data: expected anchors_per_sequence >= 0 and train_prompts >= 0, but got {anchors_per_sequence} and "
                f"{train_prompts}."
            )
        self.anchors_per_sequence, self.train_prompts = anchors_per_sequence, train_prompts

    def _usable(self, split: str, samples: list[Sample]) -> list[Sample]:
        if split != "train" or not self.train_prompts:
            return samples
        first = set(list(dict.fromkeys(s.prompt_id for s in samples))[: self.train_prompts])
        return [s for s in samples if s.prompt_id in first]

    def _collate(self, samples: list[Sample], train: bool) -> Collate:
        def collate(epoch: int, group: list[int]) -> SequenceBatch:
            chosen = [samples[i] for i in group]
            return sequence_batch(
                chosen, [draw_anchors(s, self.anchors_per_sequence, self.seed, epoch if train else 0) for s in chosen]
            )

        return collate

    def test_dataloader(self) -> BatchStream:
        """The test sequences; without any a single empty batch, for rollouts need none."""
        if self.paths["test"]:
            return super().test_dataloader()
        return BatchStream(BatchPlan([], self.token_budget, shuffle=False), self._collate([], train=False))

    def predict_dataloader(self) -> BatchStream:
        """Raises DsparkError: there is nothing to predict from whole sequences."""
        raise DsparkError(NOTHING_TO_PREDICT)

    def response_counts(self, vocab_size: int) -> Tensor:
        """How often each id is a supervised token of the train split: [vocab_size] int64."""
        for sample in (samples := self.samples("train")):
            refuse_foreign(sample.sample_id, sample.ids, vocab_size, len(sample.ids))
        supervised = torch.cat([s.ids[s.loss_mask] for s in samples])
        return supervised.bincount(minlength=vocab_size)

    def stop_ids(self) -> list[int]:
        """Ids that end a response in the train split, ascending."""
        return sorted({i for s in self.samples("train") for i in s.stop_ids})

    def train_sequences(self) -> list[Tensor]:
        """The train split's ids [S], for counting bigrams."""
        return [s.ids for s in self.samples("train")]


def _refuse_twice(samples: list[Sample]) -> None:
    """The same rounds twice would count as twice the evidence. One name with other tokens is another seed's."""
    seen: set[tuple[str, bytes]] = set()
    for sample in samples:
        key = (sample.sample_id, sample.ids.numpy().tobytes())
        if key in seen:
            raise DsparkError(
                f"data: expected every trajectory once, but {sample.sample_id} occurs twice. Give each folder once, "
                "and no copies."
            )
        seen.add(key)
    if any(sample.domain == ALL for sample in samples):
        raise DsparkError(f"data: expected any domain but {ALL!r}, which stands for all. Rename it in the prompts.")


class RoundsDataModule(_SplitDataModule):
    """Observed draft-verify rounds to train, test and calibrate the confidence head on; untruncated rounds only.

    Args:
        train: trajectory directories with rounds shards (`dspark rollout` with a draft model).
        val: the same, for validation; empty switches validation off.
        test: the same, for `lightning test`.
        predict: the same, for `lightning predict`.
        token_budget: tokens a batch aims at, prompts included.
        seed: keys the order of the batches.
    """

    _with_rounds = True

    def __init__(
        self,
        train: list[str] | None = None,
        val: list[str] | None = None,
        test: list[str] | None = None,
        predict: list[str] | None = None,
        token_budget: int = 2048,
        seed: int = 0,
    ):
        super().__init__(train or [], val or [], test or [], predict or [], token_budget, seed, None)

    def refuse_other_drafts(self, split: str, layers: str, source: str) -> None:
        """Raises DsparkError for rounds that another draft model has drafted. layers: of this one, layers_hash."""
        for path in self.paths[split]:
            if (found := drafted_by(path)) not in (None, layers):
                raise DsparkError(
                    f"{path}: expected rounds that {source} has drafted ({layers[:12]}), but got another draft model's "
                    f"({str(found)[:12]}): what became of its drafts says nothing about this one's. Roll out with "
                    "this one."
                )

    def _usable(self, split: str, samples: list[Sample]) -> list[Sample]:
        _refuse_twice(samples)
        kept = [s for s in samples if uncensored(s)]
        if not kept:
            raise DsparkError(
                "data: expected untruncated rounds (all drafted tokens verified), but got none. "
                "Collect the rollouts with a draft model and without variable verification length."
            )
        return kept

    def _collate(self, samples: list[Sample], train: bool) -> Collate:
        slots = max(len(r.drafted) for s in samples for r in uncensored(s))
        return lambda epoch, group: round_batch([samples[i] for i in group], slots)
