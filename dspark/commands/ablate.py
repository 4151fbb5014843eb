"""Trains variants of one recipe for equal time and tests them on the same prompts.

Every variant is a `dspark fit` and a `dspark test` of its own, with the overrides that the recipe lists; the commands
are printed and kept. First a few steps of each tell what a step costs, so that all get the same training time. The
table has tau under every tested setting with paired intervals, the step time, and what a round of drafting costs. What
is finished is kept while recipe, overrides and training data stay the same: the same command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from dspark.bench.ablation import TIMED_STEPS, AblationConfig, ablation_table, folder_of, read_ablation, steps_for
from dspark.bench.drafting import draft_milliseconds
from dspark.calibration.figures import png
from dspark.contracts import DsparkError, SamplingParams
from dspark.files import atomic_write, read_json, sha256_file
from dspark.recipe import read_recipe
from dspark.scorecard.compare import compare
from dspark.scorecard.pictures import decay_figure
from dspark.scorecard.rates import OVERALL
from dspark.scorecard.report import REPORT_NAME, load_report
from dspark.target.load import load_target
from dspark.training.checkpoint import load_drafter, served

DATA, TABLE, PICTURE = "ablation.json", "ablation.txt", "ablation_slots.png"
RECORD = "done.json"  # of a run that came to its end
BATCHES = (1, 32)
TIMINGS = ("timing-1", "timing-2")  # in turns, the lower median counts: what disturbs a run only makes it slower
TARGET_KEYS = ("model.init_args.target", "model.init_args.target_dtype")
EXAMPLES = """
examples:
  dspark ablate recipes/ablate.yaml
  dspark ablate recipes/ablate.yaml --only vanilla gated --out runs/two
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `dspark ablate`."""
    parser.add_argument("recipe", help="YAML: recipe, variants, common, seconds or steps, out")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="train and test these variants only")
    parser.add_argument("--seconds", type=int, default=0, help="overrides the recipe's training time")
    parser.add_argument("--out", default="", help="overrides the recipe's folder")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")


def run(args: argparse.Namespace) -> int:
    """Train and test what is missing, then print the table; 0. Raises DsparkError when a run fails."""
    config = _config(args)
    names = _chosen(config, args.only)
    out = Path(config.out)
    _time(config, names[0], out, "warm-up")  # fills the cache of features, so that no variant pays for the others
    for kind in TIMINGS:
        for name in names:
            _time(config, name, out, kind)
    for name in names:
        _fit(config, name, out)
        _test(config, name, out)
    rows = _rows(config, [name for name in config.variants if name in names or _is_there(config, name, out)], out)
    print(json.dumps(rows) if args.json else f"{ablation_table(rows)}\n\nwritten to {out}")
    return 0


def _config(args: argparse.Namespace) -> AblationConfig:
    config = read_ablation(args.recipe)
    given: dict[str, Any] = {"out": args.out} if args.out else {}
    given |= {"seconds": args.seconds, "steps": 0} if args.seconds else {}
    values = {name: getattr(config, name) for name in AblationConfig.__dataclass_fields__}
    return AblationConfig.from_dict({**values, **given}, args.recipe)


def _chosen(config: AblationConfig, only: list[str]) -> list[str]:
    unknown = sorted(set(only) - set(config.variants))
    if unknown:
        raise DsparkError(f"ablate: expected names of {list(config.variants)}, but got {unknown[0]!r}.")
    return [name for name in config.variants if not only or name in only]


# ---- the three runs of a variant; each leaves a record of its command and is skipped when that has not changed ------


def _time(config: AblationConfig, name: str, out: Path, kind: str) -> None:
    folder = out / folder_of(name) / kind
    quick = {"model.init_args.init.regression": 0, "trainer.max_steps": TIMED_STEPS, "trainer.limit_val_batches": 0}
    _once(config, folder, f"{kind}: {name}", _command("fit", config, name, folder, quick))


def _fit(config: AblationConfig, name: str, out: Path) -> None:
    _once(config, out / folder_of(name), f"fit {name}", _fit_command(config, name, out))


def _fit_command(config: AblationConfig, name: str, out: Path) -> list[str]:
    steps = _steps(config, name, out)
    given = {"trainer.max_steps": steps, "trainer.val_check_interval": steps}
    return _command("fit", config, name, out / folder_of(name), given)


def _is_there(config: AblationConfig, name: str, out: Path) -> bool:
    """Whether a variant was trained by this very ablation and tested: others do not get into its table."""
    folder = out / folder_of(name)
    if not (folder / REPORT_NAME).exists() or not all((folder / kind / "steps.json").exists() for kind in TIMINGS):
        return False
    return _is_done(folder, _wanted(config, _fit_command(config, name, out)))


def _test(config: AblationConfig, name: str, out: Path) -> None:
    folder = out / folder_of(name)
    report, checkpoint = folder / REPORT_NAME, folder / "last.ckpt"
    if not report.exists() or report.stat().st_mtime < checkpoint.stat().st_mtime:
        _execute(f"test {name}", _command("test", config, name, folder, {"ckpt_path": checkpoint}))


def _steps(config: AblationConfig, name: str, out: Path) -> int:
    return config.steps or steps_for(config.seconds, _step_seconds(out / folder_of(name)))


def _step_seconds(folder: Path) -> float:
    found = [read_json(folder / kind / "steps.json", "step times")["median_seconds"] for kind in TIMINGS]
    return float(min(found))


def _command(verb: str, config: AblationConfig, name: str, folder: Path, given: dict[str, Any]) -> list[str]:
    own = [f"--{key}={value}" for key, value in {"trainer.default_root_dir": folder, **given}.items()]
    return ["dspark", verb, config.recipe, *config.overrides(name), *own]


def _once(config: AblationConfig, folder: Path, title: str, command: list[str]) -> None:
    """Runs it unless the very same has run to its end, of the same recipe and the same training data."""
    wanted = _wanted(config, command)
    if _is_done(folder, wanted):
        return
    (folder / RECORD).unlink(missing_ok=True)
    _execute(title, command)
    atomic_write(folder / RECORD, json.dumps(wanted, indent=1) + "\n")


def _is_done(folder: Path, wanted: dict[str, Any]) -> bool:
    return (folder / RECORD).exists() and read_json(folder / RECORD, "record of a run") == wanted


def _wanted(config: AblationConfig, command: list[str]) -> dict[str, Any]:
    """A run's record: its command, and hashes of what else it is made from."""
    recipe = read_recipe(config.recipe)
    given = config.common.get("data.init_args.train", recipe["data"]["init_args"]["train"])
    folders = yaml.safe_load(given) if isinstance(given, str) else given
    manifests = [Path(folder) / "manifest.json" for folder in folders]
    files = (Path(config.recipe), *filter(Path.exists, manifests))
    return {"command": shlex.join(command), "inputs": {str(path): sha256_file(path) for path in files}}


