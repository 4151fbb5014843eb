"""FSDP2 for the draft model: each rank holds a slice of every parameter, of its gradient and of AdamW's moments.

Switched on by the recipe alone, with Lightning's ModelParallelStrategy:
    trainer:
      devices: 2
      strategy:
        class_path: lightning.pytorch.strategies.ModelParallelStrategy
        init_args: {data_parallel_size: 2, tensor_parallel_size: 1, save_distributed_checkpoint: false}
Draft layers are gathered one at a time, the rest once a step. The step itself is the root's forward, so whatever a step
calls of the draft model finds its parameters whole. Checkpoints are the files that one process writes.
Left out on purpose: slices of the frozen target (every rank runs all of it), tensor parallelism, Lightning's
FSDPStrategy (FSDP1, which flattens parameters and so loses the split of matrices and vectors that weight decay needs).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dspark import ops
from dspark.contracts import DsparkError
from dspark.drafter.model import Drafter

_STEPS = ("training_step", "validation_step", "test_step")


def is_sharded(module: LightningModule) -> bool:
    return isinstance(module, FSDPModule)


def shard(module: LightningModule, drafter: Drafter, trainer: Trainer) -> None:
    """Slices `module`, whose only parameters are the drafter's, over all ranks if the trainer's strategy asks for it.

    Raises DsparkError for a strategy whose checkpoints or slices would be of another kind.
    """
    strategy = trainer.strategy
    if isinstance(strategy, FSDPStrategy):
        raise DsparkError(
            "trainer.strategy: expected ModelParallelStrategy to shard the draft model, but got FSDPStrategy. Use "
            "ModelParallelStrategy, or ddp."
        )
    if not isinstance(strategy, ModelParallelStrategy) or is_sharded(module):
        return
    # Keys and values are views; nothing writes into them, which is all that torch warns of.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor.*")
    mesh = strategy.device_mesh
    _check(strategy, trainer.world_size, mesh["data_parallel"].size())
    for layer in drafter.draft_layers:
        fully_shard(layer, mesh=mesh["data_parallel"])
        register_fsdp_forward_method(layer, "keys_values")
    fully_shard(module, mesh=mesh["data_parallel"])
    for step in _STEPS:
        register_fsdp_forward_method(module, step)


def _check(strategy: ModelParallelStrategy, world: int, width: int) -> None:
    if width != world or strategy._save_distributed_checkpoint:
        raise DsparkError(
            f"trainer.strategy: expected data_parallel_size {world} (the number of processes), tensor_parallel_size 1 "
            f"and save_distributed_checkpoint false, but got {width}, {world // width} and "
            f"{str(strategy._save_distributed_checkpoint).lower()}. Set them so."
        )


def moment_order(module: LightningModule, optimizers: Iterable[Optimizer]) -> list[str]:
    """The parameter names in the order in which a checkpoint numbers them: by the optimizer's groups, or, sliced, by
    the module."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    if is_sharded(module):
        return list(names.values())
    return [names[id(p)] for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]


def refuse_numbered(checkpoint: dict[str, Any]) -> None:
    """Raises DsparkError for a checkpoint with numbered moments: slices would have got each other's."""
    if any(isinstance(key, int) for state in checkpoint.get("optimizer_states", ()) for key in state.get("state", ())):
        raise DsparkError(
            "checkpoint: expected one that names the optimizer's parameters, to go on with a sharded model, but got an "
            "older one that numbers them. Resume it with one process or ddp; the next checkpoint names them."
        )


def whole(drafter: Drafter) -> Drafter:
    """The draft model itself, or, sliced, an unbound copy with whole parameters. All ranks must call it."""
    if not isinstance(drafter.fc.weight, DTensor):
        return drafter
    copy = Drafter(drafter.config, drafter.draft_ids)
    copy.load_state_dict(get_model_state_dict(drafter, options=StateDictOptions(full_state_dict=True)))
    return copy


def fill(drafter: Drafter, state: dict[str, Tensor]) -> None:
    """load_state_dict of whole tensors, the same on every rank, into a draft model that may be sliced."""
    set_model_state_dict(drafter, {**state}, options=StateDictOptions(full_state_dict=True))


def forget_packed(module: LightningModule) -> None:
    """Drops the packed copies that inference operations keep of gathered weights: a gather writes into the same tensors
    without anything noticing. To be called before an evaluation; does nothing without shards."""
    parts: list[Any] = [part for part in module.modules() if isinstance(part, FSDPModule)]
    for part in parts:
        part.unshard()
    for parameter in module.parameters() if parts else ():
        ops.forget(parameter)
    for part in parts:
        part.reshard()
