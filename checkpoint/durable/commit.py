"""The commit protocol as steps in a store: parts → manifests → COMMIT, each durable before the next. Also undoes a commit.

A snapshot exists if COMMIT exists, REJECTED does not, and an ordered rewind has not left it (`paths.TURNS`); nothing else matters. So after
a kill or a power failure at any moment, the snapshot is complete or it does not exist. A snapshot that an order left is complete too, but
only a person's order may use it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from itertools import takewhile
from typing import NamedTuple

from ...resilience.errors import FormatError, MachineError, SnapshotError
from ..backend import paths
from ..backend.paths import Attempt
from ..backend.place import Place
from ..format.manifest import MANIFEST_BYTES, Commit, Entry, Figures, RankManifest
from ..format.shared_chunks import Sources, check_places


def missing_ranks(snapshot: Place, world: int) -> list[int]:
    """Return the global ranks whose manifests do not exist yet."""
    names = {paths.manifest_name(rank): rank for rank in range(world)}
    return [names[name] for name in snapshot.lacking(names)]


def commit(snapshot: Place, world: int, now_s: float) -> None:
    """Write COMMIT, so that the snapshot exists. now_s: wall-clock seconds. Raises SnapshotError unless all `world` manifests belong to the
    snapshot."""
    entries: list[Entry] = []
    sources: list[Sources] = []
    nbytes = 0
    for rank in range(world):
        data = snapshot.read(paths.manifest_name(rank), MANIFEST_BYTES)
        manifest = _manifest(data, snapshot, rank, world)
        entries.append(Entry(bytes=len(data), sha256=sha256(data).hexdigest()))
        sources.append(manifest.sources)
        nbytes += len(data) + manifest.table.image.file_bytes(len(manifest.sources.own))
    check_places(sources)
    figures = Figures.of(round(now_s, 3), nbytes)
    snapshot.write(paths.COMMIT, Commit(attempt=snapshot.name, ranks=tuple(entries), figures=figures).to_json())


def committed(snapshot: Place) -> bool:
    return snapshot.there(paths.COMMIT) and not set_aside(snapshot)


def set_aside(snapshot: Place) -> bool:
    return snapshot.there(paths.REJECTED) or left(snapshot)


def left(snapshot: Place) -> bool:
    """Whether an ordered rewind has left the snapshot, and no order has come back to it since."""
    return _turns(snapshot) % 2 == 1


def _turns(snapshot: Place) -> int:
    """Return how many of `paths.TURNS` exist."""
    return len([*takewhile(snapshot.there, paths.TURNS)])


def read_commit(snapshot: Place) -> Commit:
    """Return the content of COMMIT, also if an ordered rewind has left the snapshot. Raises SnapshotError if it is missing or belongs to
    another attempt, FormatError if another version wrote it."""
    if snapshot.there(paths.REJECTED):
        raise SnapshotError(f"{snapshot} is not a snapshot: it was rejected: {reason(snapshot).words}")
    if not snapshot.there(paths.COMMIT):
        raise SnapshotError(f"{snapshot} is not a snapshot: it has no COMMIT")
    data = snapshot.read(paths.COMMIT)
    with _named(str(snapshot)):
        found = Commit.from_json(data)
    if found.attempt != snapshot.name:
        raise SnapshotError(f"{snapshot}/{paths.COMMIT} belongs to the attempt {found.attempt}")
    return found


def read_manifest(snapshot: Place, rank: int, promised: Commit) -> RankManifest:
    """Return the manifest of `rank`, if it is the manifest that COMMIT names. Raises SnapshotError otherwise."""
    name, entry = paths.manifest_name(rank), promised.ranks[rank]
    data = snapshot.read(name, entry.bytes)
    if (len(data), sha256(data).hexdigest()) != (entry.bytes, entry.sha256):
        raise SnapshotError(
            f"{snapshot}/{name} is not the manifest that COMMIT names: it is damaged, or from another attempt"
        )
    return _manifest(data, snapshot, rank, promised.world)


def _manifest(data: bytes, snapshot: Place, rank: int, world: int) -> RankManifest:
    """Return the parsed manifest. Raises SnapshotError unless it belongs to this attempt, to `rank`, and to a job of `world` ranks."""
    name = paths.manifest_name(rank)
    with _named(f"{snapshot}/{name}"):
        manifest = RankManifest.from_json(data)
    expected, found = (snapshot.name, rank, world), (manifest.attempt, manifest.rank, manifest.world)
    if found != expected or Attempt.parse(snapshot.name) is None:
        raise SnapshotError(f"{snapshot}/{name} belongs to {found}, but should belong to {expected}")
    return manifest


@contextmanager
def _named(where: str) -> Iterator[None]:
    """Prefix `where` to the message of an error about a file's content."""
    try:
        yield
    except (FormatError, SnapshotError) as error:
        raise type(error)(f"{where}: {error}") from None


