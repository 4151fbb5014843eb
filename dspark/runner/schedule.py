"""How many drafted tokens go to the target: plain Python over counts, no tensor.

This build has the one policy ``fixed``: every request verifies the same number of its drafts, limited by what it may
still produce (its last token never needs a draft behind it). Policies that read the confidences come beside it.
"""

from __future__ import annotations

from dspark.contracts import MTPPredictInfo


def draft_limit(block_size: int, remaining: int) -> int:
    """Drafts worth having for a request that may still produce ``remaining`` tokens: each round adds one of its own."""
    return max(0, min(block_size, remaining - 1))


def fixed(predictions: list[MTPPredictInfo], verify_tokens: int) -> list[int]:
    """Verification length per request: ``verify_tokens``, or all of a shorter block."""
    return [min(verify_tokens, len(prediction.token_ids)) for prediction in predictions]
