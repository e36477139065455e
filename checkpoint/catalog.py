"""Which snapshots there are under a root, whether they are sound, and whether two of them hold the same state."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from ..resilience.errors import MachineError, SnapshotError
from . import commit, layout, restore, retention, tree
from .header import Stamp
from .layout import Attempt


def durable(root: Path) -> list[Attempt]:
    """The committed ones under `root`, the newest first: the latest lineage's, for what the job has turned back from is old."""
    found = [attempt for attempt in _attempts(root) if commit.committed(attempt.under(root))]
    return sorted(found, key=lambda attempt: attempt.stamp, reverse=True)


def committed(root: Path) -> list[Path]:
    """Where the snapshots under `root` are, in the order of `durable`."""
    return [attempt.under(root) for attempt in durable(root)]


def rejected(root: Path) -> list[Attempt]:
    """The snapshots under `root` that were set aside."""
    return [attempt for attempt in _attempts(root) if commit.there(attempt.under(root) / layout.REJECTED)]


def next_generation(root: Path) -> int:
    """A generation later than any that left something under `root`: what a run without a memory of its own starts at."""
    return 1 + max((attempt.stamp.generation for attempt in _attempts(root)), default=0)


def verify(snapshot: Path) -> list[str]:
    """What is wrong with `snapshot`, one sentence a rank at most, after reading every byte; empty when it is sound."""
    problems = []
    try:
        world = commit.read_commit(snapshot).world
    except (SnapshotError, MachineError) as error:
        return [str(error)]
    for rank in range(world):
        try:
            table, _ = restore.open_rank(snapshot, rank)
            tree.unflatten(table.skeleton, {piece.name: 0 for piece in table.pieces})
        except (SnapshotError, MachineError) as error:
            problems.append(str(error))
    return problems


def digest(snapshot: Path, include: Sequence[str] = ("",), exclude: Sequence[str] = ()) -> str:
    """SHA-256, in hex, of the state alone: equal for two runs that ended in the same bits.

    Over each rank's tensors (name, dtype, shape, bytes) and other values (name, value) whose name starts with one of
    `include` and with none of `exclude`. Raises SnapshotError when the snapshot is not sound.
    """
    total = sha256()
    for rank in range(commit.read_commit(snapshot).world):
        table, payload = restore.open_rank(snapshot, rank)
        plain: list[tuple[str, Any, Any]] = [(name, value, b"") for name, value in tree.values(table.skeleton)]
        tensors: list[tuple[str, Any, Any]] = [
            (piece.name, [piece.dtype, piece.shape], payload[piece.offset : piece.offset + piece.nbytes])
            for piece in table.pieces
        ]
        for name, what, content in sorted([*plain, *tensors], key=lambda item: (item[0], json.dumps(item[1]))):
            if name.startswith(tuple(include)) and not name.startswith(tuple(exclude)):
                total.update(json.dumps([rank, name, what, len(content)]).encode())
                total.update(content)
    return total.hexdigest()


def retire(root: Path, keep: int) -> list[Attempt]:
    """Delete all but the newest `keep` snapshots; says which ones went."""
    return _delete(root, retention.surplus(durable(root), keep))


def sweep(root: Path, current: Attempt, held: Collection[Stamp]) -> list[Attempt]:
    """Delete the remains of attempts that will never be committed (`retention.dead`). For the node that commits."""
    kept = (layout.COMMIT, layout.REJECTED)
    remains = [each for each in _attempts(root) if not any(commit.there(each.under(root) / name) for name in kept)]
    return _delete(root, retention.dead(remains, current, held))


def _attempts(root: Path) -> list[Attempt]:
    directory = layout.snapshots(root)
    names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
    return [attempt for attempt in map(Attempt.parse, names) if attempt is not None]


def _delete(root: Path, going: list[Attempt]) -> list[Attempt]:
    gone = []
    for attempt in going:
        with suppress(OSError):  # found again next time
            commit.delete(attempt.under(root))
            gone.append(attempt)
    return gone
