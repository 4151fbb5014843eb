"""A target whose weights are trained. The runner and the trainer read the same memory, through the same operations.

``Engine(policy.target)`` generates with the current weights at any time (packed copies are made anew after a step);
``policy.logprobs`` gives the bits that the engine recorded, with gradients. copy.deepcopy gives a reference or an
average. Left out on purpose: losses, rewards and the loop around them.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from dspark.runner.score import Finished, score
from dspark.target.decoder import Target


class Policy(nn.Module):
    """state_dict: the fused weights in the target's dtype, under their names with dots written as underscores."""

    def __init__(self, target: Target):
        super().__init__()
        self.weights = nn.ParameterDict()

        def own(name: str, tensor: Tensor) -> Tensor:
            self.weights[name.replace(".", "_")] = nn.Parameter(tensor.detach().clone())
            return self.weights[name.replace(".", "_")]

        self.target = target.remade(own)  # a plain object: nn.Module sees the parameters once, in `weights`

    def logprobs(self, sequences: Sequence[Finished]) -> tuple[Tensor, Tensor]:
        """(logprobs, raw_logprobs) [sum of response lengths] fp32 with gradients; see runner.score.score."""
        return score(self.target, sequences)

    forward = logprobs