def _execute(title: str, command: list[str]) -> None:
    print(f"{title}\n  {shlex.join(command)}", file=sys.stderr)
    result = subprocess.run([sys.executable, "-m", *command], stdout=subprocess.DEVNULL, check=False)
    if result.returncode:
        raise DsparkError(f"ablate: {title} ended with exit code {result.returncode}; its message stands above.")


# ---- the table ------------------------------------------------------------------------------------------------------


def _rows(config: AblationConfig, names: list[str], out: Path) -> list[dict[str, Any]]:
    reports = {name: load_report(out / folder_of(name)) for name in names}
    compared = compare(reports) if len(reports) > 1 else None
    cost = _draft_cost(config, names, out)
    rows = [_row(config, name, out, reports[name], compared, cost) for name in names]
    atomic_write(out / DATA, json.dumps({"rows": rows, "comparison": compared}, indent=1) + "\n")
    atomic_write(out / TABLE, ablation_table(rows) + "\n")
    if compared:
        atomic_write(out / PICTURE, png(decay_figure(reports, compared["titles"])))
    return rows


def _row(
    config: AblationConfig, name: str, out: Path, report: dict[str, Any], compared: Any, cost: dict[str, Any]
) -> dict[str, Any]:
    found = compared["rows"] if compared else []
    ratios = {r["title"]: r["ratio"] for r in found if r["drafter"] == name and r["domain"] == OVERALL}
    tau = {entry["title"]: entry["figures"][OVERALL]["tau"] for entry in report["settings"]}
    return {
        "name": name,
        "steps": _steps(config, name, out),
        "step_seconds": _step_seconds(out / folder_of(name)),
        "draft_ms": {batch: cost[name][batch] for batch in BATCHES},
        "tau": tau,
        "ratio": {title: ratios.get(title) for title in tau},
    }


def _draft_cost(config: AblationConfig, names: list[str], out: Path) -> dict[str, dict[int, float]]:
    """name -> batch size -> milliseconds a round, all variants in turn."""
    given = {**read_recipe(config.recipe)["model"]["init_args"]}
    given |= {key.rpartition(".")[2]: value for key, value in config.common.items() if key in TARGET_KEYS}
    target = load_target(given["target"], given.get("target_dtype", "bfloat16"))
    models = {name: served(load_drafter(out / folder_of(name) / "last.ckpt", target), target) for name in names}
    params = SamplingParams(temperature=0.2, top_p=0.9)
    timed = {batch: draft_milliseconds(models, batch, params) for batch in BATCHES}
    return {name: {batch: timed[batch][name] for batch in BATCHES} for name in names}
