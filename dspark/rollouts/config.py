"""The settings of a rollout run, as written in recipes/rollout.yaml: plain fields, checked when made."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from dspark.contracts import DsparkError, SamplingParams


@dataclass(frozen=True, slots=True)
class RolloutConfig:
    """What is sampled, how, and where it goes. Raises DsparkError for a value out of range.

    target, drafter, dtype: a target source, a bundle's folder ("" = no draft model), "bfloat16" or "float32".
    prompts, split: a prompt file or data set, and which of its splits ("" = all). skip: prompts passed over first;
    limit: the first so many after them (0 = all).
    samples_per_prompt: sequences per prompt, one group each. run_seed: all randomness comes from it, the prompt's id
    and the sample's index. stop_ids: token ids that end a sequence (None = the tokenizer's end of sequence).
    verifier: "greedy", "coupled" or "rejection". gamma: drafts verified per round (None = the trained block).
    commit_to_cap: verify the whole block but commit at most gamma, for uncensored acceptance labels.
    batch_size: sequences in flight. shard_size: trajectories per file. reward: "module:function",
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
    commit_to_cap: bool = False
    batch_size: int = 32
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
            ("shard_size", self.shard_size >= 1, ">= 1"),
            ("gamma", self.gamma is None or self.gamma >= 1, ">= 1, or null for the trained block"),
            ("out", self.out.strip() != "", "a folder's name"),
            ("verifier", self.verifier in ("greedy", "coupled", "rejection"), "greedy, coupled or rejection"),
            ("verifier", self.verifier != "greedy" or self.temperature == 0, "coupled or rejection at temperature > 0"),
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
        return cls(**values)


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
