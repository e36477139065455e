"""Checks, with a marker file in storage, that this node's place for snapshots is the same as the other nodes'.

    first agent of a run of the job: writes a marker into the place, its name into etcd ──▶ every other agent: looks for the marker

A directory with the given path may exist on every node, but be a different directory on each. Without this check, the problem appears only
after the first fault: no node finds the other nodes' parts of a snapshot.
"""

from __future__ import annotations

import secrets
from contextlib import suppress

from ...checkpoint.backend.place import Place
from ...resilience.errors import MachineError, UsageError
from ...resilience.store.protocol import first_put
from ...resilience.store.seat import Seat

PREFIX = ".seen-"


def agree(seat: Seat, life: int, snapshots: Place) -> None:
    """Write the marker if this is the first agent; otherwise check that the marker is here. life: number of the first generation of this
    run of the job. Raises UsageError if the marker is not here, MachineError if storage fails, and StoreUnavailable."""
    store, node = seat.store, seat.node
    key = seat.keys.place(life)
    if (known := store.get(key)) is None:
        mine = PREFIX + secrets.token_hex(4)
        snapshots.write(mine, str(node).encode())  # before any agent looks for the marker
        known = first_put(store, key, f"{mine} {node}".encode())
        if known.value.startswith(mine.encode()):
            return
        with suppress(MachineError):
            snapshots.delete(mine)
    mark, _, first = known.value.decode().partition(" ")
    if not snapshots.there(mark):
        raise UsageError(
            f"{snapshots} is not the same place on {node} as on {first}: the file that {first} wrote there is missing here. Nothing was "
            "started. Name a place that all nodes reach, with --snapshots: a directory on shared storage, or a URL"
        )
