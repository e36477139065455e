"""Writes one sealed snapshot of this node's ranks from the arena (shared memory) to durable storage.

`slot_header.due` chooses the snapshot, and the drain process chooses the moment. Each node writes its own ranks' parts. The node of global
rank 0 commits when the parts of all nodes exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from ...resilience import clock
from ...resilience.errors import MachineError, SiteError, SnapshotError
from ..arena.arena import Slot, View
from ..arena.slot_header import Stamp
from ..backend.filesystem import Files
from ..backend.object_store import Objects
from ..backend.paths import Attempt
from ..backend.place import Place
from ..slabs import node_write
from ..slabs.slab_writer import Writer
from . import catalog, commit

POLL_S = {Files: 0.05, Objects: 1.0}
"""Seconds between two polls for other nodes' manifests. A poll is one `stat` per rank on a file system that may be shared, or one request
per rank."""


PATIENCE_S = 10.0
"""The committing node waits this many seconds for other nodes' parts before it turns to a newer snapshot. If twice the time that its own
parts took is longer, it waits that long."""


@dataclass(frozen=True, kw_only=True)
class DrainReport:
    stamp: Stamp
    snapshot: Place
    written_bytes: int
    """Bytes in the slabs of this node's ranks. Data that several ranks share counts once."""
    commits: bool
    """True on the node of global rank 0: the snapshot is committed. False on any other node: its parts exist, and it does not know about
    the commit."""
    write_s: float
    """Seconds during which slots were locked."""
    commit_s: float
    """Seconds during which the node waited for the other nodes and wrote COMMIT."""


def drain(
    slots_by_rank: Sequence[Sequence[Slot]],
    attempt: Attempt,
    root: Place,
    deadline_s: float,
    write: Writer,
    newer: Callable[[], bool] = lambda: False,
) -> DrainReport | None:
    """Make `attempt`'s snapshot durable with `write`, and mark its slots drained. Return None if the arena no longer contains it, or if a
    `newer` snapshot waits and is preferred. (A node that could not write for some time may have only the newer one, and never this one.)

    The committing node waits at most `deadline_s` for the other nodes. Raises SiteError for a failure that a retry may cure: no space, no
    permission, a node that does not deliver. Raises SnapshotError if this snapshot can never be written. Files that remain then are not a
    snapshot.
    """
    snapshot = attempt.under(root)
    started = clock.monotonic_s()
    try:
        if commit.set_aside(snapshot):  # writing it again would first delete it
            raise SnapshotError(f"{snapshot} was set aside before; it is not written again")
        with holding(slots_by_rank, attempt.stamp) as held:
            if held is None:
                return None
            ranks, world = [view.header.rank for _, view in held], held[0][1].header.world
            if 0 in ranks:
                catalog.sweep(root, attempt, _resumable(slots_by_rank, root, alone=world == len(ranks)))
            parts = node_write.divide([view for _, view in held])
            if commit.committed(snapshot):
                snapshot.sync()  # the node that committed it may have failed before its name was durable
            else:
                node_write.write(parts, snapshot, write)
            if _discarded(held):
                return None
        written = clock.monotonic_s()
        patience_s = max(PATIENCE_S, 2 * (written - started))
        if 0 in ranks and not _finish(snapshot, world, held, written + deadline_s, written + patience_s, newer):
            return None
    except OSError as error:
        raise MachineError(f"{error.filename or root}: {error.strerror}") from error
    with holding(slots_by_rank, attempt.stamp) as held:
        for slot, _ in held or ():
            slot.mark_drained()
    return DrainReport(
        stamp=attempt.stamp,
        snapshot=snapshot,
        written_bytes=sum(share.nbytes for share in parts),
        commits=0 in ranks,
        write_s=written - started,
        commit_s=clock.monotonic_s() - written,
    )


@contextmanager
def holding(slots_by_rank: Sequence[Sequence[Slot]], stamp: Stamp) -> Iterator[list[tuple[Slot, View]] | None]:
    """Yield the slot of every local rank with this `stamp`. These slots do not change during the block. Yield None unless every rank has
    such a slot."""
    with ExitStack() as stack:
        held: list[tuple[Slot, View]] = []
        for slots in slots_by_rank:
            headers = ((slot, slot.header()) for slot in slots)  # a freed slot keeps its stamp
            slot = next((slot for slot, header in headers if header.stamp == stamp and header.whole), None)
            view = None if slot is None else stack.enter_context(slot.reading())
            if slot is None or view is None or view.header.stamp != stamp:
                yield None
                return
            held.append((slot, view))
        yield held


def _discarded(held: Sequence[tuple[Slot, View]]) -> bool:
    """Return whether a rank has discarded the snapshot, because the job went back to an earlier step."""
    return any(slot.header().stamp != view.header.stamp or not slot.header().whole for slot, view in held)


def _resumable(slots_by_rank: Sequence[Sequence[Slot]], root: Place, *, alone: bool) -> set[Stamp]:
    """Return the stamps of older attempts whose remains must stay. There are none if this node is `alone` and writes files, because it may
    need their space. Otherwise other nodes may still be writing them. In an object store, nothing is deleted that may be written again."""
    if alone and isinstance(root, Files):
        return set()
    return {slot.header().stamp for slots in slots_by_rank for slot in slots}


def _finish(
    snapshot: Place,
    world: int,
    held: Sequence[tuple[Slot, View]],
    until_s: float,
    patient_until_s: float,
    newer: Callable[[], bool],
) -> bool:
    """Commit once all parts exist. Return False if the snapshot is abandoned. That happens if a node is gone and the others continue from
    another step, or if a newer snapshot waits."""
    while not commit.committed(snapshot):
        missing = commit.missing_ranks(snapshot, world)
        if not missing:
            commit.commit(snapshot, world, clock.wall_s())
        elif _discarded(held) or (clock.monotonic_s() > patient_until_s and newer()):
            return False
        elif clock.monotonic_s() > until_s:
            raise SiteError(f"{snapshot} lacks the parts of ranks {missing}: their nodes have not written them in time")
        else:
            clock.sleep(POLL_S[type(snapshot)])
    return True
