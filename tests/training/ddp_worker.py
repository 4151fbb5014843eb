"""Two gloo processes, one of them without data: run by test_ddp.py as `python ddp_worker.py RANKS DATA OUT`.

Lightning starts the second process by running this very file again.
"""

from __future__ import annotations

import faulthandler
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import tiny

import dspark.training.frozen as frozen
from dspark.files import tensor_hash
from dspark.training.data import TrajectoryDataModule


def main(ranks: int, data_dir: str, out: str) -> None:
    faulthandler.dump_traceback_later(200, exit=True)  # a hang is a failure with a traceback
    frozen.load_target = lambda source, dtype: tiny.make_target()
    # Everything fits one batch, so of two ranks the second has none: no sequence, no anchor.
    data = TrajectoryDataModule([data_dir], val=[data_dir], token_budget=10_000)
    strategy = {"strategy": "ddp", "use_distributed_sampler": False} if ranks > 1 else {}
    module = tiny.make_module(total_steps=3, regression=100, input_fusion=True)
    trainer = tiny.make_trainer(Path(out).parent, 3, devices=ranks, **strategy)
    trainer.fit(module, data)
    weights = {name: tensor_hash(tensor) for name, tensor in module.drafter.state_dict().items()}
    Path(f"{out}.rank{trainer.global_rank}").write_text(json.dumps(weights))
    if trainer.is_global_zero:
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        metrics["weights"] = float(sum(p.detach().double().abs().sum() for p in module.parameters()))
        Path(out).write_text(json.dumps(metrics))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
