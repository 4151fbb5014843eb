"""What bounded replay of a prompt costs in truth and saves in time, over how much of the prompt is kept.

Each prompt is prefilled whole and cut, in turn, with the caches of the runner; a prefill's time is that of the target's
pass alone. Then the whole one's greedy answer is decoded on top of either: the laws of its tokens are compared (KL in
nats, and the share of one's samples that the other accepts, sum of min), from the first token on. All rows compare the
same prompts. The row that keeps everything is the control: a second whole prefill, whose laws are the same bits.

A cut is exact from consumers * (window - 1) + 1 kept tokens on: each consumer layer's own window looks back window - 1
positions, and the shared keys and values are never cut.
Left out on purpose: prompts in chunks (a row's bits do not depend on them), and a draft model.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.bench.timed import in_turn
from dspark.target.cache import KVCache
from dspark.target.decoder import Target
from dspark.target.families import DecoderConfig
from dspark.target.replay import check_replay, replay_of
from dspark.target.rings import Span

REPEATS = 3


@dataclass(frozen=True, slots=True)
class Setting:
    """keeps: tokens of the suffix, a row each. backtracking: tokens that a pass may roll back. max_tokens: of the
    answers. repeats: of every prefill."""

    keeps: Sequence[int]
    backtracking: int
    max_tokens: int = 16
    repeats: int = REPEATS


@dataclass(frozen=True, slots=True)
class Kept:
    """keep: tokens of the suffix, None for all. kl: mean of KL(whole || cut) over all tokens of all answers, nats;
    worst: the largest. acceptance: mean share of samples of the cut law that a rejection verifier with the whole one
    accepts. exact: every law is the same to the last bit. seconds: median ratio of the cut prefill's time to the whole
    one's. prompts, tokens: how many prompts and laws are behind it."""

    keep: int | None
    kl: float
    worst: float
    acceptance: float
    exact: bool
    seconds: float
    prompts: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Compared:
    """One prompt, one keep. kl, acceptance [T] fp64: per token of the answer; exact: of its laws; seconds: per
    repeat."""

    kl: Tensor
    acceptance: Tensor
    exact: bool
    seconds: list[float]


def consumer_window(config: DecoderConfig) -> int:
    """The longest own window of the consumer layers."""
    return max(config.windows[config.num_layers - config.consumers :])


def least_keep(config: DecoderConfig, backtracking: int) -> int:
    """The shortest suffix that check_replay takes."""
    return consumer_window(config) + backtracking


def exact_keep(config: DecoderConfig) -> int:
    """Tokens from which a cut changes nothing."""
    return config.consumers * (consumer_window(config) - 1) + 1


def default_keeps(config: DecoderConfig, backtracking: int) -> list[int]:
    """From the least on, by doubling; and the one that is exact."""
    least = least_keep(config, backtracking)
    return sorted({*(least * n for n in (1, 2, 4, 8)), max(least, exact_keep(config))})


def joined(prompts: Sequence[Sequence[int]], longer_than: int, limit: int) -> list[list[int]]:
    """At most `limit` prompts of more than so many tokens each: one after the other is appended until it is enough."""
    found: list[list[int]] = [[]]
    for prompt in prompts:
        if len(found[-1]) > longer_than:
            found.append([])
        if len(found) > limit:
            break
        found[-1] += prompt
    return [ids for ids in found[:limit] if len(ids) > longer_than]


def bench_replay(
    target: Target, prompts: Sequence[Sequence[int]], setting: Setting, on_prompt: Callable[[], None] = lambda: None
) -> list[Kept]:
    """One row per keep, and the control. prompts: token ids, those not longer than the largest keep are left out; none
    longer: no rows. Raises DsparkError for a target without consumers and a keep that is too short."""
    check_replay(target.config, "compact", min(setting.keeps), setting.backtracking, ())
    found: dict[int | None, list[Compared]] = {keep: [] for keep in (*sorted(set(setting.keeps)), None)}
    with torch.inference_mode():
        for ids in prompts:
            if len(ids) > max(setting.keeps):
                for keep, one in _compare(target, ids, list(found), setting).items():
                    found[keep].append(one)
                on_prompt()
    return [_row(keep, some) for keep, some in found.items() if some]


