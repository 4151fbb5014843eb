"""The settings of a rollout run, as written in recipes/rollout.yaml: plain fields, checked when made."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from dspark.contracts import DsparkError, SamplingParams
from dspark.rollouts.vllm_engine import is_raw
from dspark.runner.schedule import NEEDS_CURVE, POLICIES
from dspark.settings import TRUNCATIONS


@dataclass(frozen=True, slots=True)
class RolloutConfig:
    """What is sampled, how, and where it goes. Raises DsparkError for a value out of range.

    target, drafter, dtype: a target source, a bundle's folder ("" = no draft model), "bfloat16" or "float32".
    prompts, split: a prompt file or data set, and which of its splits ("" = all). skip: prompts passed over first;
    limit: the first so many after them (0 = all).
    samples_per_prompt: sequences per prompt, one group each. run_seed: all randomness comes from it, the prompt's id
    and the sample's index. stop_ids: token ids that end a sequence (None = the tokenizer's end of sequence).
    verifier: "greedy", "coupled" or "rejection". gamma: most drafts verified per round (None = the trained block).
    policy: how many of them are, of runner/schedule.py ("" = global where DEEPINFER_ENABLE_MTP_VARLEN is 1, else
    fixed); threshold: of the policy of that name; curve: the capacity curve the others weigh against (a file, ""=none).
    truncation, keep_tokens: bounded replay of prompts, off, compact or mask ("" = as the
    DEEPINFER_YOCO_PREFILL_* switches say, else off): an approximation, and a part of what is sampled.
    lookup: most drafts a round that are looked up in what was written before (runner/lookup.py), with a draft model or
    without one; 0 = none. It looks at other requests: not with the rejection verifier, nor beside commit_to_cap.
    commit_to_cap: verify the whole block but commit what the policy would have verified, for uncensored labels.
    batch_size: sequences in flight, of each worker. workers: processes that generate, on Ray if more than 1
    (workers.py). engine: "dspark", or "vllm" (vllm_engine.py); recompute: log-probabilities by our target, where
    another engine sampled. shard_size: trajectories per file, in whole groups. reward: "module:function",
    "path/to/file.py:function" or "" (see rewards.py). out: the folder to write.
    """

    target: str = "smollm2-135m-instruct"
    drafter: str = ""
    dtype: str = "bfloat16"
    prompts: str = "data/prompts/train.jsonl"
    split: str = ""
    skip: int = 0
    limit: int = 0
    samples_per_prompt: int = 1
    run_seed: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 128
    stop_ids: tuple[int, ...] | None = None
    verifier: str = "coupled"
    gamma: int | None = None
    policy: str = ""
    threshold: float = 0.0
    curve: str = ""
    truncation: str = ""
    keep_tokens: int = 0
    lookup: int = 0
    commit_to_cap: bool = False
    batch_size: int = 32
    workers: int = 1
    engine: str = "dspark"
    recompute: bool = False
    shard_size: int = 256
    reward: str = ""
    out: str = "runs/rollouts"

    def __post_init__(self) -> None:
        _check_types(self)
        if self.stop_ids is not None:
            object.__setattr__(self, "stop_ids", tuple(self.stop_ids))
        checks = (
            ("skip", self.skip >= 0, ">= 0"),
            ("limit", self.limit >= 0, ">= 0 (0 = all prompts)"),
            ("samples_per_prompt", self.samples_per_prompt >= 1, ">= 1"),
            ("batch_size", self.batch_size >= 1, ">= 1"),
            ("workers", self.workers >= 1, ">= 1"),
            *_of_engine(self),
            ("shard_size", self.shard_size >= 1, ">= 1"),
            ("gamma", self.gamma is None or self.gamma >= 1, ">= 1, or null for the trained block"),
            ("out", self.out.strip() != "", "a folder's name"),
            ("verifier", self.verifier in ("greedy", "coupled", "rejection"), "greedy, coupled or rejection"),
            ("verifier", self.verifier != "greedy" or self.temperature == 0, "coupled or rejection at temperature > 0"),
            ("policy", self.policy in ("", *POLICIES), f"one of {', '.join(POLICIES)}, or empty"),
            (
                "policy",
                self.verifier != "rejection" or self.policy in ("", "fixed", "threshold"),
                "fixed or threshold "
                "with the rejection verifier: by any other a trajectory would depend on what else is in the batch",
            ),
            ("threshold", 0 <= self.threshold <= 1, "from 0 to 1"),
            ("threshold", (self.threshold > 0) == (self.policy == "threshold"), "> 0 with policy threshold, 0 without"),
            (
                "curve",
                not self.curve or self.policy in ("", *NEEDS_CURVE),
                f"with policy {', '.join(NEEDS_CURVE)} alone",
            ),
            ("truncation", self.truncation in ("", *TRUNCATIONS), "off, compact or mask, or empty"),
            ("keep_tokens", self.keep_tokens >= 0, ">= 0"),
            (
                "truncation",
                bool(self.keep_tokens) == (self.truncation in TRUNCATIONS[1:]),
                "compact or mask with keep_tokens > 0 (at least the consumers' window and the backtracking), neither "
                f"without the other (keep_tokens is {self.keep_tokens})",
            ),
            ("lookup", self.lookup >= 0, ">= 0 (0 = none)"),
            (
                "lookup",
                not self.lookup or self.verifier != "rejection",
                "0 with the rejection verifier: its drafts come from other requests, so a trajectory would depend on "
                "them",
            ),
            (
                "lookup",
                not self.lookup or not self.commit_to_cap,
                "0 with commit_to_cap, which collects the rounds of a draft model: it would take some of them away",
            ),
            ("run_seed", 0 <= self.run_seed < 2**63, "in [0, 2**63)"),
        )
        for name, ok, wanted in checks:
            if not ok:
                raise DsparkError(f"rollout config: expected {name} {wanted}, but got {getattr(self, name)!r}.")
        self.params(())  # its own checks

    def params(self, eos_ids: tuple[int, ...], seq_seed: int = 0) -> SamplingParams:
        """How one sequence is sampled; `eos_ids` stand in when stop_ids is None."""
        return SamplingParams(
            temperature=float(self.temperature),
            top_k=self.top_k,
            top_p=float(self.top_p),
            min_p=float(self.min_p),
            max_tokens=self.max_tokens,
            stop_ids=eos_ids if self.stop_ids is None else self.stop_ids,
            seq_seed=seq_seed,
        )

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "stop_ids": None if self.stop_ids is None else list(self.stop_ids)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "rollout config") -> RolloutConfig:
        """From a parsed recipe. Raises DsparkError naming an unknown key, with the nearest known one."""
        known = [f.name for f in fields(cls)]
        for key in values:
            if key not in known:
                close = difflib.get_close_matches(str(key), known, 1)
                hint = f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(known)}."
                raise DsparkError(f"{where}: expected known keys, but got {key!r}. {hint}")
        bare = {"truncation": "off"} if values.get("truncation") is False else {}  # YAML 1.1 reads a bare off so
        return cls(**{**values, **bare})


def _of_engine(config: RolloutConfig) -> tuple[tuple[str, bool, str], ...]:
    """What goes with which engine, as (field, whether it is so, what it should be)."""
    ours = config.engine == "dspark"
    return (
        ("engine", config.engine in ("dspark", "vllm"), "dspark or vllm"),
        ("workers", config.workers == 1 or ours, "1 with engine vllm, which shares out its work itself"),
        ("recompute", not config.recompute or not ours, "false with engine dspark: log-probabilities are ours already"),
        (
            "recompute",
            config.recompute or ours or is_raw(config.params(())),
            "true with engine vllm at any temperature but 1 and with top_p, top_k or min_p: it gives one kind of "
            "log-probability, and the target's own would be missing",
        ),
        ("truncation", config.truncation in ("", "off") or ours, "off with engine vllm, which reads prompts whole"),
        (
            "drafter",
            not config.drafter or ours,
            '"" with engine vllm: our draft models run in our runner (to serve one with vLLM, export it and name it in '
            "vLLM's own speculative_config: docs/formats.md)",
        ),
    )


_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (float, int),
    "bool": (bool,),
    "int | None": (int, type(None)),
    "tuple[int, ...] | None": (tuple, list, type(None)),
}


def _check_types(config: RolloutConfig) -> None:
    """YAML gives what it likes: 1e-3 is a string there, `yes` a truth value."""
    for f in fields(config):
        value, allowed = getattr(config, f.name), _TYPES[str(f.type)]
        ok = isinstance(value, allowed) and (bool in allowed or not isinstance(value, bool))
        if ok and isinstance(value, (tuple, list)):
            ok = all(isinstance(i, int) and not isinstance(i, bool) for i in value)
        if not ok:
            raise DsparkError(f"rollout config: expected {f.name} to be {f.type}, but got {value!r}.")
