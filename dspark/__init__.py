"""dspark: train, calibrate and run speculative decoders whose rollouts can be regenerated bit for bit.

Importing this package pulls in neither lightning, triton nor transformers; the rooms below it do, where they need them.
"""

__version__ = "0.1.0"
