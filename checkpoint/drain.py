"""One sealed snapshot of this node's ranks, arena → durable storage.

`header.due` chooses which, the drain process when. Each node writes its own ranks' parts; the node of global rank 0
commits when the parts of all nodes are there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from hashlib import sha256

from ..resilience import clock
from ..resilience.errors import MachineError, SiteError, SnapshotError
from . import catalog, commit, layout, slabs
from .arena import Slot, View
from .files import Files
from .header import Stamp
from .layout import Attempt
from .manifest import RankManifest
from .objects import Objects
from .stores import Place
from .tensors import Table
from .writers import Writer

POLL_S = {Files: 0.05, Objects: 1.0}
"""Between looks for other nodes' manifests: one `stat` a rank, on a file system that may be shared; or, a second apart, one request."""


@dataclass(frozen=True, kw_only=True)
class DrainReport:
    stamp: Stamp
    snapshot: Place
    payload_bytes: int
    """Of this node's ranks."""
    commits: bool
    """This node holds global rank 0: the snapshot is committed. Any other node's parts are there, and no more is known."""
    write_s: float
    """Slots were held for so long."""
    commit_s: float
    """Waiting for the other nodes, and COMMIT."""


def drain(
    slots_by_rank: Sequence[Sequence[Slot]], attempt: Attempt, root: Place, deadline_s: float, write: Writer
) -> DrainReport | None:
    """Make `attempt`'s snapshot durable with `write` and mark its slots drained; None when the arena does not hold it (any more).

    The node that commits waits at most `deadline_s` for the others. Raises SiteError (no space, no permission, a node that does not
    deliver: try again) or SnapshotError (this snapshot can't be written, ever); what is left over is not a snapshot.
    """
    snapshot = attempt.under(root)
    started = clock.monotonic_s()
    try:
        if snapshot.there(layout.REJECTED):
            raise SnapshotError(f"{snapshot} was rejected before; it is not written again")
        with holding(slots_by_rank, attempt.stamp) as held:
            if held is None:
                return None
            ranks, world = [view.header.rank for _, view in held], held[0][1].header.world
            if 0 in ranks:
                there = {slot.header().stamp for slots in slots_by_rank for slot in slots}
                catalog.sweep(root, attempt, there)
            if not commit.committed(snapshot):
                for _, view in held:
                    write_part(view, snapshot, write)
            if any(slot.header().stamp != attempt.stamp or not slot.header().whole for slot, _ in held):
                return None  # given up by its rank meanwhile: the job went back to before it
            payload_bytes = sum(view.header.payload_bytes for _, view in held)
        written = clock.monotonic_s()
        if 0 in ranks:
            _finish(snapshot, world, until_s=written + deadline_s)
    except OSError as error:
        raise MachineError(f"{error.filename or root}: {error.strerror}") from error
    with holding(slots_by_rank, attempt.stamp) as held:
        for slot, _ in held or ():
            slot.mark_drained()
    return DrainReport(
        stamp=attempt.stamp,
        snapshot=snapshot,
        payload_bytes=payload_bytes,
        commits=0 in ranks,
        write_s=written - started,
        commit_s=clock.monotonic_s() - written,
    )


@contextmanager
def holding(slots_by_rank: Sequence[Sequence[Slot]], stamp: Stamp) -> Iterator[list[tuple[Slot, View]] | None]:
    """Every local rank's slot with `stamp`, all held still; None unless all have it."""
    with ExitStack() as stack:
        held: list[tuple[Slot, View]] = []
        for slots in slots_by_rank:
            slot = next((slot for slot in slots if slot.header().stamp == stamp), None)
            view = None if slot is None else stack.enter_context(slot.reading())
            if slot is None or view is None or view.header.stamp != stamp:
                yield None
                return
            held.append((slot, view))
        yield held


def write_part(view: View, snapshot: Place, write: Writer) -> None:
    """One rank's slab, and then its manifest; nothing if it is there, for the same attempt has the same bytes."""
    rank, table = view.header.rank, Table.from_json(view.table)
    described, held = (table.payload_bytes, len(table.pieces)), (view.header.payload_bytes, view.header.pieces)
    if described != held:
        raise SnapshotError(f"rank {rank}'s slot holds {held} bytes and tensors, and its table says {described}")
    if snapshot.there(layout.manifest_name(rank)):
        return
    slab = snapshot / layout.slab_name(rank)
    with slab.renewed():
        crcs = write(slab, view)
        slab.sync()
        manifest = RankManifest(
            attempt=snapshot.name,
            rank=rank,
            world=view.header.world,
            table=table,
            metadata_sha256=sha256(slab.read(slabs.METADATA)).hexdigest(),
            fingerprints=tuple(f"{each:016x}" for each in view.fingerprints.tolist()),
            chunk_crc32c=tuple(crcs),
        )
        snapshot.write(layout.manifest_name(rank), manifest.to_json())


def _finish(snapshot: Place, world: int, until_s: float) -> None:
    """Commit once all parts are there."""
    while not commit.committed(snapshot):
        missing = commit.missing_ranks(snapshot, world)
        if not missing:
            commit.commit(snapshot, world)
        elif clock.monotonic_s() > until_s:
            raise SiteError(f"{snapshot} lacks the parts of ranks {missing}: their nodes do not deliver")
        else:
            clock.sleep(POLL_S[type(snapshot)])
