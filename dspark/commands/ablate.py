"""Trains variants of one recipe for equal time and tests them on the same prompts.

Every variant is a `dspark fit` and a `dspark test` of its own, with the overrides that the recipe lists. For equal time
a few steps of each are timed first; with `steps` in the recipe they are not. The table has tau under every tested
setting with paired intervals, the step time, and what a round of drafting costs. What is finished is kept while nothing
it follows from has changed: the recipe after its overrides, the files it names, the target, this version. The same
command goes on where it stopped.

Needs: the recipe's training data and test prompts. Costs, a variant: the seconds (or steps) of training that the recipe
grants, for equal time 24 timed steps before it, two starts of the target, and a test on all prompts, once more in plain
decoding where the two must be equal; at the end rounds of drafting by all in turn. What will run is said before it
does. A variant's folder holds its checkpoint, its report and the logs, which open with the full command. One run at a
time in a folder.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from dspark.bench.ablation import AblationConfig, ablation_table, folder_of, read_ablation
from dspark.bench.drafting import draft_milliseconds
from dspark.calibration.figures import png
from dspark.commands.ablate_runs import CHECKPOINT, Runs
from dspark.commands.watching import alone_in
from dspark.contracts import DsparkError, SamplingParams
from dspark.files import atomic_write
from dspark.scorecard.compare import compare
from dspark.scorecard.pictures import decay_figure
from dspark.scorecard.rates import OVERALL
from dspark.scorecard.report import load_report
from dspark.target.load import load_target
from dspark.training.checkpoint import load_drafter, served

DATA, TABLE, PICTURE = "ablation.json", "ablation.txt", "ablation_slots.png"
BATCHES = (1, 32)
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
    names, out = _chosen(config, args.only), Path(config.out)
    with alone_in(out, "ablate"):
        runs = Runs(config, names, out)
        runs.do_all()
        rows = _rows(runs, [name for name in config.variants if name in names or runs.is_done(name)])
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


def _rows(runs: Runs, names: list[str]) -> list[dict[str, Any]]:
    out = runs.out
    reports = {name: load_report(out / folder_of(name)) for name in names}
    compared = compare(reports) if len(reports) > 1 else None
    cost = _draft_cost(runs, names)
    rows = [_row(runs, name, reports[name], compared, cost) for name in names]
    atomic_write(out / DATA, json.dumps({"rows": rows, "comparison": compared}, indent=1) + "\n")
    atomic_write(out / TABLE, ablation_table(rows) + "\n")
    if compared:
        atomic_write(out / PICTURE, png(decay_figure(reports, compared["titles"])))
    return rows


def _row(runs: Runs, name: str, report: dict[str, Any], compared: Any, cost: dict[str, Any]) -> dict[str, Any]:
    found = compared["rows"] if compared else []
    ratios = {r["title"]: r["ratio"] for r in found if r["drafter"] == name and r["domain"] == OVERALL}
    tau = {entry["title"]: entry["figures"][OVERALL]["tau"] for entry in report["settings"]}
    return {
        "name": name,
        "steps": runs.steps(name),
        "step_seconds": runs.step_seconds(name),
        "draft_ms": {batch: cost[name][batch] for batch in BATCHES},
        "tau": tau,
        "ratio": {title: ratios.get(title) for title in tau},
    }


def _draft_cost(runs: Runs, names: list[str]) -> dict[str, dict[int, float]]:
    """name -> batch size -> milliseconds a round, all variants in turn."""
    given = runs.merged(names[0])["model"]["init_args"]
    target = load_target(given["target"], given.get("target_dtype", "bfloat16"))
    paths = {name: runs.out / folder_of(name) / CHECKPOINT for name in names}
    models = {name: served(load_drafter(path, target), target) for name, path in paths.items()}
    params = SamplingParams(temperature=0.2, top_p=0.9)
    timed = {batch: draft_milliseconds(models, batch, params) for batch in BATCHES}
    return {name: {batch: timed[batch][name] for batch in BATCHES} for name in names}
