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
"""After so many ranks that are not sound, `verify` looks no further."""


@dataclass(frozen=True)
class Catalog:
    """All attempts under a root, as one look has found them."""

    durable: tuple[Attempt, ...]
    """The committed ones, the newest first: the latest lineage's, for what the job has turned back from is old."""
    certified: frozenset[Attempt]
    """Of these, the ones whose state has proved stable."""
    rejected: tuple[Attempt, ...]
    """The snapshots that were set aside."""
    remains: tuple[Attempt, ...]
    """Neither: under way, or left over."""


def look(root: Place) -> Catalog:
    """Raises MachineError."""
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
    """Where the snapshots under `root` are, the newest first."""
    return [attempt.under(root) for attempt in look(root).durable]


def find(where: str) -> Place:
    """The snapshot that a person means by a path or a URL, the newest of several. Raises as `at` does."""
    return at(place.at(place.address(where)))[0]


def at(place: Place) -> list[Place]:
    """The snapshot that is there, or those below a place that holds `snapshots/`, the newest first. Raises UsageError when there is none,
    MachineError when storage does not answer."""
    if Attempt.parse(place.name) is not None and commit.committed(place):
        return [place]
    found = committed(place)
    if not found:
        raise UsageError(
            f"there is no committed snapshot at {place}; name a run, a snapshot's directory, or a place that holds snapshots/"
        )
    return found


def next_generation(root: Place) -> int:
    """A generation later than any that left something under `root`: what a run without a memory of its own starts at."""
    return 1 + max((attempt.stamp.generation for attempt in _attempts(root)), default=0)


def verify(snapshot: Place) -> list[str]:
    """What is wrong with `snapshot`, one sentence a rank at most, after reading every byte; empty when it is sound. Raises FormatError for
    another version's, of which nothing is known, and MachineError where it cannot be read and nothing else is wrong."""
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
    """SHA-256, in hex, of the state alone: equal for two runs that ended in the same bits.

    Over each rank's tensors (name, dtype, shape, bytes) and other values (name, value) whose name starts with one of
    `include` and with none of `exclude`. Raises SnapshotError when the snapshot is not sound.
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
    """A rank's tensors and other values in order: name; value, or dtype and shape; bytes."""
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
    """Age and size of committed snapshots, of which each COMMIT is read once: `known` is looked at first, and added to. What cannot be read
    now is not known."""
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
    """Delete what `retention.surplus` names, but for what somebody is reading, and never the newest certified one; says what went. known:
    as in `stored`."""
    seen = look(root)
    durable = seen.durable
    protected |= frozenset([attempt for attempt in durable if attempt in seen.certified][:1])
    found = stored(root, durable, {} if known is None else known) if policy.weighs else [*map(Stored.unknown, durable)]
    going = retention.surplus(found, now_s, policy, protected)
    gone = _delete(root, [each.attempt for each in going])
    return [each for each in going if each.attempt in gone]


def sweep(root: Place, current: Attempt, held: Collection[Stamp]) -> list[Attempt]:
    """Delete the remains of attempts that will never be committed, or were being deleted (`retention.dead`). For the node that commits."""
    return _delete(root, retention.dead(look(root).remains, current, held))


def _attempts(root: Place) -> dict[Attempt, set[str]]:
    """Each, and which of its marks are there."""
    found = (root / paths.SNAPSHOTS).holding((paths.COMMIT, paths.REJECTED, paths.CERTIFIED))
    parsed = {Attempt.parse(name): marks for name, marks in found.items()}
    return {attempt: marks for attempt, marks in parsed.items() if attempt is not None}


def _delete(root: Place, going: list[Attempt]) -> list[Attempt]:
    gone = []
    for attempt in going:
        with suppress(MachineError):  # found again next time
            if commit.delete(attempt.under(root)):
                gone.append(attempt)
    return gone
