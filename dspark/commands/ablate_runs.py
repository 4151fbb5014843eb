"""The runs of an ablation: what each is made from, which are done already, and doing the others.

A variant's runs, each a `dspark fit` or `dspark test` with a record of its origins beside its result: for equal time a
few timed steps in turns, whose lower median counts (what disturbs a run only makes it slower); then the training; then
the test, whose origins include the checkpoint's bytes. A run whose record says the same, of a result that is still as
it was left, is not done again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.bench.ablation import TIMED_STEPS, AblationConfig, folder_of, steps_for
from dspark.bench.origins import Hashes, merged, origins
from dspark.commands.watching import duration, run_logged
from dspark.files import atomic_write, read_json
from dspark.recipe import read_recipe
from dspark.scorecard.report import REPORT_NAME

TIMINGS = ("timing-1", "timing-2")
WARM_UP = "warm-up"  # fills the cache of features, so that no variant pays for the others
CHECKPOINT, STEP_TIMES = "last.ckpt", "steps.json"
_SAYS = {"fit": "training", "test": "testing", WARM_UP: "warming up"}


@dataclass(frozen=True, slots=True)
class Job:
    """One run. kind: fit, test, warm-up or a timing. given: what it changes in the variant's recipe, by dotted key;
    result: the file it leaves."""

    kind: str
    name: str
    folder: Path
    given: dict[str, Any]
    result: Path

    @property
    def verb(self) -> str:
        return "test" if self.kind == "test" else "fit"

    @property
    def record(self) -> Path:
        return self.folder / ("tested.json" if self.kind == "test" else "done.json")

    @property
    def sort(self) -> str:
        """Jobs of one sort take about the same time."""
        return "timing" if self.kind in TIMINGS else self.kind


class Runs:
    """The runs of the variants called ``names`` in the folder ``out``."""

    def __init__(self, config: AblationConfig, names: Sequence[str], out: Path):
        self.config, self.names, self.out = config, list(names), out
        self._recipe, self._hashes = read_recipe(config.recipe), Hashes()
        self._took: dict[str, list[float]] = {}  # sort of job -> seconds

    def do_all(self) -> None:
        """Whatever is not done, with a word on stderr before it. Raises DsparkError when a run fails."""
        kept = [name for name in self.names if self.is_done(name)]
        self._say(self._plan(kept))
        if not self.config.steps and len(kept) < len(self.names):
            self._do(self._timed(WARM_UP, self.names[0]))
            for kind in TIMINGS:
                for name in self.names:
                    self._do(self._timed(kind, name))
        for name in self.names:
            self._do(self._fit(name))
            self._do(self._test(name))

    def is_done(self, name: str) -> bool:
        """Whether a variant (of ``names`` or not) was trained by this very ablation and tested."""
        timings = [] if self.config.steps else [self._timed(kind, name) for kind in TIMINGS]
        if not all(self._has_run(job) for job in timings):
            return False
        return self._has_run(self._fit(name)) and self._has_run(self._test(name))

    def merged(self, name: str) -> dict[str, Any]:
        """A variant's recipe, its overrides put in."""
        return merged(self._recipe, self.config.given(name))

    def steps(self, name: str) -> int:
        return self.config.steps or steps_for(self.config.seconds, self.step_seconds(name) or 1.0)

    def step_seconds(self, name: str) -> float | None:
        """Of the training itself with equal steps, else the lower median of the timings; None for a single step."""
        folder = self.out / folder_of(name)
        places = [folder] if self.config.steps else [folder / kind for kind in TIMINGS]
        found = [read_json(place / STEP_TIMES, "step times") for place in places if (place / STEP_TIMES).exists()]
        return min((float(one["median_seconds"]) for one in found), default=None)

    # ---- the jobs -----------------------------------------------------------------------------------------------

    def _timed(self, kind: str, name: str) -> Job:
        folder = self.out / folder_of(name) / kind
        quick = {"model.init_args.init.regression": 0, "trainer.max_steps": TIMED_STEPS, "trainer.limit_val_batches": 0}
        return Job(kind, name, folder, quick, folder / STEP_TIMES)

    def _fit(self, name: str) -> Job:
        folder, steps = self.out / folder_of(name), self.steps(name)
        given = {"trainer.max_steps": steps, "trainer.val_check_interval": steps}
        return Job("fit", name, folder, given, folder / CHECKPOINT)

    def _test(self, name: str) -> Job:
        folder = self.out / folder_of(name)
        return Job("test", name, folder, {"ckpt_path": str(folder / CHECKPOINT)}, folder / REPORT_NAME)

    def _has_run(self, job: Job) -> bool:
        if not (job.record.exists() and job.result.exists()):
            return False
        found = read_json(job.record, "record of a run")
        if not isinstance(found, dict) or found.get("result") != self._hashes.of(job.result):
            return False  # not what the run left
        if found.get("origins") != self._origins(job):
            return False
        self._took.setdefault(job.sort, []).append(found["seconds"])
        return True

    def _origins(self, job: Job) -> dict[str, Any]:
        recipe = merged(self.merged(job.name), job.given)
        if job.verb == "fit":  # what the test is asked for is no part of the weights
            recipe.get("model", {}).get("init_args", {}).pop("test", None)
        return origins(recipe, self._hashes)

    def _do(self, job: Job) -> None:
        if self._has_run(job):
            return
        job.record.unlink(missing_ok=True)
        if job.verb == "fit":
            (job.folder / STEP_TIMES).unlink(missing_ok=True)  # a run of one step writes none
        made_from = self._origins(job)  # as it was when the run began
        own = {"trainer.default_root_dir": job.folder, **job.given}
        options = [*self.config.overrides(job.name), *(f"--{key}={value}" for key, value in own.items())]
        expected = self._expected(job.sort)
        title = f"variant {self.names.index(job.name) + 1} of {len(self.names)}: {job.name}, {self._what(job)}"
        self._say(f"{title}{f', about {duration(expected)}' if expected else ''}")
        log = job.folder / f"{job.verb}.log"
        seconds = run_logged(["dspark", job.verb, self.config.recipe, *options], log, title, expected)
        self._took.setdefault(job.sort, []).append(seconds)
        told = {"origins": made_from, "result": self._hashes.of(job.result), "seconds": seconds}
        atomic_write(job.record, json.dumps(told, indent=1) + "\n")

    # ---- what is said -------------------------------------------------------------------------------------------

    def _plan(self, kept: list[str]) -> str:
        missing = [name for name in self.names if name not in kept]
        lines = [f"ablate: {len(self.names)} variants in {self.out}"]
        lines += [f"  kept: {', '.join(kept)}"] if kept else []
        if not missing:
            return "\n".join([*lines, "  nothing left to run"])
        timing = f"{TIMED_STEPS * len(TIMINGS)} timed steps, {self.config.seconds} s of training"
        each = f"{self.config.steps} training steps" if self.config.steps else timing
        cost = self._cost(missing)
        return "\n".join([*lines, f"  to run: {', '.join(missing)}", f"  each: {each}, a test; {cost}"])

    def _cost(self, names: list[str]) -> str:
        jobs = [job for name in names for job in (self._fit(name), self._test(name)) if not self._has_run(job)]
        expected = [self._expected(job.sort) for job in jobs]
        known = [seconds for seconds in expected if seconds is not None]
        if not known:
            return "how long is known once the first is done"
        return f"about {duration(sum(known))} in all" + (" and the tests" if len(known) < len(expected) else "")

    def _expected(self, sort: str) -> float | None:
        took = self._took.get(sort)
        if took:
            return sum(took) / len(took)
        return float(self.config.seconds) if sort == "fit" and self.config.seconds else None

    def _what(self, job: Job) -> str:
        steps = f" {job.given['trainer.max_steps']} steps" if job.verb == "fit" else ""
        return f"{_SAYS.get(job.kind, 'timing')}{steps}"

    @staticmethod
    def _say(text: str) -> None:
        print(text, file=sys.stderr)
