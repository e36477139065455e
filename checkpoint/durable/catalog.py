"""Lists the snapshots under a root, checks whether they are sound, and computes digests to compare them."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
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

REJECTED_STAY = 2
"""How many of the newest rejected snapshots are never deleted."""
_MOST_PROBLEMS = 16
"""`verify` stops after it has found this many damaged ranks."""


@dataclass(frozen=True)
class Catalog:
    """All attempts (directories into which a snapshot was written) under a root at one moment."""

    durable: tuple[Attempt, ...]
    """The committed attempts, the newest first. A later lineage counts as newer: steps that a rewind undid are old."""
    certified: frozenset[Attempt]
    """The committed attempts whose state has proved stable."""
    rejected: tuple[Attempt, ...]
    """The attempts that were set aside because they are wrong, or because the ranks went back by themselves."""
    left: Mapping[Attempt, str]
    """The attempts that were set aside because an ordered rewind left their lineage, and the file that says why. The state of these
    snapshots is good."""
    remains: tuple[Attempt, ...]
    """The attempts that are neither committed nor set aside: still being written, or left over."""
    unread: Mapping[Attempt, str]
    """The attempts about which the storage says nothing, and its reason. They may be sound, so they stay."""


def look(root: Place) -> Catalog:
    """Return the catalog of `root`. Raises MachineError."""
    return _catalog(*_holding(root, _MARKS))


def look_at_users(root: Place) -> tuple[Catalog, dict[Attempt, set[str]]]:
    """Return the catalog, and for each attempt which of the files ORDERED and KEPT exist. An attempt with such a file belongs to the user.
    Raises MachineError."""
    found, unread = _holding(root, (*_MARKS, *_OF_USERS))
    return _catalog(found, unread), {attempt: marks & {*_OF_USERS} for attempt, marks in found.items()}


def _catalog(found: Mapping[Attempt, set[str]], unread: Mapping[Attempt, str]) -> Catalog:
    rejected = [attempt for attempt, marks in found.items() if paths.REJECTED in marks]
    whole = {
        a: len(marks & _TURNS) for a, marks in found.items() if paths.COMMIT in marks and paths.REJECTED not in marks
    }
    durable = [attempt for attempt, turns in whole.items() if turns % 2 == 0]
    return Catalog(
        certified=frozenset(attempt for attempt in durable if paths.CERTIFIED in found[attempt]),
        durable=tuple(sorted(durable, key=lambda attempt: attempt.stamp, reverse=True)),
        rejected=tuple(rejected),
        left={attempt: paths.TURNS[turns - 1] for attempt, turns in whole.items() if turns % 2 == 1},
        remains=tuple(attempt for attempt, marks in found.items() if not marks & {paths.COMMIT, paths.REJECTED}),
        unread=unread,
    )


_MARKS = paths.COMMIT, paths.REJECTED, paths.CERTIFIED
_OF_USERS = paths.ORDERED, paths.KEPT
_TURNS = frozenset(paths.TURNS)


def committed(root: Place) -> list[Place]:
    """Return the places of the committed snapshots under `root`, the newest first."""
    return [attempt.under(root) for attempt in look(root).durable]


def find(where: str) -> Place:
    """Return the snapshot that a person names by a path or a URL. If the path names several snapshots, return the newest. Raises as `at`
    does."""
    return at(place.at(place.address(where)))[0]


def at(place: Place) -> list[Place]:
    """Return the snapshot at this place, also if an ordered rewind has left it. If the place contains `snapshots/`, return the committed
    snapshots in it, the newest first. Raises UsageError if there is none, MachineError if the storage does not answer."""
    if Attempt.parse(place.name) is not None and (commit.committed(place) or commit.left(place)):
        return [place]
    found = committed(place)
    if not found:
        raise UsageError(
            f"there is no committed snapshot at {place}; name a run, a snapshot's directory, or a place that holds snapshots/"
        )
    return found


def next_generation(root: Place) -> int:
    """Return a generation number greater than those of all attempts under `root`. A run without a record of earlier generations starts with
    this generation."""
    return 1 + max((attempt.stamp.generation for attempt in _holding(root, ())[0]), default=0)


def verify(snapshot: Place, ranks: Sequence[int] | None = None) -> list[str]:
    """Read every byte of `snapshot`, and return what is wrong: at most one sentence per rank, none if it is sound. Raises FormatError if
    another version wrote it; then nothing is known about it. Raises MachineError if some of it cannot be read and nothing else is wrong.
    ranks: read only the parts of these ranks."""
    problems, unread = [], None
    try:
        promised = commit.read_commit(snapshot)
    except SnapshotError as error:
        return [str(error)]
    for rank in range(promised.world) if ranks is None else ranks:
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
            return [*problems, f"ranks {rank + 1} to {promised.world - 1} were not checked"]
    if unread and not problems:
        raise unread
    return problems


def digest(snapshot: Place, include: Sequence[str] = ("",), exclude: Sequence[str] = ()) -> str:
    """Return SHA-256, in hex, of the state alone. Two runs that ended with the same bits have the same digest.

    The digest covers each rank's tensors (name, dtype, shape, bytes) and other values (name, value). Only names that start with one of
    `include`, and with none of `exclude`, count. Raises SnapshotError if the snapshot is not sound.
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
    """Return a rank's tensors and other values, sorted by name: (name, value, no bytes) or (name, dtype and shape, bytes)."""
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
    """Return age and size of committed snapshots. Each file COMMIT is read only once: this function caches its figures (age, size) in
    `known`. If a COMMIT cannot be read now, its figures are unknown."""
    found = []
    for attempt in attempts:
        if attempt not in known:
            with suppress(SnapshotError, FormatError, MachineError):
                figures = commit.read_commit(attempt.under(root)).figures
                known[attempt] = Stored(attempt=attempt, written_s=figures.written_s, bytes=figures.bytes)
        found.append(known.get(attempt, Stored(attempt=attempt)))
    return found


