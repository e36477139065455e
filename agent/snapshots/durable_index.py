"""The agent's list of the snapshots on disk. A separate thread lists storage, so that hanging storage delays nothing else."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

from ...checkpoint.arena.slot_header import Stamp
from ...checkpoint.backend import paths
from ...checkpoint.backend.filesystem import Files
from ...checkpoint.backend.object_store import Objects
from ...checkpoint.backend.paths import Attempt
from ...checkpoint.backend.place import Place
from ...checkpoint.durable import catalog
from ...resilience.clock import monotonic_s
from ...resilience.errors import ResilientError
from ...resilience.model.types import Step
from ..run_directory import MARK

LOOK_S = {Files: 1.0, Objects: 5.0}
"""Seconds between two listings. A listing of a directory also checks one or two files per snapshot. In an object store, a listing of a
prefix is billed."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What storage contained at one moment. Steps are in ascending order."""

    there: bool = False
    """The place exists, and belongs to this job."""
    durable: tuple[tuple[Step, str], ...] = ()
    """Step and name of each committed snapshot that was not rejected."""
    certified: frozenset[str] = frozenset()
    """Names of the certified snapshots."""
    rejected: tuple[Step, ...] = ()
    """Steps of all snapshots that were set aside."""
    left: frozenset[str] = frozenset()
    """Names of the snapshots that ordered rewinds set aside. Their state is good."""
    unread: tuple[str, ...] = ()
    """Why storage says nothing about single snapshots."""


class Shelf:
    def __init__(self, root: Place) -> None:
        """root: the place (a directory or object store) that holds `snapshots/`."""
        self._root = root
        self._turn = threading.Condition()
        self._asked, self._answered = 0, 0
        self._silent_s = 0.0
        """Since when storage has not answered, in seconds of the monotonic clock."""
        self.seen = Seen()
        threading.Thread(target=self._watch, name="shelf", daemon=True).start()

    def fresh(self, deadline_s: float) -> Seen:
        """Return what storage contains now, or the last known contents if storage takes longer than `deadline_s` to answer. Repeated calls
        wait only once for hanging storage."""
        with self._turn:
            if not self.silent:
                self._silent_s = monotonic_s()
            self._asked += 1
            mine = self._asked
            self._turn.notify_all()
            self._turn.wait_for(
                lambda: self._answered >= mine, timeout=max(0.0, self._silent_s + deadline_s - monotonic_s())
            )
        return self.seen

    @property
    def silent(self) -> bool:
        """True if storage has not yet answered the last request."""
        return self._answered < self._asked

    def _watch(self) -> None:
        while True:
            with self._turn:
                asked = self._asked
            seen = _look(self._root)
            with self._turn:
                self.seen, self._answered, self._silent_s = seen, asked, monotonic_s()
                self._turn.notify_all()
                if self._asked == asked:
                    self._turn.wait(LOOK_S[type(self._root)])


def newest(names: Iterable[str]) -> list[Stamp]:
    """Return the stamps of these snapshots, by ascending step. If several snapshots are of one step, return the newest lineage's."""
    stamps = sorted((attempt.stamp for name in names if (attempt := Attempt.parse(name))), key=lambda it: (it.step, it))
    return [*{stamp.step: stamp for stamp in stamps}.values()]


def _look(root: Place) -> Seen:
    try:
        if not (root / paths.SNAPSHOTS).there(MARK):
            return Seen()
        found = catalog.look(root)
    except ResilientError:
        return Seen()
    durable = sorted((Step(attempt.stamp.step), str(attempt)) for attempt in found.durable)
    rejected = sorted({Step(attempt.stamp.step) for attempt in (*found.rejected, *found.left)})
    certified, left = frozenset(map(str, found.certified)), frozenset(map(str, found.left))
    return Seen(
        there=bool(durable) or not found.unread,  # a job whose only snapshot is hidden must not begin anew
        durable=tuple(durable),
        certified=certified,
        rejected=tuple(rejected),
        left=left,
        unread=tuple(found.unread.values()),
    )
