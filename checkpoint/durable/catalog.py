"""Which snapshots there are under a root, whether they are sound, and whether two of them hold the same state."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any

from ...resilience.errors import FormatError, MachineError, SnapshotError, UsageError
from ..arena.memory_limits import room
from ..arena.slot_header import Stamp
from ..backend import paths, place
from ..backend.paths import Attempt
from ..backend.place import Place
from ..format import pytree
from ..format.manifest import RankManifest
from . import commit, load, retention
from .retention import Going, RetentionPolicy, Stored

_MOST_PROBLEMS = 16
"""`verify` stops after this many ranks that are not sound."""


@dataclass(frozen=True)
class Catalog:
    """All attempts under a root, as one look has found them."""

    durable: tuple[Attempt, ...]
    """The committed ones, the newest first. The latest lineage counts as the newest: what the job has turned back from is old."""
    certified: frozenset[Attempt]
    """Of these, the ones whose state has proved stable."""
    rejected: tuple[Attempt, ...]
    """The snapshots that were set aside."""
    remains: tuple[Attempt, ...]
    """Neither committed nor set aside: under way, or left over."""


def look(root: Place) -> Catalog:
    """Return the catalog of `root`. Raises MachineError."""
    found = _attempts(root)
    rejected = [attempt for attempt, marks in found.items() if paths.REJECTED in marks]
    durable = [a for a, marks in found.items() if paths.COMMIT in marks and paths.REJECTED not in marks]
    return Catalog(
        certified=frozenset(attempt for attempt in durable if paths.CERTIFIED in found[attempt]),
        durable=tuple(sorted(durable, key=lambda attempt: attempt.stamp, reverse=True)),
        rejected=tuple(rejected),
        remains=tuple(attempt for attempt, marks in found.items() if not marks & {paths.COMMIT, paths.REJECTED}),
    )


def committed(root: Place) -> list[Place]:
    """Return where the snapshots under `root` are, the newest first."""
    return [attempt.under(root) for attempt in look(root).durable]


def find(where: str) -> Place:
    """Return the snapshot that a person means by a path or a URL, the newest of several. Raises as `at` does."""
    return at(place.at(place.address(where)))[0]


def at(place: Place) -> list[Place]:
    """Return the snapshot that is there, or those below a place that holds `snapshots/`, the newest first. Raises UsageError when there is
    none, MachineError when storage does not answer."""
    if Attempt.parse(place.name) is not None and commit.committed(place):
        return [place]
    found = committed(place)
    if not found:
        raise UsageError(
            f"there is no committed snapshot at {place}; name a run, a snapshot's directory, or a place that holds snapshots/"
        )
    return found


def next_generation(root: Place) -> int:
    """Return a generation later than any that left something under `root`. A run that remembers no earlier generation starts at it."""
    return 1 + max((attempt.stamp.generation for attempt in _attempts(root)), default=0)


def verify(snapshot: Place) -> list[str]:
    """Return what is wrong with `snapshot` after reading every byte: one sentence a rank at most, none if it is sound. Raises FormatError
    for another version's snapshot, of which nothing is known. Raises MachineError if it cannot be read and nothing else is wrong."""
    problems, unread = [], None
    try:
        promised = commit.read_commit(snapshot)
    except SnapshotError as error:
        return [str(error)]
    for rank in range(promised.world):
        try:
            with commit.reading(snapshot):
                manifest = load.open_rank(snapshot, rank, promised=promised)
                for _ in load.proved(snapshot, manifest):
                    pass
            pytree.unflatten(manifest.table.skeleton, {piece.name: 0 for piece in manifest.table.pieces})
        except SnapshotError as error:
            problems.append(str(error))
        except MachineError as error:
            unread = unread or error
        if len(problems) >= _MOST_PROBLEMS and rank + 1 < promised.world:
            return [*problems, f"ranks {rank + 1} to {promised.world - 1} were not looked at"]
    if unread and not problems:
        raise unread
    return problems


