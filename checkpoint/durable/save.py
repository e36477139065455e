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
from ..arena.slot_header import Stamp, State
from ..backend.filesystem import Files
from ..backend.object_store import Objects
from ..backend.paths import Attempt
from ..backend.place import Place
from ..slabs import node_write
from ..slabs.slab_writer import Writer
from . import catalog, commit

POLL_S = {Files: 0.2, Objects: 1.0}
"""Seconds between two polls for other nodes' manifests. A poll lists the snapshot's directory, or is one request per rank."""


LOOK_S = 10.0
"""Seconds between two checks whether a node whose parts are missing has written parts of a newer snapshot instead. A check lists all
snapshots."""


@dataclass(frozen=True, kw_only=True)
class DrainReport:
    stamp: Stamp
    snapshot: Place
    written_bytes: int
    """Bytes in the slabs of this node's ranks. Data that several ranks share counts once."""
    commits: bool
    """True on the node of global rank 0: the snapshot is committed. False on any other node: its parts exist, and it does not know about
    the commit."""
    seconds: float
    """Seconds for the write, the wait for the other nodes, and COMMIT."""


def drain(
    slots_by_rank: Sequence[Sequence[Slot]],
    attempt: Attempt,
    root: Place,
    deadline_s: float,
    write: Writer,
    newer: Callable[[], bool] = lambda: False,
    stop: Callable[[], bool] = lambda: False,
) -> DrainReport | None:
    """Make `attempt`'s snapshot durable with `write`, and mark its slots drained. Return None if the arena no longer contains it.

    The committing node waits at most `deadline_s` for the other nodes' parts, however slow these nodes are. Return None if the wait is in
    vain: a `newer` snapshot is due, and another node, which could not write for some time, has written that one and never writes this one.
    Return None too if `stop` ends the wait.

    Raises SiteError for a failure that a retry may cure: no space, no permission, or a node that does not write its parts. Raises
    SnapshotError if this snapshot can never be written. Files that remain after an error are not a snapshot.
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
        if 0 in ranks and not _finish(attempt, root, held, clock.monotonic_s() + deadline_s, newer, stop):
            return None
    except OSError as error:
        raise MachineError(f"{error.filename or root}: {error.strerror}") from error
    for slot in (slot for slots in slots_by_rank for slot in slots if slot.header().stamp == attempt.stamp):
        with slot.reading() as view:  # every slot with this snapshot: one that stayed unmarked would be due for ever
            if view is not None and view.header.stamp == attempt.stamp:
                slot.mark_drained()
    return DrainReport(
        stamp=attempt.stamp,
        snapshot=snapshot,
        written_bytes=sum(share.nbytes for share in parts),
        commits=0 in ranks,
        seconds=clock.monotonic_s() - started,
    )


@contextmanager
def holding(slots_by_rank: Sequence[Sequence[Slot]], stamp: Stamp) -> Iterator[list[tuple[Slot, View]] | None]:
    """Yield the slot of every local rank with this `stamp`. The yielded slots do not change during the block. Yield None unless every rank
    has such a slot."""
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
    """Return whether a rank has discarded the snapshot, because the job went back to an earlier step. A slot that was taken for a later
    step of the same lineage discards nothing: the snapshot's bytes are in the store."""
    headers = [(slot.header(), view.header.stamp) for slot, view in held]
    return any(h.stamp[:2] != stamp[:2] or (h.stamp == stamp and h.state is State.FREE) for h, stamp in headers)


def _resumable(slots_by_rank: Sequence[Sequence[Slot]], root: Place, *, alone: bool) -> set[Stamp]:
    """Return the stamps of older attempts whose remains must stay. If this node is `alone` and writes files, no remains must stay, because
    it may need their space. Other nodes, if there are any, may still be writing older attempts. In an object store, an attempt that may be
    written again must not be deleted."""
    if alone and isinstance(root, Files):
        return set()
    return {slot.header().stamp for slots in slots_by_rank for slot in slots}


def _finish(
    attempt: Attempt,
    root: Place,
    held: Sequence[tuple[Slot, View]],
    until_s: float,
    newer: Callable[[], bool],
    stop: Callable[[], bool],
) -> bool:
    """Commit once all parts exist. Return False if the snapshot is abandoned (`drain` says when), or was set aside meanwhile."""
    snapshot, world = attempt.under(root), held[0][1].header.world
    look_s = clock.monotonic_s() + LOOK_S
    while not commit.committed(snapshot):
        missing, now_s = commit.missing_ranks(snapshot, world), clock.monotonic_s()
        if not missing:
            commit.commit(snapshot, world, clock.wall_s())
            return not commit.set_aside(snapshot)
        if _discarded(held) or stop():
            return False
        if now_s > look_s and newer():
            if catalog.overtaken(root, attempt, missing) and commit.missing_ranks(snapshot, world):
                return False
            look_s = clock.monotonic_s() + LOOK_S
        if now_s > until_s:
            raise SiteError(f"{snapshot} lacks the parts of ranks {missing}: their nodes have not written them in time")
        clock.sleep(POLL_S[type(snapshot)])
    return True
