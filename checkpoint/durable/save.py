"""Writes one sealed snapshot of this node's ranks from the arena to durable storage.

`slot_header.due` chooses the snapshot, the drain process the moment. Each node writes its own ranks' parts; the node of global rank 0
commits when the parts of all nodes are there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from ...resilience import clock
from ...resilience.errors import MachineError, SiteError, SnapshotError
from ..arena.arena import Slot, View
from ..arena.slot_header import Stamp
from ..backend import paths
from ..backend.filesystem import Files
from ..backend.object_store import Objects
from ..backend.paths import Attempt
from ..backend.place import Place
from ..slabs import node_write
from ..slabs.slab_writer import Writer
from . import catalog, commit

POLL_S = {Files: 0.05, Objects: 1.0}
"""Seconds between looks for other nodes' manifests. A look is one `stat` a rank on a file system that may be shared, or one request a
rank."""


PATIENCE_S = 10.0
"""The committing node waits this long for other nodes' parts before it turns to a newer snapshot. It waits twice as long as its own parts
took if that is more."""


@dataclass(frozen=True, kw_only=True)
class DrainReport:
    stamp: Stamp
    snapshot: Place
    written_bytes: int
    """Of this node's ranks' slabs. A byte that several ranks hold counts once."""
    commits: bool
    """True on the node of global rank 0: the snapshot is committed. On any other node its parts are there, and no more is known."""
    write_s: float
    """How long slots were held."""
    commit_s: float
    """How long the node waited for the others and wrote COMMIT."""


def drain(
    slots_by_rank: Sequence[Sequence[Slot]],
    attempt: Attempt,
    root: Place,
    deadline_s: float,
    write: Writer,
    newer: Callable[[], bool] = lambda: False,
) -> DrainReport | None:
    """Make `attempt`'s snapshot durable with `write`, and mark its slots drained. Return None if the arena does not hold it (any more), or
    if a `newer` one waits and takes its turn. A node that could not write for some time may hold the newer one, and this one never again.

    The node that commits waits at most `deadline_s` for the others. Raises SiteError (no space, no permission, a node that does not
    deliver: try again) or SnapshotError (this snapshot can't be written, ever). What is left over then is not a snapshot.
    """
    snapshot = attempt.under(root)
    started = clock.monotonic_s()
    try:
        if snapshot.there(paths.REJECTED):
            raise SnapshotError(f"{snapshot} was rejected before; it is not written again")
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
            if any(slot.header().stamp != attempt.stamp or not slot.header().whole for slot, _ in held):
                return None  # its rank has given it up: the job went back to an earlier step
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
    """Yield every local rank's slot with `stamp`, none of which changes during the block; None unless all ranks have one."""
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


def _resumable(slots_by_rank: Sequence[Sequence[Slot]], root: Place, *, alone: bool) -> set[Stamp]:
    """Return the stamps whose remains must stay, though they are older than what is written now. There are none if this node is `alone` and
    writes files: their space may be needed. Otherwise other nodes may be writing them. In an object store nothing is deleted that may be
    written again."""
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
    """Commit once all parts are there. Return False if the snapshot is given up: a node is gone, and the others go on from another step; or
    a newer snapshot waits."""
    while not commit.committed(snapshot):
        missing = commit.missing_ranks(snapshot, world)
        if not missing:
            commit.commit(snapshot, world, clock.wall_s())
        elif any(slot.header().stamp != view.header.stamp or not slot.header().whole for slot, view in held) or (
            clock.monotonic_s() > patient_until_s and newer()
        ):
            return False
        elif clock.monotonic_s() > until_s:
            raise SiteError(f"{snapshot} lacks the parts of ranks {missing}: their nodes do not deliver")
        else:
            clock.sleep(POLL_S[type(snapshot)])
    return True
