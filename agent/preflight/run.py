"""Runs the preflight (checks before joining) of one node: probes → verdict of `rules` → why the node is not used."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import psutil

from ...checkpoint.backend.place import Place
from ...resilience.store.seat import Seat
from ..output.event_log import Telling
from . import probes, rules
from .link_test import Meeting
from .rules import PreflightPolicy


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check and its result."""

    what: str
    reasons: tuple[str, ...]
    figures: str = ""


def alone(
    policy: PreflightPolicy, python: str, ranks: int, places: Sequence[Place], environment: Mapping[str, str]
) -> Iterator[Check]:
    """Yield the results of the checks that need no other node. python: the ranks' interpreter. ranks: number of ranks; 0: not known.
    places: the run directory, and the place for the snapshots."""
    free = psutil.virtual_memory().available
    yield Check(what="memory", reasons=rules.memory(free, policy), figures=f"{free / 1e9:.1f} GB free")
    for name, place in {str(place): place for place in places}.items():
        read = probes.storage(place, policy.disk_mib)
        speed = f", {read.mb_per_s:.0f} MB/s" if read.mb_per_s else ""
        room = f"{read.free_bytes / 1e9:.1f} GB free" if read.free_bytes >= 0 else "no limit known"
        yield Check(what=f"storage {name}", reasons=rules.disk(read, policy), figures=room + speed)
    if policy.device_s:
        found = probes.devices(python, policy.device_s, environment)
        figures = ", ".join(f"{each.device} {each.products} products, {each.wrong} wrong" for each in found)
        yield Check(what="devices", reasons=rules.devices(found, ranks, policy), figures=figures)


def told(made: Iterable[Check], telling: Telling) -> tuple[str, ...]:
    """Run the checks and report each. Return the reasons why the node is not fit."""
    reasons: tuple[str, ...] = ()
    for check in made:
        said = "; ".join(check.reasons) or check.figures
        telling.say(f"checked {check.what}: {said}", "bad" if check.reasons else "info")
        reasons = (*reasons, *check.reasons)
    return reasons


def together(policy: PreflightPolicy, seat: Seat, address: str, expected: int, session: str) -> Check:
    """Check the links between nodes that start together. expected: number of these nodes. session: a text unique to this start of the
    agent. Raises StoreUnavailable."""
    links = Meeting(seat, address, policy).links(expected, session)
    node = seat.node
    ours = [link for link in links if node in (link.one, link.other)]
    figures = ", ".join(
        f"{link.other if link.one == node else link.one}: {link.error or rules.figures(link, policy)}" for link in ours
    )
    return Check(
        what="links", reasons=rules.neighbours(node, links, policy), figures=figures or "no other node to measure with"
    )