def retire(
    root: Place,
    policy: RetentionPolicy,
    now_s: float,
    protected: frozenset[Attempt] = frozenset(),
    known: dict[Attempt, Stored] | None = None,
) -> list[Going]:
    """Delete the snapshots that `retention.surplus` names, and those that were set aside long ago. Return those that were deleted. A
    snapshot that a process is reading stays, and so do the newest certified one, those that belong to the user, and the REJECTED_STAY
    newest rejected ones: a job whose snapshots are all rejected must not look like a new one. known: as in `stored`."""
    (seen, users), known = look_at_users(root), {} if known is None else known
    durable = seen.durable
    protected |= frozenset([attempt for attempt in durable if attempt in seen.certified][:1])
    protected |= {attempt for attempt, marks in users.items() if paths.KEPT in marks}
    ordered = stored(root, [a for a in durable if paths.ORDERED in users.get(a, ())], known)
    protected |= {each.attempt for each in ordered if policy.stays(each.written_s, now_s)}
    found = stored(root, durable, known) if policy.weighs else [*map(Stored.unknown, durable)]
    going = retention.surplus(found, now_s, policy, protected)
    wrong = dict.fromkeys(sorted(seen.rejected, key=lambda each: each.stamp)[:-REJECTED_STAY], paths.REASON)
    for attempt, mark in {**seen.left, **wrong}.items():
        with suppress(MachineError):  # it cannot be read: it stays
            if attempt not in protected and not policy.stays(commit.reason(attempt.under(root), mark).at_s, now_s):
                going.append(Going(attempt, f"it was set aside more than {policy.keep_own_h:g} h ago"))

    def stays(attempt: Attempt) -> bool:
        """Whether a person has kept the snapshot meanwhile, or an order has left it or come back to it."""
        place = attempt.under(root)
        return place.there(paths.KEPT) or (attempt not in wrong and commit.left(place) != (attempt in seen.left))

    gone = _delete(root, [each.attempt for each in going], stays)
    return [each for each in going if each.attempt in gone]


def overtaken(root: Place, attempt: Attempt, missing: Sequence[int]) -> bool:
    """Return whether a rank whose part of `attempt` is missing has written its part of a newer snapshot of the same run. Raises
    MachineError."""
    names = {*map(paths.manifest_name, missing)}
    found, _ = _holding(root, names)
    return any(a.run == attempt.run and a.stamp > attempt.stamp and marks & names for a, marks in found.items())


def sweep(root: Place, current: Attempt, held: Collection[Stamp]) -> list[Attempt]:
    """Delete the remains of attempts that will never be committed, or whose deletion was interrupted (`retention.dead`). Only the
    committing node (that of global rank 0) may call this."""
    return _delete(root, retention.dead(look(root).remains, current, held))


def _holding(root: Place, names: Collection[str]) -> tuple[dict[Attempt, set[str]], dict[Attempt, str]]:
    """Return each attempt with those of its marker files `names`, and of TURNS, that exist; and the attempts about which the storage says
    nothing, with its reason. Raises MachineError, also if the storage says nothing about any attempt."""
    found = (root / paths.SNAPSHOTS).holding(names, paths.TURNS if names else ())
    parsed = [(attempt, marks) for name, marks in found.items() if (attempt := Attempt.parse(name))]
    known = {attempt: marks for attempt, marks in parsed if not isinstance(marks, str)}
    unread = {attempt: marks for attempt, marks in parsed if isinstance(marks, str)}
    if unread and not known:
        raise MachineError(next(iter(unread.values())))
    return known, unread


def _delete(root: Place, going: list[Attempt], stays: Callable[[Attempt], bool] = lambda _: False) -> list[Attempt]:
    gone = []
    for attempt in going:
        with suppress(MachineError):  # the next call tries again
            if not stays(attempt) and commit.delete(attempt.under(root)):
                gone.append(attempt)
    return gone