def _compare(
    target: Target, ids: Sequence[int], keeps: Sequence[int | None], setting: Setting
) -> dict[int | None, Compared]:
    runs = {keep: _Prompt(target, ids, keep, setting) for keep in keeps}
    reference = _Prompt(target, ids, None, setting)
    for repeat in range(setting.repeats + 1):
        for run in in_turn([reference, *runs.values()], repeat):
            run.prefill()
    whole, answer = reference.answer()
    found = {}
    for keep, run in runs.items():
        cut = run.laws(answer)
        ratios = [a / b for a, b in zip(run.seconds[1:], reference.seconds[1:], strict=True)]  # the first is warm-up
        found[keep] = Compared(*_distance(whole, cut), torch.equal(whole, cut), ratios)
    return found


def _distance(whole: Tensor, cut: Tensor) -> tuple[Tensor, Tensor]:
    """(KL(whole || cut), sum of min), [T] each, of log-laws [T, V]."""
    kl = (whole.exp() * (whole - cut)).sum(-1).clamp_min(0)
    return kl, torch.minimum(whole, cut).exp().sum(-1)


class _Prompt:
    """A prompt, prefilled whole (keep None) or cut, and what is decoded behind it. seconds: of every prefill."""

    def __init__(self, target: Target, ids: Sequence[int], keep: int | None, setting: Setting):
        self.target, self.ids, self.keep, self.setting = target, torch.tensor(ids), keep, setting
        self.seconds: list[float] = []

    def prefill(self) -> None:
        """In one pass, into a fresh cache."""
        config, count = self.target.config, len(self.ids)
        need = count + self.setting.max_tokens
        self.cache = KVCache(
            config.cached_windows, need, config.num_kv_heads, config.head_dim, self.target.dtype,
            1, self.setting.backtracking, need,
        )  # fmt: skip
        begin = time.perf_counter()
        self.hidden = self._pass(self.ids, 0, prompt=True)[-1:]
        self.seconds.append(time.perf_counter() - begin)

    def answer(self) -> tuple[Tensor, Tensor]:
        """(log-laws [T, V] fp64, tokens [T]) of the greedy answer."""
        rows, tokens = [self._log_law(self.hidden)], []
        for position in range(self.setting.max_tokens):
            tokens.append(rows[-1][0].argmax().reshape(1))
            if position + 1 < self.setting.max_tokens:
                rows.append(self._log_law(self._pass(tokens[-1], len(self.ids) + position)))
        return torch.cat(rows), torch.cat(tokens)

    def laws(self, answer: Tensor) -> Tensor:
        """Log-laws [T, V] fp64 of the tokens of an answer [T], each behind those before it. So many at once as a round
        of the runner may verify."""
        rows, at = [self._log_law(self.hidden)], len(self.ids)
        for some in answer[:-1].split(self.setting.backtracking + 1):
            rows.append(self._log_law(self._pass(some, at)))
            at += len(some)
        return torch.cat(rows)

    def _pass(self, ids: Tensor, start: int, prompt: bool = False) -> Tensor:
        """[n, H] of the tokens at positions start ..."""
        rows = torch.arange(start, start + len(ids))
        spans = [Span(0, start, len(ids), prompt)]
        replay = replay_of(spans, [0], [len(self.ids)], "compact", self.keep) if self.keep else None
        begin = torch.zeros_like(rows)
        return self.target.forward(ids, rows, rows, begin, rows + 1, self.cache, (), spans, replay)[0]

    def _log_law(self, hidden: Tensor) -> Tensor:
        return self.target.logits(hidden).double().log_softmax(-1)


def _row(keep: int | None, some: Sequence[Compared]) -> Kept:
    kl, acceptance = (torch.cat([getattr(one, name) for one in some]) for name in ("kl", "acceptance"))
    seconds = statistics.median(ratio for one in some for ratio in one.seconds)
    exact = all(one.exact for one in some)
    return Kept(keep, float(kl.mean()), float(kl.max()), float(acceptance.mean()), exact, seconds, len(some), len(kl))


def as_lines(found: Sequence[Kept]) -> list[str]:
    """At most 80 columns."""
    lines = [f"{'keep':>6}{'KL, nats':>12}{'worst':>10}{'acceptance':>12}{'laws':>10}{'prefill time':>14}"]
    lines += [
        f"{one.keep or 'full':>6}{one.kl:>12.1e}{one.worst:>10.1e}{one.acceptance:>12.4f}"
        f"{'exact' if one.exact else 'differ':>10}{one.seconds:>13.2f}x"
        for one in found
    ]
    return [f"{found[0].prompts} prompts, {found[0].tokens} tokens of their answers", *lines]
