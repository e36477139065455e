"""One sealed snapshot of this node's ranks, arena → durable storage.

`header.due` chooses which, the drain process when. Each node writes its own ranks' parts; the node of global rank 0
commits when the parts of all nodes are there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256

import numpy as np
from crc32c import crc32c

from ..resilience import clock
from ..resilience.errors import MachineError, SiteError, SnapshotError
from . import catalog, commit, layout, sharing, slabs
from .arena import Slot, View
from .files import Files
from .header import Stamp
from .layout import Attempt
from .manifest import RankManifest
from .objects import Objects
from .sharing import Sources
from .stores import Place
from .tensors import Table
from .writers import Writer

POLL_S = {Files: 0.05, Objects: 1.0}
"""Between looks for other nodes' manifests: one `stat` a rank, on a file system that may be shared; or, a second apart, one request."""


@dataclass(frozen=True, kw_only=True)
class DrainReport:
    stamp: Stamp
    snapshot: Place
    written_bytes: int
    """Of this node's ranks' slabs: each byte that several of them hold, once."""
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
                catalog.sweep(root, attempt, _resumable(slots_by_rank, root, alone=world == len(ranks)))
            parts = _parted([view for _, view in held])
            if commit.committed(snapshot):
                snapshot.sync()  # its name may be what killed or failed the one who committed it
            else:
                for part in parts:
                    _write_part(part, snapshot, write)
            if any(slot.header().stamp != attempt.stamp or not slot.header().whole for slot, _ in held):
                return None  # given up by its rank meanwhile: the job went back to before it
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
        written_bytes=sum(len(part.sources.own) * part.table.image.stride_bytes for part in parts),
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
            headers = ((slot, slot.header()) for slot in slots)  # one that was freed keeps its stamp
            slot = next((slot for slot, header in headers if header.stamp == stamp and header.whole), None)
            view = None if slot is None else stack.enter_context(slot.reading())
            if slot is None or view is None or view.header.stamp != stamp:
                yield None
                return
            held.append((slot, view))
        yield held


def _resumable(slots_by_rank: Sequence[Sequence[Slot]], root: Place, *, alone: bool) -> set[Stamp]:
    """What is left of these stays, though older than what is written now. Nothing where this node is `alone`: it may be the space that is
    lacking. But other nodes may be at it, and in an object store nothing is deleted that may be written again."""
    if alone and isinstance(root, Files):
        return set()
    return {slot.header().stamp for slots in slots_by_rank for slot in slots}


@dataclass(frozen=True)
class _Part:
    """What one rank writes."""

    view: View
    table: Table
    sources: Sources

    @property
    def rank(self) -> int:
        return self.view.header.rank

    def chunk(self, index: int) -> memoryview:
        return self.table.image.chunk(self.view.memory, index)


def _parted(views: Sequence[View]) -> list[_Part]:
    """The ranks' parts: what several hold is written by one, if it is the same to the bit."""
    whole = [_Part(view, _table(view), Sources.whole(view.header.rank, view.header.image.chunks)) for view in views]
    dealt = sharing.deal([part.table for part in whole], [view.fingerprints for view in views])
    for number, writers in enumerate(dealt):
        for chunk, writer in enumerate(writers):
            if writer != number and not _same(whole[number].chunk(chunk), whole[writer].chunk(chunk)):
                writers[chunk] = number
    placed = sharing.placed([part.rank for part in whole], dealt)
    return [replace(part, sources=sources) for part, sources in zip(whole, placed, strict=True)]


def _table(view: View) -> Table:
    table = Table.from_json(view.table)
    described, held = (table.payload_bytes, len(table.pieces)), (view.header.payload_bytes, view.header.pieces)
    if described != held:
        raise SnapshotError(
            f"rank {view.header.rank}'s slot holds {held} bytes and tensors, and its table says {described}"
        )
    return table


def _same(one: memoryview, other: memoryview) -> bool:
    return np.array_equal(np.frombuffer(one, np.uint32), np.frombuffer(other, np.uint32))


def _write_part(part: _Part, snapshot: Place, write: Writer) -> None:
    """One rank's slab, and then its manifest; nothing if it is there, for the same attempt has the same bytes."""
    if snapshot.there(layout.manifest_name(part.rank)):
        return
    slab, image, own = snapshot / layout.slab_name(part.rank), part.table.image, part.sources.own
    with slab.renewed():
        crcs = dict(zip(own, write(slab, part.view, own), strict=True))
        slab.sync()
        manifest = RankManifest(
            attempt=snapshot.name,
            rank=part.rank,
            world=part.view.header.world,
            table=part.table,
            metadata_sha256=sha256(slab.read(slabs.METADATA)).hexdigest(),
            fingerprints=tuple(f"{each:016x}" for each in part.view.fingerprints.tolist()),
            chunk_crc32c=tuple(crcs[i] if i in crcs else crc32c(part.chunk(i)) for i in range(image.chunks)),
            sources=part.sources,
        )
    # It may be there though this fails, and needs its slab.
    snapshot.write(layout.manifest_name(part.rank), manifest.to_json())


def _finish(snapshot: Place, world: int, until_s: float) -> None:
    """Commit once all parts are there."""
    while not commit.committed(snapshot):
        missing = commit.missing_ranks(snapshot, world)
        if not missing:
            commit.commit(snapshot, world, clock.wall_s())
        elif clock.monotonic_s() > until_s:
            raise SiteError(f"{snapshot} lacks the parts of ranks {missing}: their nodes do not deliver")
        else:
            clock.sleep(POLL_S[type(snapshot)])
