"""Training of the draft model and of its confidence head (Lightning modules, data, losses). The target stays frozen."""
