"""One training run as the tests of distribution and resuming make it, in this process or in the workers."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy

import tiny
from dspark.files import tensor_hash
from dspark.training.callbacks import DraftOnly, LastCheckpoint, SampleLog
from dspark.training.checkpoint_io import AtomicCheckpointIO
from dspark.training.confidence_module import ConfidenceModule
from dspark.training.data import RoundsDataModule, TrajectoryDataModule
from dspark.training.drafter_module import DrafterModule
from dspark.training.options import ReportOptions
from dspark.training.sharding import whole

SHAPE = {"input_fusion": True, "num_layers": 2, "draft_vocab_size": 25, "markov_head": "rnn", "fresh": 3.0}


class KillAfter(Callback):
    """SIGKILL to this very process once `step` steps are done: nothing is flushed, nothing is said."""

    def __init__(self, step: int):
        self.step = step

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def strategy_of(name: str) -> dict[str, Any]:
    if name == "one":
        return {}
    kind: Any = name
    if name == "fsdp":
        kind = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=False)
    return {"strategy": kind, "devices": 2, "use_distributed_sampler": False}


def fit(
    out: Path,
    name: str,
    train: str,
    val: str,
    budget: int,
    steps: int,
    strategy: str = "one",
    resume: str | None = None,
    every: int = 1000,
    kill_after: int = 0,
    anchors: int = 0,
    **module: Any,
) -> tuple[Trainer, DrafterModule, SampleLog]:
    """Trains the tiny draft model to `steps` of 8 steps; checkpoints and the log of samples lie in out/name: last.ckpt,
    which a run writes on its way, and end.ckpt, of a run that came to its end, whether or not it took a step."""
    data = TrajectoryDataModule([train], val=[val] if val else [], token_budget=budget, anchors_per_sequence=anchors)
    made = tiny.make_module(**{"total_steps": 8, "regression": 100, **SHAPE, **module})
    log = SampleLog(str(out / name / "samples.txt"))
    callbacks = [log, LastCheckpoint(every_n_train_steps=every), DraftOnly()]
    callbacks += [KillAfter(kill_after)] if kill_after else []
    options = {"callbacks": callbacks, "enable_checkpointing": True, "val_check_interval": 1, **strategy_of(strategy)}
    options["plugins"] = [AtomicCheckpointIO()]
    trainer = tiny.make_trainer(out / name, steps, **options)
    trainer.fit(made, data, ckpt_path=resume, weights_only=True if resume else None)
    assert isinstance(trainer.strategy.checkpoint_io, AtomicCheckpointIO), "slices too are written through it"
    trainer.save_checkpoint(out / name / "end.ckpt")
    return trainer, made, log


def judge(
    out: Path, name: str, draft: str, test: str, predict: str = "", strategy: str = "one", **report: Any
) -> ConfidenceModule:
    """`lightning test` of the confidence head that `draft` holds; out/name/report, and the metrics in out/NAME.json."""
    data = RoundsDataModule(test=[test], predict=[predict] if predict else [], token_budget=60)
    module = ConfidenceModule("tiny", draft, target_dtype="float32", report=ReportOptions(replicates=50, **report))
    trainer = tiny.make_trainer(out / name, 1, **strategy_of(strategy))
    trainer.test(module, data, verbose=False)
    told = {"metrics": module.streamed, "rounds": sum(len(part["accepted"]) for part in module.tested)}
    rank = "" if strategy == "one" else f".rank{trainer.global_rank}"
    (out / f"{name}{rank}.json").write_text(json.dumps(told))
    return module


def launch(strategy: str, out: Path, runs: list[dict[str, Any]], timeout: float = 240) -> subprocess.CompletedProcess:
    """ddp_worker.py over `runs`. It leads a session of its own, which is killed whole: none of its processes stays."""
    out.mkdir(parents=True, exist_ok=True)
    file = out / f"{runs[0]['name']}.runs.json"
    file.write_text(json.dumps({"strategy": strategy, "out": str(out), "runs": runs}))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(Path(__file__).with_name("ddp_worker.py")), str(file)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=env, start_new_session=True, **pipes) as process:
        try:
            said, wrong = process.communicate(timeout=timeout)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, process.returncode, said, wrong)


def results(out: Path, name: str) -> list[dict[str, Any]]:
    """What the two ranks ended with."""
    return [json.loads((out / f"{name}.rank{rank}.json").read_text()) for rank in (0, 1)]


def agree(one: dict[str, Any], other: dict[str, Any], rel: float = 1e-5) -> None:
    """Metrics and sizes of the weights are equal but for the order of additions."""
    for kind in ("metrics", "size"):
        assert one[kind].keys() == other[kind].keys()
        for name, value in one[kind].items():
            assert math.isclose(other[kind][name], value, rel_tol=rel, abs_tol=1e-6), (name, value, other[kind][name])


def outcome(trainer: Trainer, module: DrafterModule, log: SampleLog) -> dict[str, Any]:
    """What a rank ended with: metrics, a hash and the size of each whole tensor, what it saw."""
    state = whole(module.drafter).state_dict()
    return {
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "hashes": {name: tensor_hash(tensor) for name, tensor in state.items()},
        "size": {name: float(torch.linalg.vector_norm(tensor.double())) for name, tensor in state.items()},
        "lines": log.lines,
        "steps": trainer.global_step,
    }
