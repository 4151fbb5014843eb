"""Bounded replay: a prompt's early tokens may skip the consumer layers of a decoder-decoder target.

Only the last token's output is asked of a prompt, and the shared keys and values come from the first layers alone. What
the consumers still need of earlier tokens is their own sliding window. So they may be run over a bounded suffix:
    off      every token goes through every layer
    compact  tokens before the last `keep` of the prompt stop after the first layers
    mask     they go on, but no token looks at consumer keys from before the cut: the same values for the suffix, for
             whoever wants to compare, and nothing saved
The suffix's first tokens see less of their window than they would have, and pass on what they see: an approximation
(docs/scheduling.md says by how much). A consumer layer looks back window - 1 tokens, so n of them look back
n (window - 1): a longer suffix is exact, for nothing that the last token or any later one sees was cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dspark.contracts import DsparkError
from dspark.settings import TruncationMode
from dspark.target.families import DecoderConfig
from dspark.target.rings import Span


@dataclass(frozen=True, slots=True)
class Replay:
    """One pass. rows [M]: of its rows, those that go through the consumers; floor [M]: the first arena row that the
    consumers' own windows may see from each; spans: the same rows sequence by sequence."""

    rows: Tensor
    floor: Tensor
    spans: Sequence[Span]


def check_replay(
    config: DecoderConfig, mode: TruncationMode, keep: int, backtracking: int, taps: Sequence[int]
) -> None:
    """Raises DsparkError for a target without consumers, a suffix that is too short, and a draft model that reads
    consumer layers, whose early values are not computed."""
    if mode == "off":
        return
    first = config.num_layers - config.consumers
    if not config.consumers:
        raise DsparkError(
            f"bounded replay: expected a decoder-decoder target (YocoForCausalLM) with mode {mode}, but got "
            f"{config.architecture}. Leave prompts whole: truncation off (DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE)."
        )
    least = max(config.windows[first:]) + backtracking
    if keep < least:
        raise DsparkError(
            f"bounded replay: expected keep >= {least} (the consumers' window and the backtracking), but got {keep}. "
            "Raise keep_tokens (DEEPINFER_YOCO_PREFILL_KEEP_TOKENS)."
        )
    late = [tap for tap in taps if tap >= first]
    if late:
        raise DsparkError(
            f"bounded replay: expected a draft model that reads layers below {first}, but it reads {late}, which early "
            "tokens of a prompt do not reach. Use mode off."
        )


def replay_of(
    spans: Sequence[Span], begins: Sequence[int], prompts: Sequence[int], mode: TruncationMode, keep: int
) -> Replay | None:
    """The pass of these spans; begins: each sequence's first arena row, prompts: the length of its prompt; mode:
    compact or mask. None where no prompt in the pass is cut, whatever chunk of it this is: the first tokens of a suffix
    may come in any."""
    cuts = [max(0, length - keep) for length in prompts]
    if not any(s.prompt and cut for s, cut in zip(spans, cuts, strict=True)):
        return None  # behind its prompt a sequence sees nothing from before its cut: keep covers the window
    rows: list[int] = []
    floor: list[int] = []
    kept: list[Span] = []
    first = 0
    for span, base, cut in zip(spans, begins, cuts, strict=True):
        skip = min(max(0, cut - span.start), span.count) if mode == "compact" else 0
        rows += range(first + skip, first + span.count)
        floor += [base + min(cut, p) for p in range(span.start + skip, span.start + span.count)]
        kept += (
            [replace(span, start=span.start + skip, count=span.count - skip, floor=cut)] if span.count > skip else []
        )
        first += span.count
    return Replay(torch.tensor(rows, dtype=torch.int64), torch.tensor(floor, dtype=torch.int64), kept)
