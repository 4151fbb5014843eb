"""How good a draft model is: real speculative rollouts, what they say with intervals, and draft models side by side."""
