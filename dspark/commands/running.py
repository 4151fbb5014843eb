"""What the verbs that run the runner share: loading its parts by the settings, and the facts a manifest records."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from dspark import ops
from dspark.contracts import Round
from dspark.export.bundle import Bundle, check_target, load_bundle
from dspark.export.switches import apply_temperature_switch, serving_options
from dspark.rollouts.facts import calibration_hash, tokenizer_hash
from dspark.rollouts.manifest import run_facts
from dspark.rollouts.store import read_rounds
from dspark.runner import Engine
from dspark.runner.curve import CapacityCurve
from dspark.runner.lookup import Lookup
from dspark.settings import Settings
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
        return tokenizer_hash(self.tokenizer)

    def engine(
        self, verifier: str, gamma: int | None, max_batch: int = 32, lookup: Lookup | None = None, **more: Any
    ) -> Engine:
        """A runner over these models. gamma: most drafts verified per round (None: DEEPINFER_USE_NEXTN_DECODE when it
        is set, else the trained block). lookup: a second drafter. more: of EngineOptions. Raises DsparkError when gamma
        exceeds the trained block."""
        options = serving_options(self.bundle, verifier, gamma, max_batch, **more)
        return Engine(self.target, self.bundle.drafter if self.bundle else None, options, lookup)

    def facts(self, verifier: str) -> dict[str, Any]:
        """What a rollout manifest records of these models and this machine."""
        bundle = self.bundle
        return run_facts(
            target=self.target.fingerprint,
            drafter=bundle.hash if bundle else None,
            calibration=calibration_hash(bundle.drafter.confidence_head, bundle.calibration) if bundle else None,
            draft_layers=bundle.layers if bundle else None,
            tokenizer=self.tokenizer_hash,
            verifier=verifier,
            dtype=self.dtype,
            device="cpu",
            kernels=ops.fingerprint(),  # claimed only for weights whose self-test passed: load() runs it
            threads=torch.get_num_threads(),
        )


def load(source: str, dtype: str, drafter: str | Path = "") -> Loaded:
    """Raises DsparkError: a source that is not there, a draft model that was trained for another target, or operations
    that fail their self-test at this target's shapes."""
    target = load_target(source, dtype)
    assert target.self_tested
    bundle = None
    if not drafter:
        _tell_idle_switches(Settings.from_env())
    else:
        bundle = load_bundle(drafter)
        check_target(bundle, target)
        bundle.drafter.to(target.dtype).bind(target.embed_weight, target.head_weight).eval()
        apply_temperature_switch(bundle)
    gc.freeze()  # half a million objects of imports: each full collection, of which a lookup causes some, takes 0.2 s
    return Loaded(source, dtype, target, bundle)


def _tell_idle_switches(settings: Settings) -> None:
    """On stderr: switches of drafting, where there is no draft model."""
    idle = ("use_nextn_decode", "enable_mtp_varlen", "dflash_confidence_head_temperature")
    for name in idle:
        if name in settings.origins:
            print(f"note: {settings.origins[name]} has no effect, for there is no draft model.", file=sys.stderr)


def load_curve(path: str, loaded: Loaded) -> CapacityCurve | None:
    """The capacity curve of a file ("": none). One that was measured on something else is taken, and that is said on
    stderr: it makes schedules slower, never wrong. Raises DsparkError for a file that is none."""
    if not path:
        return None
    curve = CapacityCurve.load(path)
    here = {
        "machine": ops.fingerprint(), "target": loaded.target.fingerprint, "dtype": loaded.dtype,
        "drafter": loaded.bundle.hash if loaded.bundle else None,
    }  # fmt: skip
    other = [name for name, value in here.items() if name in curve.facts and curve.facts[name] != value]
    if other:
        told = f"note: {path} was measured with another {' and '.join(other)}"
        print(f"{told}: lengths may be chosen badly. Measure it again: dspark profile.", file=sys.stderr)
    return curve


def drafters_rounds(folder: str) -> dict[str, list[Round]]:
    """The rounds of a rollout folder that its draft model drafted, by trajectory; those that a lookup did are counted
    on stderr, for they say nothing about it. Raises DsparkError when the files are damaged or not there."""
    recorded = read_rounds(folder)
    own = {name: [r for r in rounds if r.source == "drafter"] for name, rounds in recorded.items()}
    if others := sum(len(rounds) - len(own[name]) for name, rounds in recorded.items()):
        print(f"note: {folder}: {others} rounds were passed over, for a lookup drafted them.", file=sys.stderr)
    return own


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
