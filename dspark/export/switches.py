"""What a recipe and the DEEPINFER_* switches say together about serving a draft model. A setting given twice with
different values is an error that names both."""

from __future__ import annotations

from typing import Any, cast

from dspark.contracts import DsparkError, VerifierName
from dspark.export.bundle import Bundle, check_gamma
from dspark.runner import EngineOptions
from dspark.runner.schedule import Policy
from dspark.settings import Settings, TruncationMode
from dspark.slot_maps import of_temperatures


def serving_options(
    bundle: Bundle | None, verifier: str, gamma: int | None, max_batch: int, **more: Any
) -> EngineOptions:
    """Of a runner over this draft model, or none. more: of EngineOptions, as a recipe gives them. Raises DsparkError
    when gamma exceeds the trained block, and on any contradiction."""
    settings = Settings.from_env()
    if "max_backtracking_tokens" in settings.origins:
        more["backtracking"] = settings.max_backtracking_tokens
    more["truncation"], more["keep_tokens"] = resolve_truncation(more.get("truncation", ""), more.get("keep_tokens", 0))
    width = resolve_gamma(gamma, bundle) if bundle else None
    return EngineOptions(cast(VerifierName, verifier), max_batch=max_batch, verify_tokens=width, **more)


def resolve_gamma(gamma: int | None, bundle: Bundle | None) -> int | None:
    """Drafts verified per round, from the recipe and DEEPINFER_USE_NEXTN_DECODE; both with different values: an
    error."""
    settings = Settings.from_env().merge({"use_nextn_decode": gamma or None}, "the recipe (gamma)")
    if gamma is None and "use_nextn_decode" in settings.origins:
        gamma = settings.use_nextn_decode
    if gamma is not None and bundle is not None:
        check_gamma(bundle, gamma)
    return gamma


def resolve_policy(policy: str, verifier: str) -> Policy:
    """How many drafts are verified, from the recipe and DEEPINFER_ENABLE_MTP_VARLEN; both, and against each other: an
    error. Without a word of either the length is fixed."""
    varlen = policy != "fixed" if policy else None
    settings = Settings.from_env().merge({"enable_mtp_varlen": varlen}, f"the recipe (policy {policy})")
    if policy or not settings.enable_mtp_varlen:
        return cast(Policy, policy or "fixed")
    if verifier == "rejection":
        raise DsparkError(
            f"{settings.origins['enable_mtp_varlen']}: expected a policy with the rejection verifier, under which only "
            "threshold keeps a trajectory independent of its batch. Give --policy threshold --threshold 0.3, or the "
            "coupled verifier."
        )
    return "global"


def resolve_truncation(mode: str, keep: int) -> tuple[TruncationMode, int]:
    """How prompts are cut and what is kept of them, from the recipe and DEEPINFER_YOCO_PREFILL_*; both with different
    values: an error."""
    given = {"yoco_prefill_truncation_mode": mode, "yoco_prefill_keep_tokens": keep} if mode else {}
    settings = Settings.from_env().merge(given, "the recipe (truncation, keep_tokens)")
    return settings.yoco_prefill_truncation_mode, settings.yoco_prefill_keep_tokens


def apply_temperature_switch(bundle: Bundle) -> None:
    """DEEPINFER_DFLASH_CONFIDENCE_HEAD_TEMPERATURE, where it is set. Raises DsparkError beside a calibration that says
    otherwise, and without a confidence head."""
    settings = Settings.from_env()
    name = "dflash_confidence_head_temperature"
    if name not in settings.origins:
        return
    head, values = bundle.drafter.confidence_head, settings.dflash_confidence_head_temperature
    if head is None:
        raise DsparkError(
            f"{settings.origins[name]}: expected a draft model with a confidence head, but this one has none. Unset it."
        )
    if len(values) not in (1, head.num_steps):
        raise DsparkError(
            f"{settings.origins[name]}: expected one number, or {head.num_steps} of them, one per slot, but got "
            f"{len(values)}."
        )
    maps = of_temperatures(values * head.num_steps if len(values) == 1 else values)
    if bundle.calibration is not None and maps != head.maps:
        told = "; ".join(one.told() for one in head.maps)
        raise DsparkError(
            f"settings: expected one value for the confidence temperatures, but got {list(values)} from "
            f"{settings.origins[name]} and another from the bundle's calibration ({told}). Remove one of them."
        )
    head.set_maps(maps)
