"""Context features of a draft layer's own: its own mix of the tapped target layers (DFlare, arXiv:2606.02091).

    c_i = norm_i(fc_i f)    f: the tapped target layers side by side; keys and values of draft layer i come from c_i

The first draft layer keeps the model's `fc` and `hidden_norm`, which every layer reads without this option and which
input fusion reads with and without it; the layers after it have one of these each. Left out on purpose: a tap subset
per layer (a zero in fc_i says the same).
"""

from __future__ import annotations

from torch import nn

from dspark.drafter.config import DrafterConfig
from dspark.drafter.layers import Dense, RMSNorm


class LayerFeatures(nn.Module):
    """A linear map and its norm, beside the model's own pair; see ``Drafter.feature_maps``."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.fc = Dense(len(config.target_layer_ids) * config.hidden_size, config.hidden_size)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
