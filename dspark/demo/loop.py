"""The nine stages of the demo, in the order of the data's journey, and what is measured after them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from dspark import lightning_cli
from dspark.calibration.fitting import fit
from dspark.calibration.report import Report
from dspark.commands.events import gather_events
from dspark.commands.export import export
from dspark.commands.prepare import PrepareConfig, prepare
from dspark.commands.replay import replay_folder
from dspark.commands.report import make_report, plain
from dspark.commands.rollout import roll
from dspark.commands.running import Loaded, load
from dspark.contracts import DsparkError
from dspark.corpus.prompts import Prompt, load_prompts
from dspark.corpus.sources import open_source
from dspark.demo.measure import equality, speed
from dspark.demo.stages import Result, Stage, Stages
from dspark.demo.table import as_text
from dspark.files import sha256_file
from dspark.recipe import read_recipe
from dspark.rollouts.config import RolloutConfig
from dspark.scorecard.setting import Setting
from dspark.settings import Settings

OUT = Path("runs/demo")
SPLITS = ("train", "calibration", "test")
RECIPES = ("prepare", "drafter", "confidence", "rollout")
GREEDY, RECOMMENDED, HOT = (
    Setting("greedy", 0.0, 1.0),
    Setting("coupled", 0.2, 0.9),
    Setting("coupled", 1.0, 1.0),
)


@dataclass(frozen=True, slots=True)
class Size:
    """How much of everything. 0 = as the recipes and the data say."""

    prompts: int = 0
    max_tokens: int = 0
    steps: int = 0
    train_events: int = 44
    events: int = 34
    rollout_prompts: int = 12
    samples: int = 2
    measured: int = 100
    hot: int = 24
    measured_tokens: int = 16
    speed_requests: int = 4
    speed_tokens: int = 32
    speed_repeats: int = 3
    replayed: int = 12


QUICK = Size(
    prompts=8,
    max_tokens=24,
    steps=4,
    train_events=8,
    events=8,
    rollout_prompts=4,
    measured=8,
    speed_requests=2,
    speed_repeats=1,
)


def run_loop(args: argparse.Namespace) -> int:
    """All stages, then the table. Exit code 1 when something that must be equal bit for bit was not."""
    demo = Demo(Path(args.recipes), QUICK if args.quick else Size(), args.quiet)
    results = demo.run()
    print(json.dumps(results) if args.json else as_text(results))
    return 0 if demo.bits_equal(results) else 1


class Demo:
    """Runs the stages over one folder. Models are loaded when the first stage that runs needs them."""

    def __init__(self, recipes: Path, size: Size, quiet: bool):
        missing = [str(recipes / f"{name}.yaml") for name in RECIPES if not (recipes / f"{name}.yaml").is_file()]
        if missing:
            raise DsparkError(
                f"demo: expected the recipes here, but {missing[0]} is missing. Run it in the project's folder, or "
                "name the folder with --recipes."
            )
        self.recipes, self.size, self.quiet = recipes, size, quiet
        self.prepare_config = self._prepare_config()
        path = recipes / "rollout.yaml"
        self.rollout_config = RolloutConfig.from_dict(read_recipe(path), str(path))
        # On prompts that the draft model learns from it is accepted too often to learn confidence from.
        data = read_recipe(recipes / "drafter.yaml").get("data") or {}
        self.unseen = int((data.get("init_args") or {}).get("train_prompts", 0))
        self.source, self.dtype = self.prepare_config.target, self.prepare_config.dtype
        self.stages = Stages(OUT / "stamps", lambda line: print(line, file=sys.stderr, flush=True))
        self.made: dict[str, Any] = {}

    def run(self) -> dict[str, Any]:
        """What every stage measured, by name."""
        for step in (
            self.prompts, self.responses, self.drafter, self.events, self.confidence, self.calibration, self.bundle,
            self.rollouts, self.replay, self.feedback, self.measured,
        ):  # fmt: skip
            step()
        return self.stages.results

    @staticmethod
    def bits_equal(results: dict[str, Any]) -> bool:
        return results["replay"]["differing_bits"] == 0 and nothing_differs(results["measured"])

    # ---- the stages -----------------------------------------------------------------------------------------------

    def prompts(self) -> None:
        files = {split: self.prepare_config.rollout(split).prompts for split in SPLITS}
        hashes = {f"prompts:{path}": sha256_file(path) for path in files.values()}
        self._do("prompts", "1 prompts", hashes, (), lambda: self._count_prompts(files))
        self.made.update(hashes)  # the user's files: no outputs of ours, never removed

    def responses(self) -> None:
        folders = tuple(OUT / "responses" / split for split in self.prepare_config.splits)

        def run() -> Result:
            summaries = prepare(self.prepare_config, self.loaded, self.quiet)
            return {
                split: {k: s[k] for k in ("trajectories", "tokens", "finish_reasons")} for split, s in summaries.items()
            }

        config = {**asdict(self.prepare_config), "target": self.loaded.target.fingerprint}
        self._do("responses", "2 answers by the target", config, folders, run)

    def drafter(self) -> None:
        folder, extra = OUT / "drafter", _steps(self.size.steps)

        def run() -> Result:
            self._fit("drafter", folder, extra)
            # The verifier needs a draft model to collect labels with; the confidence head of this one is a first guess.
            return export(str(folder / "last.ckpt"), self.source, self.dtype, str(folder / "bundle"))

        config = {"recipe": sha256_file(self.recipes / "drafter.yaml"), "extra": extra}
        self._do(
            "drafter",
            "3 draft model (lightning fit recipes/drafter.yaml)",
            config,
            (folder / "bundle", folder / "last.ckpt"),
            run,
        )

    def events(self) -> None:
        """Verified rounds of whole blocks on each split: the confidence head's labels."""
        folders = tuple(OUT / "events" / split for split in SPLITS)

        def run() -> Result:
            loaded = self._with(OUT / "drafter" / "bundle")
            done = {}
            for split, folder in zip(SPLITS, folders, strict=True):
                limit = self.size.train_events if split == "train" else self.size.events
                base = self.prepare_config.rollout(split)
                config = replace(base, drafter=str(OUT / "drafter" / "bundle"), limit=limit, out=str(folder))
                if split == "train":
                    config = replace(config, skip=self.unseen)
                done[split] = roll(config, loaded, self.quiet, title=f"rounds: {split}")["trajectories"]
            return done

        inputs = {"limits": [self.size.train_events, self.size.events], "skip": self.unseen}
        self._do("events", "4a rounds the verifier judged", inputs, folders, run)

    def confidence(self) -> None:
        folder, extra = OUT / "confidence", _steps(self.size.steps)
        config = {"recipe": sha256_file(self.recipes / "confidence.yaml"), "extra": extra}

        def run() -> Result:
            self._fit("confidence", folder, extra)
            return {}

        title = "4b confidence head (lightning fit recipes/confidence.yaml)"
        self._do("confidence", title, config, (folder / "last.ckpt",), run)

    def calibration(self) -> None:
        path, report = OUT / "calibration.json", OUT / "report"
        self._do("calibration", "5 calibration and report", {}, (path, report / "report.json"), self._calibrate)

    def _calibrate(self) -> Result:
        head, path, rounds = str(OUT / "confidence" / "last.ckpt"), OUT / "calibration.json", OUT / "events"
        events, identity = gather_events(head, [str(rounds / "calibration")], self.source, self.dtype, self.quiet)
        calibration = fit(events, identity)
        calibration.save(path)
        report, accepted = make_report(
            head, [str(rounds / "test")], self.source, self.dtype, str(path), str(OUT / "report"),
            fitted_on=[str(rounds / "calibration")], tensorboard="tb_logs/report", quiet=self.quiet,
        )  # fmt: skip
        return {
            "maps": [m.told() for m in calibration.maps],
            "survival": survival_ece(report, events.num_slots),
            "acceptance": plain(accepted),
        }

    def bundle(self) -> None:
        folder = OUT / "bundle"

        def run() -> Result:
            head = str(OUT / "confidence" / "last.ckpt")
            return export(head, self.source, self.dtype, str(folder), str(OUT / "calibration.json"))

        self._do("bundle", "6 export, behind the gate", {}, (folder, folder / "calibration.json"), run)

    def rollouts(self) -> None:
        config = replace(
            self.rollout_config, target=self.source, dtype=self.dtype, drafter=str(OUT / "bundle"),
            out=str(OUT / "rollouts"),
            limit=self.size.rollout_prompts, samples_per_prompt=self.size.samples,
            max_tokens=self.size.max_tokens or self.prepare_config.max_tokens,
            prompts=self.prepare_config.rollout("train").prompts, split="", skip=self.unseen,
        )  # fmt: skip

        def run() -> Result:
            done = roll(config, self._with(OUT / "bundle"), self.quiet, title="rollouts")
            return {k: done[k] for k in ("trajectories", "tokens", "finish_reasons")}

        self._do("rollouts", "7 rollouts with the draft model", config.as_dict(), (OUT / "rollouts",), run)

    def replay(self) -> None:
        def run() -> Result:
            got = replay_folder(str(OUT / "rollouts"), self.size.replayed, rescore=True, batch_size=5, quiet=self.quiet)
            first = str(got.first_difference) if got.first_difference else None
            return {"checked": got.checked, "tokens": got.tokens, "differing_bits": got.differing_bits, "first": first}

        inputs = {"sample": self.size.replayed}
        self._do("replay", "8 replay, bit for bit", inputs, (), run, lambda result: result["differing_bits"] == 0)

    def feedback(self) -> None:
        folder, steps = OUT / "feedback", min(10, self.size.steps or 10)
        extra = [f"--data.init_args.train=[{OUT / 'rollouts'}]", f"--model.init_args.drafter={OUT / 'bundle'}"]
        extra += _steps(steps)

        def run() -> Result:
            self._fit("confidence", folder, extra, name="feedback")
            return {}

        config = {"recipe": sha256_file(self.recipes / "confidence.yaml"), "extra": extra}
        self._do("feedback", "9 the trajectories train the head again", config, (folder / "last.ckpt",), run)

    def measured(self) -> None:
        def run() -> Result:
            loaded, test = self._with(OUT / "bundle"), self._test_prompts()
            budget = self.size.measured_tokens
            named = {"greedy": GREEDY, "recommended": RECOMMENDED, "hot": HOT}
            counts = {"hot": self.size.hot}
            done: Result = {
                name: equality(loaded, spread(test, counts.get(name, len(test))), one, budget, self.quiet)
                for name, one in named.items()
            }
            few = spread(test, self.size.speed_requests)
            done["speed"] = speed(loaded, few, RECOMMENDED, self.size.speed_tokens, self.size.speed_repeats, self.quiet)
            return done

        title = "acceptance and speed against plain decoding"
        self._do("measured", title, {"size": asdict(self.size)}, (), run, nothing_differs)

    # ---- helpers ----------------------------------------------------------------------------------------------------

    def _do(
        self, name: str, title: str, inputs: dict[str, Any], outputs: tuple[Path, ...], run: Any,
        good: Callable[[Result], bool] = lambda result: True,
    ) -> None:  # fmt: skip
        """Every stage depends on its own inputs, the switches, and all that was made before it."""
        switches = Settings.from_env().as_dict()
        stage = Stage(name, title, {**inputs, "switches": switches, "before": dict(self.made)}, outputs, run, good)
        self.stages.do(stage)
        self.made.update({f"{name}:{path}": digest for path, digest in self.stages.digests[name].items()})

    def _prepare_config(self) -> PrepareConfig:
        path = self.recipes / "prepare.yaml"
        config = PrepareConfig.from_dict(read_recipe(path), str(path))
        size = self.size
        return replace(
            config, out=str(OUT / "responses"), limit=size.prompts or config.limit,
            max_tokens=size.max_tokens or config.max_tokens,
        )  # fmt: skip

    def _count_prompts(self, files: dict[str, str]) -> Result:
        return {split: sum(1 for _ in open_source(path, None).rows) for split, path in files.items()}

    def _test_prompts(self) -> list[Prompt]:
        source = self.prepare_config.rollout("test").prompts
        return spread(load_prompts(source, self.loaded.tokenizer).prompts, self.size.measured)

    def _fit(self, recipe: str, folder: Path, extra: list[str], name: str = "") -> None:
        arguments = [str(self.recipes / f"{recipe}.yaml"), f"--trainer.default_root_dir={folder}", *extra]
        arguments += [f"--trainer.logger.init_args.name={name}"] if name else []
        arguments += ["--trainer.enable_progress_bar=false"] if self.quiet else []
        lightning_cli.run("fit", arguments, "lightning")

    @cached_property
    def loaded(self) -> Loaded:
        return load(self.source, self.dtype)

    def _with(self, bundle: Path) -> Loaded:
        return load(self.source, self.dtype, bundle)


def _steps(steps: int) -> list[str]:
    """Overrides that cut a fit to so many steps; none for 0."""
    return [f"--trainer.max_steps={steps}", f"--trainer.val_check_interval={steps}"] if steps else []


def spread(prompts: list[Prompt], count: int) -> list[Prompt]:
    """``count`` prompts, evenly over the list, so that every domain has its share."""
    count = min(count, len(prompts))
    return [prompts[i * len(prompts) // count] for i in range(count)]


def nothing_differs(measured: Result) -> bool:
    """Whether every speculative output equalled the plain one, in the equality runs and in the speed run."""
    runs = [measured[name]["differing"] for name in ("greedy", "recommended", "hot")]
    return not any(runs) and not any(e["mismatched"] for e in measured["speed"]["engines"].values())


def survival_ece(report: Report, slots: int) -> list[dict[str, Any]]:
    """ECE and AUROC of the survival per slot and in the mean, the head before and after calibration."""
    rows = []
    for slot in [*range(1, slots + 1), "mean"]:
        before, after = (report.row(name, "cumulative", slot) for name in ("head", "head_calibrated"))
        rows.append({"slot": slot, "before": before["ece"], "after": after["ece"], "auroc": after["auroc"]})
    return rows
