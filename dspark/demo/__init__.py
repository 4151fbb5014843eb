"""The whole loop on the embedded target: from prompts to replayed trajectories, ending in one table of numbers.

Answers by the target, a draft model trained on them, its confidence head trained on what the verifier did, calibration
and a report, an export behind a gate, rollouts that are replayed bit for bit, and those rollouts as training data
again. A stage whose output is there and matches its inputs is skipped, so an interrupted demo goes on with the stage
it was in (answers and rollouts where they stopped, a fit from its start). Run it where recipes/ and data/ are;
everything it writes is under runs/demo and tb_logs.
"""

from __future__ import annotations

import argparse

EXAMPLES = """
examples:
  dspark demo
  dspark demo --quick
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `dspark demo`."""
    parser.add_argument("--recipes", default="recipes", help="the folder with the recipes")
    parser.add_argument(
        "--quick", action="store_true", help="few prompts and steps: proves the wiring, not the numbers"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    parser.add_argument("--json", action="store_true", help="end with the numbers as JSON instead of the table")


def run(args: argparse.Namespace) -> int:
    """Run every stage and print the table; 0 when every bit that must be equal was equal, else 1."""
    from dspark.demo.loop import run_loop

    return run_loop(args)
