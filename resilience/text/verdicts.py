"""Sentences about what the program has concluded from earlier faults. No program parses them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..model.cause import Kind
from ..model.incident import Incident
from ..model.rewind import AGAIN, BLIND, Origin
from ..model.signals import Repeated
from ..model.types import Step
from . import formatting

_CONCLUSIONS = {
    Origin.TRANSIENT: "it did not recur when the same data was replayed: its origin is unknown",
    Origin.STATE: "it did not recur from an older state: its origin is unknown (the newer state may have been damaged)",
    Origin.DATA: "it recurred with the data, and not without it",
    Origin.UNDECIDED: "it did not recur, but the data may have been other data: its origin is unknown",
    Origin.RESCUED: "it did not recur after a wider skip, with the steps around it computed as [rescue] says: either may have cured it",
    AGAIN: "it recurred",
}


def concluded(incident: Incident) -> str:
    """Return where the fault came from, if the remedy has shown it; empty: it has not."""
    said = _CONCLUSIONS.get(incident.origin, "")
    if incident.origin == Origin.TRANSIENT and incident.repeated is Repeated.OTHER:
        return "it did not recur, but the steps before it gave other results too: its origin is unknown"
    if incident.origin == Origin.TRANSIENT:
        whose = f" of {formatting.ranks(incident.ranks)}" if incident.ranks else ""
        return f"{said} (a transient fault of the hardware{whose} is possible)"
    if incident.ranks and incident.origin == Origin.DATA:
        return f"{said}: the data of {formatting.ranks(incident.ranks)}"
    return said


def _cured(past: Sequence[Incident]) -> str:
    """Return what the program concluded about earlier faults that rewinds in place have cured; empty: there were none."""
    steps: dict[str, list[Step]] = {}
    for incident in past:
        if incident.cause in tuple(Kind) and incident.origin and incident.origin != AGAIN:
            steps.setdefault(concluded(incident), []).append(incident.onset)
    return "; ".join(
        f"at {'step' if len(at) == 1 else 'steps'} {formatting.listed(at)} {words}" for words, at in steps.items()
    )


def tallied(causes: Sequence[str]) -> str:
    """Return a summary of the causes of several faults, such as `2 × rank killed, 1 × rank hung`."""
    return ", ".join(f"{count} × {cause.replace('_', ' ')}" for cause, count in Counter(causes).items())


_OF_DATA = (Origin.DATA, Origin.RESCUED, Origin.UNDECIDED)


def advice(past: Sequence[Incident]) -> str:
    """Return what to check when no remedy has helped. The advice includes what the program has concluded about earlier faults."""
    cured = {incident.origin for incident in past if incident.cause in tuple(Kind)}
    last = next((incident.remedy for incident in reversed(past) if incident.remedy), "")
    data = last in BLIND or not cured.isdisjoint(_OF_DATA)
    hardware = not cured.isdisjoint((Origin.TRANSIENT, Origin.STATE))
    what = ["the model", "its settings", *(["its data"] if data else []), *(["the hardware"] if hardware else [])]
    before = _cured(past)
    return f"Check {formatting.listed(what)}{f'. Earlier faults: {before}' if before else ''}"
