"""The target's embedding and LM head, lent to the draft model: outside its module tree, detached, cast on use.

The LM head's rows are gathered to the draft vocabulary once per (dtype, device, draft ids) and kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dspark.contracts import DsparkError
from dspark.drafter.config import DrafterConfig


class BoundVocabulary:
    """embed_weight, head_weight [V,H] of the target. Raises DsparkError when they do not fit the config."""

    def __init__(self, embed_weight: Tensor, head_weight: Tensor, config: DrafterConfig):
        wanted = (config.vocab_size, config.hidden_size)
        for name, weight in (("embedding", embed_weight), ("LM head", head_weight)):
            if tuple(weight.shape) != wanted:
                raise DsparkError(
                    f"draft model: expected a target whose {name} is {list(wanted)} (vocabulary, hidden size), but got "
                    f"{list(weight.shape)}. This draft model was made for another target."
                )
        self._embed, self._head = _frozen(embed_weight), _frozen(head_weight)
        self._kept: tuple[tuple, Tensor] | None = None

    def __deepcopy__(self, memo: dict) -> BoundVocabulary:
        return self  # lent, not owned

    def embed(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """ids [...] -> [...,H]."""
        return self._embed[ids].to(dtype)

    def head(self, draft_ids: Tensor | None, dtype: torch.dtype, device: torch.device) -> Tensor:
        """LM head rows [Vd,H] of the draft vocabulary (all when draft_ids is None)."""
        if draft_ids is None and self._head.dtype == dtype and self._head.device == device:
            return self._head
        version = None if draft_ids is None else (draft_ids.data_ptr(), draft_ids._version)
        key = (dtype, device, version)
        if self._kept is None or self._kept[0] != key:
            rows = self._head if draft_ids is None else self._head[_checked(draft_ids, self._head.shape[0])]
            self._kept = (key, rows.to(device=device, dtype=dtype))
        return self._kept[1]


def _checked(draft_ids: Tensor, vocab_size: int) -> Tensor:
    ascending = bool((draft_ids[1:] > draft_ids[:-1]).all())
    if not ascending or int(draft_ids[0]) < 0 or int(draft_ids[-1]) >= vocab_size:
        raise DsparkError(
            f"draft vocabulary: expected ascending ids from 0 to {vocab_size - 1}, but got "
            f"{draft_ids[:4].tolist()}…{draft_ids[-1:].tolist()}. Load a checkpoint that holds draft_ids, or make them "
            "again from the training data."
        )
    return draft_ids


def _frozen(weight: Tensor) -> Tensor:
    """Without gradient; the same object where it needs none, so that the ops' packed copy is shared with the target."""
    return weight.detach() if weight.requires_grad else weight
