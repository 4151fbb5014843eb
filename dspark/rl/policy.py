"""A target whose weights are trained. The runner and the trainer read the same memory, through the same operations.

``Engine(policy.target)`` generates with the current weights at any time; ``policy.logprobs`` gives the bits that the
engine recorded, with gradients. Both pack the weights anew in every call (0.1 to 0.2 s for 135M weights on two cores),
so that no write goes unseen. copy.deepcopy gives a reference or an average. Left out on purpose: losses, rewards and
the loop around them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dspark import ops
from dspark.contracts import DsparkError
from dspark.rl.support import Support, logprob_on
from dspark.runner.score import Finished, check_finished, response_logits, score
from dspark.target.decoder import Target


def _key(name: str) -> str:
    return name.replace(".", "_")


class Policy(nn.Module):
    """state_dict: the fused weights in the target's dtype, under their names with dots written as underscores."""

    def __init__(self, target: Target):
        super().__init__()
        self.weights = nn.ParameterDict()

        def own(name: str, tensor: Tensor) -> Tensor:
            self.weights[_key(name)] = nn.Parameter(tensor.detach().clone())
            return self.weights[_key(name)]

        self.target = target.remade(own)  # a plain object: nn.Module sees the parameters once, in `weights`

    def logprobs(self, sequences: Sequence[Finished], support: Support | None = None) -> tuple[Tensor, Tensor]:
        """(logprobs, raw_logprobs) [sum of response lengths] fp32 with gradients; see runner.score.score. support: the
        tokens that the laws kept when they were sampled from (support.py), for weights that have moved since."""
        self._check_shared()
        if support is None:
            return score(self.target, sequences)
        check_finished(self.target, sequences)
        logits, tokens, laws = response_logits(self.target, sequences)
        return logprob_on(support, logits, tokens, laws), ops.raw_logprob(logits, tokens)

    @torch.no_grad()
    def supports(self, sequences: Sequence[Finished]) -> tuple[Tensor, Tensor, Support]:
        """As logprobs without gradients, and the tokens that each law keeps with the weights as they are."""
        self._check_shared()
        check_finished(self.target, sequences)
        logits, tokens, laws = response_logits(self.target, sequences)
        shaped = laws.shape(logits)
        return ops.log_of(shaped, tokens), ops.raw_logprob(logits, tokens), Support.of(shaped)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As nn.Module's, into the weights that are there: replacing them would leave the runner with the old ones."""
        if assign:
            raise DsparkError(
                "policy: expected assign=False, but got True: the runner shares the weights. Leave it out."
            )
        return super().load_state_dict(state_dict, strict)

    def _check_shared(self) -> None:
        replaced = [name for name, tensor in self.target.tensors() if self.weights[_key(name)] is not tensor]
        if replaced:
            raise DsparkError(
                f"policy: expected the weights that the runner shares, but {replaced[0]} was replaced by another "
                "tensor. Change weights in place (copy_, load_state_dict, an optimizer)."
            )

    forward = logprobs
