"""Checks by a mark in storage that this node's place for snapshots is the same as the other nodes'.

    the first agent of a run of the job: a mark into the place, its name into etcd    every other agent: etcd's name, and a look

A directory of that name may exist on every node, and be another one on each. Without this check, that shows only after the first fault: no
node finds the other nodes' parts of a snapshot.
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
    """Leave the mark, or check that it is here. life: number of the first generation since the job was started, or started again. Raises
    UsageError if the mark is not here, MachineError if storage fails, and StoreUnavailable."""
    store, node = seat.store, seat.node
    key = seat.keys.place(life)
    if (known := store.get(key)) is None:
        mine = PREFIX + secrets.token_hex(4)
        snapshots.write(mine, str(node).encode())  # before any agent looks for it
        known = first_put(store, key, f"{mine} {node}".encode())
        if known.value.startswith(mine.encode()):
            return
        with suppress(MachineError):
            snapshots.delete(mine)
    mark, _, first = known.value.decode().partition(" ")
    if not snapshots.there(mark):
        raise UsageError(
            f"{snapshots} is not the same place on {node} as on {first}: what {first} has left there is not to be seen here. Nothing was "
            "started. Name a place that all nodes reach, with --snapshots: a directory on shared storage, or a URL"
        )
