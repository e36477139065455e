"""The register of faults. A fault is one function; its docstring is what `mt-resilient chaos --list` says.

The function does it at once, and returns what it did. A fault that lasts returns what ends it, too. It raises NotThere if there is nothing
to strike.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from typing import Any

from ..judgement.history import Seen
from ..judgement.plan import Injection, Kind, Plan
from ..live import clock, network, small_disk
from ..live.job import Job


@dataclass(frozen=True, kw_only=True)
class Done:
    did: str
    end: Callable[[], object] | None = None
    needs_disk: bool = False
    """Whether all memory with a part of the state is lost, so that the job starts from disk."""
    needs_copy: bool = False
    """Whether one node's memory is lost, so that its part comes from another node's."""
    damaged: str = ""
    """Name of the snapshot on disk that was damaged."""
    seen: Seen | None = None
    """What was seen when it struck, if it had to wait for that; None: it struck at its moment."""


Fault = Callable[[Job, Injection], Done]


class Need(Enum):
    """What a fault takes. The value completes "NAME takes"."""

    ROOT = "root, to mount a small file system"
    DEVICE = "root, a loop device and mkfs.ext4 (Debian: e2fsprogs), for a small file system"
    ETCD_DEVICE = "root, a loop device and mkfs.ext4 (Debian: e2fsprogs), for a small file system with etcd's data"
    ONE_NODE = "a job of one node (--nodes 1, or torchrun's --nnodes 1)"
    RANKS = "two ranks or more"
    NODES = "several nodes (--nodes 2 or more)"
    NETWORK = "several nodes (--nodes 2 or more), each in a network namespace: root with CAP_SYS_ADMIN and CAP_NET_ADMIN, and iproute2"
    DELAYS = "a kernel that can delay frames (netem, CONFIG_NET_SCH_NETEM)"
    CLOCK = "a machine of x86-64 with a C compiler (cc)"


@dataclass(frozen=True)
class Entry:
    kind: Kind
    strike: Fault
    needs: tuple[Need, ...]


FAULTS: dict[str, Entry] = {}


def fault(*needs: Need, **known: Any) -> Callable[[Fault], Fault]:
    """Register the function as a fault. known: further fields of its `Kind`."""

    def register(function: Fault) -> Fault:
        name = function.__name__
        kind = Kind(
            name=name,
            says=" ".join((function.__doc__ or "").split()),
            family=function.__module__.rpartition(".")[2],
            **known,
        )
        FAULTS[name] = Entry(kind, function, needs)
        return function

    return register


def lacks(needs: Collection[Need], nodes: int, ranks: int = 2) -> str:
    """Return the first of these that this machine, or a job of so many nodes and ranks, lacks; empty: none."""
    several, alone = nodes > 1, ranks == 1
    return next((need.value for need in needs if not _there(need, several, alone)), "")


@cache
def _there(need: Need, several: bool, alone: bool) -> bool:
    match need:
        case Need.ROOT:
            return small_disk.possible()
        case Need.RANKS:
            return not alone
        case Need.DEVICE | Need.ETCD_DEVICE:
            return small_disk.device_possible()
        case Need.ONE_NODE:
            return not several
        case Need.NODES:
            return several
        case Need.NETWORK:
            return several and network.possible()
        case Need.DELAYS:
            return network.possible() and network.delays()
        case Need.CLOCK:
            return clock.possible()


def needs(plan: Plan) -> set[Need]:
    """Return what the faults of the plan take."""
    return {need for each in plan.injections for need in FAULTS[each.fault].needs}


def kinds(nodes: int = 1, ranks: int = 2) -> dict[str, Kind]:
    """Return all faults by name. A seed draws none that a job of so many nodes and ranks on this machine cannot have."""
    return {
        name: replace(entry.kind, seeded=entry.kind.seeded and not lacks(entry.needs, nodes, ranks))
        for name, entry in FAULTS.items()
    }
