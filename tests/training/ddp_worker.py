"""Two gloo processes that train, several runs one after the other: `python ddp_worker.py RUNS.json`.

RUNS.json: {"strategy": "ddp" or "fsdp", "out": folder, "runs": [arguments of runs.fit, ...]}. Lightning starts the
second process by running this very file again. Each rank writes what it ended with to OUT/<name>.rank<r>.json.
"""

from __future__ import annotations

import faulthandler
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import dspark.training.frozen as frozen
import runs


def main(path: str) -> None:
    faulthandler.dump_traceback_later(200, exit=True)  # a hang is a failure with a traceback
    frozen.load_target = lambda source, dtype: runs.tiny.make_target()
    wanted = json.loads(Path(path).read_text())
    for run in wanted["runs"]:
        if "draft" in run:
            runs.judge(Path(wanted["out"]), strategy=wanted["strategy"], **run)
            continue
        trainer, module, log = runs.fit(Path(wanted["out"]), strategy=wanted["strategy"], **run)
        file = Path(wanted["out"]) / f"{run['name']}.rank{trainer.global_rank}.json"
        file.write_text(json.dumps(runs.outcome(trainer, module, log)))


if __name__ == "__main__":
    main(sys.argv[1])
