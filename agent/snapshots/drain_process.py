"""The process beside the ranks that writes sealed snapshots to storage: arena (shared memory) → store. The process prints one JSON line per
event.

`python -m mt_resilient.agent.snapshots.drain_process '{"arena": [["/proc/7/fd/5", …], …], "root": "/data/job", …}'`: the argument is a
`DrainConfig`. Neither the load nor the death of this process affects the ranks. The process obeys lines on its stdin. "protect NAME …"
lists the snapshots that must not be deleted, whatever their age. At "finish", or at the end of stdin, the process writes all pending
snapshots, with a few tries each, and exits. If a buddy (a node that exchanges copies) is configured, threads of `buddy/service.py` exchange
copies meanwhile. The lines "copy [HOST:PORT]" and "fetch HOST:PORT GENERATION REWINDS STEP FIRST-RANK" control them. "reserve BYTES"
allocates memory for a later fetch. A slow disk can take minutes for a write, but it delays neither these lines nor the events of copies.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from itertools import chain

from ...checkpoint.arena.arena import Slot
from ...checkpoint.arena.slot_header import Stamp, due
from ...checkpoint.backend import paths, place
from ...checkpoint.backend.paths import Attempt
from ...checkpoint.durable import catalog
from ...checkpoint.durable.retention import RetentionPolicy, Stored
from ...checkpoint.durable.save import drain
from ...checkpoint.slabs.slab_writer import writer
from ...resilience import clock
from ...resilience.errors import MachineError, ResilientError, SiteError, UsageError
from ...resilience.ipc import clock_watch
from ..buddy.buddy_config import BuddyConfig, Event, Tell
from ..buddy.service import Buddy

BACKOFF_S = (1.0, 60.0)
"""Seconds to wait after the first failure in a row, and the longest wait. Each further failure of a write in a row doubles the wait."""
OUTDATED_S = 5.0
"""Seconds that the process, before it exits, waits for other nodes' parts of a snapshot that is older than a committed snapshot."""
LAST_TRIES = 5
"""How many times each pending snapshot is tried before the process exits. The waits between the tries take 15 s in total."""


@dataclass(frozen=True, kw_only=True)
class DrainConfig(RetentionPolicy):
    arena: list[list[str]]
    """Paths of the slots (shared memory for one rank's part of one snapshot), per local rank."""
    root: str
    """Address of the place (a directory or object store) that holds `snapshots/`."""
    run: str
    """Eight hexadecimal digits that identify this run. All its nodes have the same digits."""
    local_ranks: int
    """How many of the ranks in `arena` take part."""
    reserve_bytes: int = 0
    """Bytes that are allocated immediately in the first slot of each rank, for a later fetch."""
    protected: Sequence[str] = ()
    """Names of snapshots that are never deleted as too old, until a `protect` line names others."""
    max_write_mb_per_s: float = 0.0
    """Highest write rate to the store, in 10^6 bytes per second; 0: no limit."""
    poll_s: float = 0.05
    """Seconds between two polls of the slots' headers."""
    deadline_s: float = 600.0
    """Seconds that other nodes may take to write their parts of a snapshot."""
    buddy: BuddyConfig | None = None
    """Settings for copies between this node's memory and other nodes' memory; None: no copies."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.local_ranks <= len(self.arena) or self.poll_s <= 0:
            raise UsageError(
                f"drain: local_ranks and poll_s have to be positive, and the arena must have at least local_ranks rows: {self}"
            )
        if len(self.run) != 8 or not set(self.run) <= set("0123456789abcdef"):
            raise UsageError(f"drain: run has to be eight hexadecimal digits, and is {self.run!r}")

    @classmethod
    def from_json(cls, text: str) -> DrainConfig:
        found = json.loads(text)
        if unknown := found.keys() - {field.name for field in fields(cls)}:
            raise UsageError(f"drain: there is no configuration key {', '.join(sorted(unknown))}")
        if found.get("buddy") is not None:
            found["buddy"] = BuddyConfig.from_object(found["buddy"])
        return cls(**found)


class Orders:
    """Reads the agent's lines from stdin, and obeys them."""

    def __init__(self, fd: int, protected: Sequence[str], reserve_bytes: int = 0, buddy: Buddy | None = None) -> None:
        self._fd, self._buddy = fd, buddy
        self.reserve_bytes = reserve_bytes
        self.finish = threading.Event()
        self.protected = _attempts(protected)

    def listen(self) -> None:
        """Obey lines until "finish", or until the agent is gone. Runs in its own thread."""
        try:
            with os.fdopen(self._fd, "rb", closefd=False) as lines:
                for line in lines:
                    word, *names = line.decode().split()
                    if word == "finish":
                        return
                    self._heard(word, names)
        finally:
            self.finish.set()

    def _heard(self, word: str, names: list[str]) -> None:
        if word == "protect":
            self.protected = _attempts(names)
        elif word == "reserve":
            self.reserve_bytes = int(names[0])
        elif self._buddy and word == "copy":
            self._buddy.send_to("".join(names))
        elif self._buddy and word == "fetch":
            generation, rewinds, step, first_rank = map(int, names[1:])
            self._buddy.fetch(names[0], Stamp(generation, rewinds, step), first_rank)


