"""Training a policy on its own rollouts: the target's weights as parameters, shared with the runner."""
