"""Whether this node's place for snapshots is that of the job's other nodes: a mark that one of them has left there.

    the first agent of a life of the job: a mark into the place, its name into etcd    every other one: etcd's name, and a look

A directory of that name is on every node. Without this, nobody would notice until after the first fault that it is another one on each,
and that no node finds the others' parts of a snapshot.
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
    """life: number of the first generation since the job was started or started again. Raises UsageError where the mark is not here,
    MachineError where nobody can tell, StoreUnavailable."""
    store, node = seat.store, seat.node
    key = seat.keys.place(life)
    if (known := store.get(key)) is None:
        mine = PREFIX + secrets.token_hex(4)
        snapshots.write(mine, str(node).encode())  # before anybody looks for it
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