def digest(snapshot: Place, include: Sequence[str] = ("",), exclude: Sequence[str] = ()) -> str:
    """Return SHA-256, in hex, of the state alone: equal for two runs that ended in the same bits.

    It covers each rank's tensors (name, dtype, shape, bytes) and other values (name, value) whose name starts with one of `include` and
    with none of `exclude`. Raises SnapshotError when the snapshot is not sound.
    """
    total = sha256()
    with commit.reading(snapshot):
        for manifest in load.open_ranks(snapshot):
            for name, what, content in _state(snapshot, manifest):
                if name.startswith(tuple(include)) and not name.startswith(tuple(exclude)):
                    total.update(json.dumps([manifest.rank, name, what, len(content)]).encode())
                    total.update(content)
    return total.hexdigest()


def _state(snapshot: Place, manifest: RankManifest) -> list[tuple[str, Any, Any]]:
    """Return a rank's tensors and other values in order: name; value, or dtype and shape; bytes."""
    table, size = manifest.table, manifest.table.image.chunk_bytes
    payload = room(table.payload_bytes, f"{snapshot}: what rank {manifest.rank} holds").data
    for index, chunk in load.proved(snapshot, manifest):
        payload[index * size : (index + 1) * size] = chunk
    plain: list[tuple[str, Any, Any]] = [(name, value, b"") for name, value in pytree.values(table.skeleton)]
    tensors: list[tuple[str, Any, Any]] = [
        (piece.name, [piece.dtype, piece.shape], payload[piece.offset : piece.offset + piece.nbytes])
        for piece in table.pieces
    ]
    return sorted([*plain, *tensors], key=lambda item: (item[0], json.dumps(item[1])))


def stored(root: Place, attempts: Sequence[Attempt], known: dict[Attempt, Stored]) -> list[Stored]:
    """Return age and size of committed snapshots. Each COMMIT is read once: what `known` has is not read again, and what is read is added
    to it. If a COMMIT cannot be read now, its figures are unknown."""
    found = []
    for attempt in attempts:
        if attempt not in known:
            with suppress(SnapshotError, FormatError, MachineError):
                figures = commit.read_commit(attempt.under(root)).figures
                known[attempt] = Stored(attempt=attempt, **asdict(figures))
        found.append(known.get(attempt, Stored(attempt=attempt)))
    return found


def retire(
    root: Place,
    policy: RetentionPolicy,
    now_s: float,
    protected: frozenset[Attempt] = frozenset(),
    known: dict[Attempt, Stored] | None = None,
) -> list[Going]:
    """Delete the snapshots that `retention.surplus` names, and return those that were deleted. A snapshot that a process is reading stays,
    and so does the newest certified one. known: as in `stored`."""
    seen = look(root)
    durable = seen.durable
    protected |= frozenset([attempt for attempt in durable if attempt in seen.certified][:1])
    found = stored(root, durable, {} if known is None else known) if policy.weighs else [*map(Stored.unknown, durable)]
    going = retention.surplus(found, now_s, policy, protected)
    gone = _delete(root, [each.attempt for each in going])
    return [each for each in going if each.attempt in gone]


def sweep(root: Place, current: Attempt, held: Collection[Stamp]) -> list[Attempt]:
    """Delete the remains of attempts that will never be committed, or were being deleted (`retention.dead`). Only the node that commits may
    call this."""
    return _delete(root, retention.dead(look(root).remains, current, held))


def _attempts(root: Place) -> dict[Attempt, set[str]]:
    """Return each attempt, and which of its marks are there."""
    found = (root / paths.SNAPSHOTS).holding((paths.COMMIT, paths.REJECTED, paths.CERTIFIED))
    parsed = {Attempt.parse(name): marks for name, marks in found.items()}
    return {attempt: marks for attempt, marks in parsed.items() if attempt is not None}


def _delete(root: Place, going: list[Attempt]) -> list[Attempt]:
    gone = []
    for attempt in going:
        with suppress(MachineError):  # the next call finds it again
            if commit.delete(attempt.under(root)):
                gone.append(attempt)
    return gone
