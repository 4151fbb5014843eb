"""A rollout's settings once models are known: what is open is filled in, what nothing would read is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dspark.contracts import DsparkError
from dspark.export.bundle import Bundle
from dspark.export.switches import resolve_gamma, resolve_policy, resolve_truncation
from dspark.rollouts.config import RolloutConfig
from dspark.runner.schedule import NEEDS_CURVE
from dspark.target.decoder import Target


def settled(config: RolloutConfig, bundle: Bundle | None) -> RolloutConfig:
    """With policy, gamma and truncation as the recipe and the DEEPINFER_* switches say together: so that a manifest
    holds them. Raises DsparkError for a setting that contradicts another, or that nothing would read."""
    truncation, keep = resolve_truncation(config.truncation, config.keep_tokens)
    return replace(
        config, policy=_policy(config, bundle), gamma=_gamma(config, bundle), truncation=truncation, keep_tokens=keep
    )


def longest_prompt(config: RolloutConfig, target: Target, kv_tokens: int) -> int:
    """Tokens of the longest prompt that fits with its answer. Raises DsparkError when none does, and for stop ids that
    the vocabulary lacks."""
    longest = min(target.config.max_position_embeddings, kv_tokens) - config.max_tokens
    outside = [i for i in config.stop_ids or () if not 0 <= i < target.vocab_size]
    if longest < 1 or outside:
        raise DsparkError(
            f"rollout: expected max_tokens below the context of {longest + config.max_tokens} and stop_ids in the "
            f"vocabulary of {target.vocab_size}, but got {config.max_tokens} and {outside}."
        )
    return longest


def quarantine_path(out: str) -> Path:
    """Where the broken rows of a run's prompt file go: beside its folder, which holds only what the manifest names."""
    return Path(out.rstrip("/") + ".quarantine.jsonl")


def _policy(config: RolloutConfig, bundle: Bundle | None) -> str:
    if bundle is None and not config.lookup:
        for name in ("policy", "curve", "commit_to_cap"):
            if value := getattr(config, name):
                raise DsparkError(
                    f"{name}: expected a draft model with it, but got {name} {value} and none. Give --drafter."
                )
        return ""
    # DEEPINFER_ENABLE_MTP_VARLEN is a draft model's (load() says so where there is none).
    policy = resolve_policy(config.policy, config.verifier) if bundle else config.policy or "fixed"
    if config.curve and policy not in NEEDS_CURVE:
        raise DsparkError(
            f"curve: expected policy {', '.join(NEEDS_CURVE)} with it, but got {policy}. Give --policy global."
        )
    return policy


def _gamma(config: RolloutConfig, bundle: Bundle | None) -> int | None:
    """Drafts verified per round, as a number where there is a draft model: what replay needs to know."""
    if bundle is None and config.gamma is not None:
        raise DsparkError(
            f"gamma: expected a draft model with it, but got gamma {config.gamma} and none. Give --drafter."
        )
    if bundle is None:
        return None
    return resolve_gamma(config.gamma, bundle) or bundle.config.num_predictions