def _attempts(names: Sequence[str]) -> frozenset[Attempt]:
    return frozenset(attempt for name in names if (attempt := Attempt.parse(name)))


class Drain:
    """The state of the drain loop: the slots, the snapshots that were given up, and the time of the next try."""

    def __init__(self, config: DrainConfig, orders: Orders) -> None:
        self._config, self._orders = config, orders
        self._root = place.at(config.root)
        self._slots = [[Slot(path) for path in row] for row in config.arena[: config.local_ranks]]
        self._write = writer(self._root, config.max_write_mb_per_s * 1e6)
        self._given_up: set[Stamp] = set()
        self._known: dict[Attempt, Stored] = {}
        self._failures = 0
        self._not_before_s = 0.0
        self._reserved_bytes = 0
        self._newest: Stamp | None = None
        """The newest snapshot that this process has committed."""

    def tick(self, *, finishing: bool = False) -> Iterator[Event]:
        """Write the one snapshot that is due, if any, and yield events. finishing: give up each snapshot after a few tries."""
        if clock.monotonic_s() < self._not_before_s:
            return
        stamp = self.due()
        if stamp is None:
            return
        try:
            attempt = Attempt(run=self._config.run, stamp=stamp)
            older = self._newest is not None and stamp < self._newest
            outdated = finishing and older

            def newer() -> bool:
                return (self.due() or stamp) > stamp

            def stop() -> bool:
                """Whether "finish" came during the wait for an outdated snapshot. `tick` then retries it for OUTDATED_S seconds."""
                return older and not finishing and self._orders.finish.is_set()

            # Without its storage, the job would fill the directory below a mount point.
            if not (self._root / paths.SNAPSHOTS).there(paths.JOB):
                raise SiteError(
                    f"{self._root} does not hold the snapshots of this job: it was unmounted, moved or deleted"
                )
            deadline_s = OUTDATED_S if outdated else self._config.deadline_s
            report = drain(self._slots, attempt, self._root, deadline_s, self._write, newer, stop)
        except Exception as error:  # for example, a slot was overwritten: give up this snapshot, not the others
            last = outdated or (finishing and self._failures + 1 >= LAST_TRIES)
            yield self._failed(stamp, error, again=isinstance(error, SiteError) and not last)
            yield from self._retire()  # deleting outdated or abandoned snapshots may free the missing space
            return
        self._failures, self._not_before_s = 0, 0.0
        if report is None:
            if finishing:
                self._given_up.add(stamp)
            return
        yield {
            "event": "durable" if report.commits else "written",
            "step": stamp.step,
            "generation": stamp.generation,
            "bytes": report.written_bytes,
            "seconds": round(report.seconds, 3),
            "directory": str(report.snapshot),
        }
        if report.commits:
            self._newest = max(stamp, self._newest or stamp)
            # An order may have gone back to this snapshot, and newer ones may not be marked as set aside yet.
            yield from self._retire(frozenset({attempt}))

    def _retire(self, written: frozenset[Attempt] = frozenset()) -> Iterator[Event]:
        """Delete old snapshots, if this node is the node that commits (the one with rank 0). written: the snapshot just committed."""
        if not any(slot.header().rank == 0 for slot in self._slots[0]):
            return
        with suppress(MachineError):  # the next snapshot tries again
            spared = self._orders.protected | self._undrained() | written
            for attempt, why in catalog.retire(self._root, self._config, clock.wall_s(), spared, self._known):
                place = str(attempt.under(self._root))
                yield {"event": "retired", "step": attempt.stamp.step, "why": why, "directory": place}

    def _undrained(self) -> frozenset[Attempt]:
        """Return the snapshots that are still to be written from memory. These snapshots must not be deleted on disk. After a kill during
        COMMIT, a snapshot is written again under the same name. In an object store, an earlier deletion that hung could then delete the new
        objects."""
        headers = [slot.header() for slots in self._slots for slot in slots]
        waiting = {header.stamp for header in headers if header.whole and header.durable and not header.drained}
        return frozenset(Attempt(run=self._config.run, stamp=stamp) for stamp in waiting)

    def reserve(self, nbytes: int) -> Iterator[Event]:
        """Allocate memory for a later fetch, unless as much was allocated before."""
        if nbytes <= self._reserved_bytes:
            return
        self._reserved_bytes = nbytes
        try:
            for slots in self._slots:
                slots[0].take(nbytes)
        except MachineError as error:
            yield {"event": "not reserved", "reason": str(error)}
        else:
            yield {"event": "reserved", "bytes": nbytes * len(self._slots)}

    def hurry(self) -> None:
        """Reset the count of failures, because the last tries before the exit begin."""
        self._failures, self._not_before_s = 0, 0.0

    def due(self) -> Stamp | None:
        headers = [[slot.header() for slot in slots] for slots in self._slots]
        return due(headers, self._config.local_ranks, self._given_up)

    def _failed(self, stamp: Stamp, error: Exception, *, again: bool) -> Event:
        retry_in_s = min(BACKOFF_S[0] * 2**self._failures, BACKOFF_S[1]) if again else None
        if retry_in_s is None:
            self._given_up.add(stamp)
        else:
            self._failures += 1
            self._not_before_s = clock.monotonic_s() + retry_in_s
        return {"event": "failed", "step": stamp.step, "reason": _words(error), "retry_in_s": retry_in_s}


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, ResilientError) else f"its slots hold data that cannot be read ({error!r})"


