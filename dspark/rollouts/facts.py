"""The facts of a manifest that are hashes of things in memory: the tokenizer, a draft model's calibration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dspark.drafter.confidence import ConfidenceHead
from dspark.files import sha256_json
from dspark.slot_maps import SlotMap


def tokenizer_hash(tokenizer: Any) -> str:
    """sha256 hex over the vocabulary and the chat template."""
    return sha256_json([sorted(tokenizer.get_vocab().items()), tokenizer.chat_template or ""])


def calibration_hash(head: ConfidenceHead | None, calibration: Mapping[str, Any] | None) -> str | None:
    """sha256 hex over a bundle's calibration and the maps in effect, which a switch may have set: they are in every
    round. None without a confidence head."""
    if head is None:
        return None
    if all(one == SlotMap(one.temperature) for one in head.maps):  # as when there was nothing but temperatures
        return sha256_json({"calibration": calibration, "temperatures": [one.temperature for one in head.maps]})
    return sha256_json({"calibration": calibration, "maps": [one.to_dict() for one in head.maps]})
