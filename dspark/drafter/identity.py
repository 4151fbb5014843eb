"""Which draft model this is: one hash over its config and its tensors."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from dspark.drafter.config import DrafterConfig
from dspark.drafter.model import Drafter
from dspark.files import sha256_json, tensor_hash


def tensor_hashes(state: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: tensor_hash(tensor) for name, tensor in state.items()}


def identity_hash(config: DrafterConfig, tensors: Mapping[str, str]) -> str:
    """sha256 hex over a config and the hash of every tensor."""
    return sha256_json({"config": config.identity(), "tensors": dict(tensors)})


def layers_hash(config: DrafterConfig, tensors: Mapping[str, str]) -> str:
    """sha256 hex over what decides on the drafts: everything but the confidence head, which is trained on rounds that
    the rest has drafted."""
    shape = {name: value for name, value in config.identity().items() if not name.startswith("confidence_")}
    drafting = {name: value for name, value in tensors.items() if not name.startswith("confidence_head.")}
    return sha256_json({"config": shape, "tensors": drafting})


def drafter_hash(drafter: Drafter) -> str:
    """sha256 hex over the config and every tensor, in the dtype it is held in. A calibration does not change it."""
    return identity_hash(drafter.config, tensor_hashes(drafter.state_dict()))