def run(config: DrainConfig, stdin_fd: int, tell: Tell) -> None:
    """Write snapshots until "finish" or the end of `stdin_fd`, then write all pending ones. tell: a function that takes events; any thread
    may call it."""
    buddy = Buddy(config.buddy, config.arena[: config.local_ranks], tell) if config.buddy else None
    orders = Orders(stdin_fd, config.protected, config.reserve_bytes, buddy)
    state = Drain(config, orders)
    threading.Thread(target=orders.listen, daemon=True).start()
    while not orders.finish.wait(config.poll_s):
        for event in chain(state.tick(), state.reserve(orders.reserve_bytes)):
            tell(event)
    if buddy:
        buddy.stop()
    state.hurry()
    while state.due() is not None:
        for event in state.tick(finishing=True):
            tell(event)
        clock.sleep(0.01)
    tell({"event": "finished"})


_PRINTING = threading.Lock()


def print_event(event: Event) -> None:
    with _PRINTING:  # each event is one uninterrupted line
        print(json.dumps(event), flush=True)


def main(arguments: list[str]) -> int:
    # Such a signal may reach all processes of the job. This process exits when the agent says so.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    clock_watch.start()  # tensorstore begins no write at an earlier time of day than its last one (measured with 0.1.86)
    try:
        run(DrainConfig.from_json(arguments[0]), sys.stdin.fileno(), print_event)
    except ResilientError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
