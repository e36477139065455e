"""One sealed snapshot of this node's ranks, arena → durable storage.

`header.due` chooses which, the drain process when. Each node writes its own ranks' parts; the node of global rank 0
commits when the parts of all nodes are there.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from crc32c import crc32c

from ..resilience import clock
from ..resilience.errors import MachineError, SiteError, SnapshotError
from . import catalog, commit, layout, slabs
from .arena import Slot, View
from .header import Stamp
from .layout import Attempt
from .manifest import RankManifest
from .tensors import Table

POLL_S = 0.05
"""Between looks for other nodes' manifests: one `stat` a rank, on a file system that may be shared."""


@dataclass(frozen=True, kw_only=True)
class DrainReport:
    stamp: Stamp
    directory: Path
    payload_bytes: int
    """Of this node's ranks."""
    commits: bool
    """This node holds global rank 0: the snapshot is committed. Any other node's parts are there, and no more is known."""
    write_s: float
    """Slots were held for so long."""
    commit_s: float
    """Waiting for the other nodes, and COMMIT."""


def drain(
    slots_by_rank: Sequence[Sequence[Slot]], attempt: Attempt, root: Path, deadline_s: float
) -> DrainReport | None:
    """Make `attempt`'s snapshot durable and mark its slots drained; None when the arena does not hold it (any more).

    The node that commits waits at most `deadline_s` for the others. Raises SiteError (no space, no permission, a node that does not
    deliver: try again) or SnapshotError (this snapshot can't be written, ever); what is left over is not a snapshot.
    """
    directory = attempt.under(root)
    started = clock.monotonic_s()
    try:
        if commit.there(directory / layout.REJECTED):
            raise SnapshotError(f"{directory} was rejected before; it is not written again")
        with _reading(slots_by_rank, attempt.stamp) as held:
            if held is None:
                return None
            ranks, world = [view.header.rank for _, view in held], held[0][1].header.world
            if 0 in ranks:
                there = {slot.header().stamp for slots in slots_by_rank for slot in slots}
                catalog.sweep(root, attempt, there)
            if not commit.committed(directory):
                commit.make_directory(directory)
                for _, view in held:
                    _write_part(view, directory)
            if any(slot.header().stamp != attempt.stamp or not slot.header().whole for slot, _ in held):
                return None  # given up by its rank meanwhile: the job went back to before it
            payload_bytes = sum(len(view.payload) for _, view in held)
        written = clock.monotonic_s()
        if 0 in ranks:
            _finish(directory, world, until_s=written + deadline_s)
    except OSError as error:
        raise MachineError(f"{error.filename or root}: {error.strerror}") from error
    with _reading(slots_by_rank, attempt.stamp) as held:
        for slot, _ in held or ():
            slot.mark_drained()
    return DrainReport(
        stamp=attempt.stamp,
        directory=directory,
        payload_bytes=payload_bytes,
        commits=0 in ranks,
        write_s=written - started,
        commit_s=clock.monotonic_s() - written,
    )


@contextmanager
def _reading(slots_by_rank: Sequence[Sequence[Slot]], stamp: Stamp) -> Iterator[list[tuple[Slot, View]] | None]:
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


def _write_part(view: View, directory: Path) -> None:
    """One rank's slab, and then its manifest; nothing if it is there, for the same attempt has the same bytes."""
    rank, table = view.header.rank, Table.from_json(view.table)
    if table.payload_bytes != len(view.payload):
        raise SnapshotError(
            f"rank {rank}'s slot holds {len(view.payload)} bytes, and its table says {table.payload_bytes}"
        )
    if commit.there(directory / layout.manifest_name(rank)):
        return
    slab = directory / layout.slab_name(rank)
    shutil.rmtree(slab, ignore_errors=True)  # torn by the death of a drain process before this one
    try:
        slabs.write(slab.absolute().as_uri(), view.payload, table.chunk_bytes)
        for path in ((slab / slabs.SHARD).parent, slab, directory):
            commit.sync_directory(path)
        size = table.chunk_bytes
        manifest = RankManifest(
            attempt=directory.name,
            rank=rank,
            world=view.header.world,
            table=table,
            metadata_sha256=sha256(commit.read(slab / slabs.METADATA)).hexdigest(),
            shard_bytes=(slab / slabs.SHARD).stat().st_size,
            chunk_crc32c=tuple(crc32c(view.payload[at : at + size]) for at in range(0, len(view.payload), size)),
        )
        commit.write_whole(directory / layout.manifest_name(rank), manifest.to_json())
    except (SiteError, OSError):
        shutil.rmtree(slab, ignore_errors=True)  # the space may be what is lacking
        raise


def _finish(directory: Path, world: int, until_s: float) -> None:
    """Commit once all parts are there."""
    while not commit.committed(directory):
        missing = commit.missing_ranks(directory, world)
        if not missing:
            commit.commit(directory, world)
        elif clock.monotonic_s() > until_s:
            raise SiteError(f"{directory} lacks the parts of ranks {missing}: their nodes do not deliver")
        else:
            clock.sleep(POLL_S)
