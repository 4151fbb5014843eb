"""A calibration as a record: a map per slot, what it was fitted on, and the refusal to go stale."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from dspark import probability
from dspark.calibration.events import Events
from dspark.calibration.measures import DEFAULT_BINS, bin_index, ece
from dspark.contracts import DsparkError
from dspark.files import atomic_write
from dspark.sealed import SEAL, read_sealed, sealed
from dspark.slot_maps import CALIBRATION_FORMAT, SlotMap, is_number, rates, read_maps

METHODS = ("temperature", "platt", "isotonic")


@dataclass(frozen=True, slots=True)
class Calibration:
    """Maps per slot, and what they were fitted on.

    method: how they were fitted, of METHODS. maps: of K slots. drafter_hash: the draft model they belong to. data_hash:
    Events.data_hash() of the fit split. num_events: its rounds; slot_events: how many of them decided on each slot (0:
    no data, and no calibration). ece_before, ece_after: ECE of the survival per slot on the fit split without and with
    the maps, None without data. Raises DsparkError on values that cannot be.
    """

    method: str
    maps: tuple[SlotMap, ...]
    drafter_hash: str
    data_hash: str
    num_events: int
    ece_before: tuple[float | None, ...]
    ece_after: tuple[float | None, ...]
    slot_events: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("maps", "ece_before", "ece_after", "slot_events"):
            value = getattr(self, name)
            _expect(isinstance(value, (list, tuple)), name, "a list with one entry per slot", value)
            object.__setattr__(self, name, tuple(value))
        _expect(self.method in METHODS, "method", f"one of {', '.join(METHODS)}", self.method)
        _expect(len(self.maps) > 0, "maps", "one per slot", "none")
        for name in ("ece_before", "ece_after"):
            value = getattr(self, name)
            _expect(len(value) == self.num_slots, name, f"{self.num_slots} entries, one per slot", len(value))
            _expect(all(v is None or is_number(v) for v in value), name, "finite numbers or null", value)
        for name in ("drafter_hash", "data_hash"):
            _expect(isinstance(getattr(self, name), str), name, "a string", getattr(self, name))
        _expect(_is_count(self.num_events), "num_events", "a whole number >= 0", self.num_events)
        counts_fit = len(self.slot_events) in (0, self.num_slots) and all(map(_is_count, self.slot_events))
        _expect(counts_fit, "slot_events", f"{self.num_slots} whole numbers >= 0, or none", self.slot_events)

    @property
    def num_slots(self) -> int:
        return len(self.maps)

    def check(self, drafter_hash: str | None = None, num_slots: int | None = None) -> Calibration:
        """Itself, if it belongs to this draft model and number of slots; else raises DsparkError."""
        _expect(drafter_hash in (None, self.drafter_hash), "drafter_hash", repr(drafter_hash), self.drafter_hash)
        _expect(num_slots in (None, self.num_slots), "maps", f"{num_slots} slots", self.num_slots)
        return self

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, the format's name included."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        plain = {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}
        return {"format": CALIBRATION_FORMAT, **plain, "maps": [m.to_dict() for m in self.maps]}

    @classmethod
    def from_dict(cls, values: Any) -> Calibration:
        """The record that to_dict wrote. Raises DsparkError on another format, a missing or an unknown key."""
        _expect(isinstance(values, dict), "the record", "a JSON object", type(values).__name__)
        found = values.get("format")
        _expect(found == CALIBRATION_FORMAT, "format", repr(CALIBRATION_FORMAT), found)
        keys, given = {f.name for f in fields(cls)}, set(values) - {"format", SEAL}
        _expect(given == keys, "the keys", f"{sorted(keys)}", sorted(given))
        return cls(**{key: values[key] for key in keys} | {"maps": read_maps(values["maps"])})

    def save(self, path: str | Path) -> None:
        """Writes the record as sealed JSON, whole or not. Raises DsparkError when the place cannot be written."""
        atomic_write(path, json.dumps(sealed(self.to_dict()), indent=2, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: str | Path, drafter_hash: str | None = None, num_slots: int | None = None) -> Calibration:
        """Reads a record and checks it against the draft model in use. Raises DsparkError when stale or broken."""
        found = read_sealed(path, "calibration", ("format", CALIBRATION_FORMAT), "Run dspark calibrate again.")
        return cls.from_dict(found).check(drafter_hash, num_slots)


def survival(logits: Tensor, maps: Sequence[SlotMap]) -> Tensor:
    """Probability that the first k + 1 drafts are all accepted: logits [..., K] to the same shape, at least fp32."""
    return probability.survival(rates(logits, maps))


def survival_ece(events: Events, maps: Sequence[SlotMap], num_bins: int = DEFAULT_BINS) -> tuple[float | None, ...]:
    """ECE of the survival per slot (K entries), None for a slot that was never verified."""
    probabilities, observed = rates(events.confidence_logits.double(), maps).cumprod(-1), events.cumulative_observed
    result = []
    for slot, seen in enumerate(observed.unbind(1)):
        p = probabilities[seen, slot]
        result.append(ece(p, events.labels[seen, slot], bin_index(p, num_bins)))
    return tuple(result)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _expect(ok: bool, name: str, wanted: str, got: Any) -> None:
    if not ok:
        raise DsparkError(f"calibration: expected {name} to be {wanted}, but got {got!r}. Run dspark calibrate again.")
