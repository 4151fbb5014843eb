"""Runners for workers to make, and a collection over them as a program that can be killed:

python worker_engines.py FOLDER WORKERS
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import fakes

from dspark.contracts import Completion, Request
from dspark.noise import derive_seed
from dspark.rollouts.workers import Workers


def healthy(facts: dict[str, Any], delay: float = 0.0) -> tuple[fakes.FakeEngine, dict[str, Any]]:
    return fakes.FakeEngine(batch=2, seed=os.getpid(), delay=delay), facts


def deadly(facts: dict[str, Any], mark: str, times: int) -> tuple[fakes.FakeEngine, dict[str, Any]]:
    """Its process dies over the prompt p02's last sample, so many times in all: each leaves a byte in a file."""
    victim = fakes.make_prompts()[2].prompt_ids
    last = derive_seed(11, "p02", 2)

    def alter(request: Request, completion: Completion) -> Completion:
        if request.prompt_ids == victim and request.params.seq_seed == last:
            with open(mark, "ab") as stream:
                if stream.tell() < times:
                    stream.write(b"x")
                    stream.flush()
                    os._exit(1)
        return completion

    return fakes.FakeEngine(batch=2, seed=1, alter=alter), facts


def failing(error: type[Exception]) -> tuple[fakes.FakeEngine, dict[str, Any]]:
    raise error("expected a bundle, but got none.")


def over(make: Any, count: int, facts: dict[str, Any] | None = None) -> Workers:
    return Workers(make, count, 4, facts or fakes.facts())


if __name__ == "__main__":
    out, count = Path(sys.argv[1]), int(sys.argv[2])
    fakes.run(out, over(partial(healthy, fakes.facts(), 0.15), count))
