"""Fits a calibration by one of three methods: sequential temperatures, Platt scaling, isotonic regression.

All read the same events, are monotone per slot (the order of a slot's confidences never turns), and give the same kind
of record; which one to use is a question for a report on other events.
"""

from __future__ import annotations

from dspark.calibration.events import Events
from dspark.calibration.isotonic import fit_isotonic
from dspark.calibration.measures import DEFAULT_BINS
from dspark.calibration.platt import fit_platt
from dspark.calibration.record import METHODS, Calibration, survival_ece
from dspark.calibration.temperature import fit_temperatures
from dspark.contracts import DsparkError
from dspark.slot_maps import identity

_FITS = dict(zip(METHODS, (fit_temperatures, fit_platt, fit_isotonic), strict=True))


def fit(
    events: Events, drafter_hash: str, method: str = "temperature", data_hash: str | None = None,
    num_bins: int = DEFAULT_BINS,
) -> Calibration:  # fmt: skip
    """Maps for the head whose events these are (the calibration split; report on another one).

    A slot that no round reached is left as it is. data_hash defaults to events.data_hash(). Raises DsparkError on a
    method that is none of METHODS.
    """
    if method not in _FITS:
        raise DsparkError(f"calibration: expected a method of {', '.join(METHODS)}, but got {method!r}.")
    before = survival_ece(events, identity(events.num_slots), num_bins)
    maps = _FITS[method](events, num_bins)
    after = survival_ece(events, maps, num_bins)
    data_hash = events.data_hash() if data_hash is None else data_hash
    slot_events = tuple(events.conditional_observed.sum(0).tolist())
    return Calibration(method, maps, drafter_hash, data_hash, events.num_events, before, after, slot_events)
