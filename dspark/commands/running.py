"""What the verbs that run the runner share: loading its parts by the settings, and the facts a manifest records."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from tqdm import tqdm

from dspark import ops
from dspark.contracts import DsparkError, VerifierName
from dspark.export.bundle import Bundle, check_gamma, check_target, load_bundle
from dspark.files import sha256_json
from dspark.rollouts.manifest import run_facts
from dspark.runner import Engine, EngineOptions
from dspark.settings import Settings
from dspark.slot_maps import SlotMap, of_temperatures
from dspark.target.decoder import Target
from dspark.target.load import load_target, load_tokenizer


@dataclass(frozen=True)
class Loaded:
    """A target, its tokenizer and (or not) a draft model made for it, in one dtype."""

    source: str
    dtype: str
    target: Target
    bundle: Bundle | None

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.source)

    @cached_property
    def tokenizer_hash(self) -> str:
        tokenizer = self.tokenizer
        return sha256_json([sorted(tokenizer.get_vocab().items()), tokenizer.chat_template or ""])

    def engine(self, verifier: str, gamma: int | None, max_batch: int = 32, commit_to_cap: bool = False) -> Engine:
        """A runner over these models. gamma: drafts verified per round (None: DEEPINFER_USE_NEXTN_DECODE when it is
        set, else the trained block). Raises DsparkError when it exceeds the trained block."""
        gamma = resolve_gamma(gamma, self.bundle)
        options = EngineOptions(
            cast(VerifierName, verifier), max_batch=max_batch, verify_tokens=gamma, commit_to_cap=commit_to_cap
        )
        return Engine(self.target, self.bundle.drafter if self.bundle else None, options)

    def facts(self, verifier: str) -> dict[str, Any]:
        """What a rollout manifest records of these models and this machine."""
        bundle = self.bundle
        return run_facts(
            target=self.target.fingerprint,
            drafter=bundle.hash if bundle else None,
            calibration=_calibration_hash(bundle),
            draft_layers=bundle.layers if bundle else None,
            tokenizer=self.tokenizer_hash,
            verifier=verifier,
            dtype=self.dtype,
            device="cpu",
            kernels=ops.fingerprint(),  # claimed only for weights whose self-test passed: load() runs it
            threads=torch.get_num_threads(),
        )


def _calibration_hash(bundle: Bundle | None) -> str | None:
    """Of the calibration and the maps in effect, which a switch may have set: they are in every round."""
    head = bundle.drafter.confidence_head if bundle else None
    if bundle is None or head is None:
        return None
    if all(one == SlotMap(one.temperature) for one in head.maps):  # as when there was nothing but temperatures
        return sha256_json({"calibration": bundle.calibration, "temperatures": [one.temperature for one in head.maps]})
    return sha256_json({"calibration": bundle.calibration, "maps": [one.to_dict() for one in head.maps]})


def load(source: str, dtype: str, drafter: str | Path = "") -> Loaded:
    """Raises DsparkError: a source that is not there, a draft model that was trained for another target, or operations
    that fail their self-test at this target's shapes."""
    refuse_unbuilt_switches(Settings.from_env())
    target = load_target(source, dtype)
    assert target.self_tested
    bundle = None
    if drafter:
        bundle = load_bundle(drafter)
        check_target(bundle, target)
        bundle.drafter.to(target.dtype).bind(target.embed_weight, target.head_weight).eval()
        _apply_temperature_switch(bundle)
    return Loaded(source, dtype, target, bundle)


def resolve_gamma(gamma: int | None, bundle: Bundle | None) -> int | None:
    """Drafts verified per round, from the recipe and DEEPINFER_USE_NEXTN_DECODE; both with different values: an
    error."""
    settings = Settings.from_env().merge({"use_nextn_decode": gamma or None}, "the recipe (gamma)")
    if gamma is None and "use_nextn_decode" in settings.origins:
        gamma = settings.use_nextn_decode
    if gamma is not None and bundle is not None:
        check_gamma(bundle, gamma)
    return gamma


def refuse_unbuilt_switches(settings: Settings) -> None:
    """A switch that asks for what this build does not do is refused, never ignored."""
    asked = {
        "DEEPINFER_ENABLE_MTP_VARLEN": settings.enable_mtp_varlen,
        "DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE": settings.yoco_prefill_truncation_mode != "off",
        "DEEPINFER_YOCO_PREFILL_KEEP_TOKENS": "yoco_prefill_keep_tokens" in settings.origins,
        "DEEPINFER_MAX_BACKTRACKING_TOKENS": "max_backtracking_tokens" in settings.origins,
    }
    for name, on in asked.items():
        if on:
            raise DsparkError(f"{name}: expected it unset, for this build does not do what it asks for yet. Unset it.")


def _apply_temperature_switch(bundle: Bundle) -> None:
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


@contextmanager
def progress(title: str, unit: str = "seq", quiet: bool = False) -> Iterator[Callable[[int, int, int], None]]:
    """A bar on stderr; call it with (done, total, tokens). It shows tokens/s beside the time left."""
    with tqdm(desc=title, unit=unit, disable=quiet, file=sys.stderr, dynamic_ncols=True, leave=False) as bar:
        start: list[int] = []

        def update(done: int, total: int, tokens: int) -> None:
            if not start:
                start.append(tokens)
            bar.total = total
            seconds = bar.format_dict["elapsed"]
            bar.set_postfix_str(f"{(tokens - start[0]) / seconds:.0f} tok/s" if seconds > 1 else "", refresh=False)
            bar.update(done - bar.n)

        yield update