class Reason(NamedTuple):
    words: str
    at_s: float | None
    """Wall-clock seconds when the snapshot was set aside; None: not recorded."""


def reason(snapshot: Place, name: str = paths.REASON) -> Reason:
    """Return why and when the snapshot was set aside. name: the file that says so (`Catalog.left`). Raises MachineError."""
    try:
        words, _, at_s = snapshot.read(name).decode(errors="replace").partition(_AT_S)
    except SnapshotError:
        return Reason("no reason was recorded", None)
    return Reason(words[:1000], float(at_s) if at_s.strip().isdecimal() else None)


_AT_S = "\nset aside at (Unix time): "


def certify(snapshot: Place) -> None:
    """Mark a committed snapshot as one whose state has proved stable. Do nothing if the snapshot no longer exists. Raises MachineError."""
    if committed(snapshot) and not snapshot.there(paths.CERTIFIED):
        snapshot.write(paths.CERTIFIED, b"certified\n")


def reject(snapshot: Place, why: str, now_s: float) -> None:
    """Set aside a snapshot that is wrong, unless it is set aside as such already. The snapshot's bytes stay for a while, so that people can
    find the reason (`catalog.retire`). Several nodes may reject the same snapshot at the same time. now_s: wall-clock seconds."""
    if snapshot.there(paths.REJECTED) or not snapshot.there(paths.COMMIT):
        return
    with suppress(MachineError):  # on a full disk, only the reason and the time are lost
        snapshot.write(paths.REASON, f"{why}{_AT_S}{now_s:.0f}".encode())
    try:
        if snapshot.there(paths.COMMIT):
            snapshot.rename(paths.COMMIT, paths.REJECTED)
    except (MachineError, SnapshotError):
        if snapshot.there(paths.COMMIT):  # otherwise another node has renamed or deleted it first
            raise


def leave(snapshot: Place, why: str, now_s: float) -> None:
    """Set aside a snapshot whose state is good, because an ordered rewind has left its lineage. Only another order may use such a snapshot
    (`take_back`). Several nodes may set aside the same snapshot at the same time. now_s: wall-clock seconds. Raises MachineError if storage
    refuses it."""
    turns = _turns(snapshot)
    if turns % 2 == 0 and snapshot.there(paths.COMMIT):
        snapshot.write(paths.TURNS[turns], f"{why}{_AT_S}{now_s:.0f}".encode())


def take_back(snapshot: Place) -> None:
    """Undo `leave`, because the training has come back to this snapshot. Several nodes may do this concurrently. Raises MachineError as
    `leave` does."""
    turns = _turns(snapshot)
    if turns % 2 == 1 and snapshot.there(paths.COMMIT):
        snapshot.write(paths.TURNS[turns], b"an order came back to this snapshot\n")


def returned(snapshot: Place) -> bool:
    """Whether an order has come back to this snapshot before. After such an order, snapshots with higher numbers of generation and rewinds
    may belong to another lineage, although this snapshot is not set aside now."""
    return snapshot.there(paths.TURNS[1])


def mark(snapshot: Place, name: str) -> bool:
    """Write a marker that protects a snapshot from being deleted as too old: ORDERED or KEPT. Return whether the snapshot exists; it may be
    deleted at the same time. Raises MachineError."""

    def exists() -> bool:
        return snapshot.there(paths.COMMIT) or snapshot.there(paths.REJECTED)

    if exists():
        snapshot.write(name, name.encode())
    return exists()


@contextmanager
def reading(snapshot: Place) -> Iterator[None]:
    """Run a block that reads a snapshot. If the store has locks, `delete` does not delete the snapshot meanwhile. If another process has
    deleted the snapshot anyway, its missing bytes are not damage: `reading` raises MachineError in place of SnapshotError or OSError."""
    try:
        with snapshot.reading(paths.COMMIT):
            yield
    except (SnapshotError, OSError) as error:
        if snapshot.there(paths.COMMIT) or snapshot.there(paths.REJECTED):
            raise
        raise MachineError(f"{snapshot} no longer exists: it was deleted while it was being read") from error
    except RecursionError:
        raise SnapshotError(
            f"{snapshot}: its state is nested deeper than this program can follow; it was not read"
        ) from None


def delete(snapshot: Place) -> bool:
    """Delete a snapshot or an attempt. Return False, and do nothing, while a process reads it. COMMIT is deleted first, durably. A kill may
    leave the rest, which `catalog.sweep` deletes."""
    if snapshot.there(paths.COMMIT) and not snapshot.retract(paths.COMMIT):
        return False
    snapshot.clear()
    return True
