"""The process beside the ranks that makes sealed snapshots durable: arena → store, one JSON line on stdout per event.

`python -m mt_resilient.agent.snapshots.drain_process '{"arena": [["/proc/7/fd/5", …], …], "root": "/data/job", …}'`: a
`DrainConfig`. Neither its load nor its death touches the ranks. A line "protect NAME …" on its stdin says which snapshots
the job needs now, whatever their age. It goes on until a line "finish" or the end of its stdin; then it drains what is
pending, with a few tries, and ends. Where it has a buddy, threads of `buddy/service.py` go about that tier meanwhile, as lines
"copy [HOST:PORT]" and "fetch HOST:PORT GENERATION REWINDS STEP FIRST-RANK" say; "reserve BYTES" takes memory for what will be fetched.
What is said on either side waits for no write: a slow disk takes minutes.
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
from ...checkpoint.backend import place
from ...checkpoint.backend.paths import Attempt
from ...checkpoint.durable import catalog
from ...checkpoint.durable.retention import RetentionPolicy, Stored
from ...checkpoint.durable.save import drain
from ...checkpoint.slabs.slab_writer import writer
from ...resilience import clock
from ...resilience.errors import MachineError, ResilientError, SiteError, UsageError
from ..buddy.buddy_config import BuddyConfig, Event, Tell
from ..buddy.service import Buddy

BACKOFF_S = (1.0, 60.0)
"""Wait after the first failure in a row, doubled after each further one up to the last."""
OUTDATED_S = 5.0
"""How long, at the end, other nodes' parts are waited for of a snapshot that is older than one which is committed."""
LAST_TRIES = 5
"""How often what is pending at the end is tried: within 15 s and what the tries themselves take."""


@dataclass(frozen=True, kw_only=True)
class DrainConfig(RetentionPolicy):
    arena: list[list[str]]
    """Paths of the slots, per local rank."""
    root: str
    """Address of the place that holds `snapshots/`."""
    run: str
    """Eight hexadecimal digits that all nodes of this run share, and no other run has."""
    local_ranks: int
    """How many of the arena's ranks take part."""
    reserve_bytes: int = 0
    """Memory that is taken at once in the first slot of each rank, for what will be fetched."""
    protected: Sequence[str] = ()
    """Names of snapshots that are not retired, until another line says which ones are not."""
    max_write_mb_per_s: float = 0.0
    """Limit of the stream to the store, in 10^6 bytes a second; 0 for none."""
    poll_s: float = 0.05
    """Between looks at the headers."""
    deadline_s: float = 600.0
    """How long other nodes may take with their parts."""
    buddy: BuddyConfig | None = None
    """Copies in another node's memory, and of another node in this one's."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.local_ranks <= len(self.arena) or self.poll_s <= 0:
            raise UsageError(f"drain: local_ranks and poll_s have to be positive, and the arena to match: {self}")
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
    """What the agent says, line by line."""

    def __init__(self, fd: int, protected: Sequence[str], reserve_bytes: int = 0, buddy: Buddy | None = None) -> None:
        self._fd, self._buddy = fd, buddy
        self.reserve_bytes = reserve_bytes
        self.finish = threading.Event()
        self.protected = _attempts(protected)

    def listen(self) -> None:
        """Until it is to finish, or nobody is there who would say so: for a thread of its own."""
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
    """The loop's memory: the slots, what was given up, and when to try again."""

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
        """Of those that this process has committed."""

    def tick(self, *, finishing: bool = False) -> Iterator[Event]:
        """Drain the one snapshot that is due, if any. While finishing, each is tried a few times."""
        if clock.monotonic_s() < self._not_before_s:
            return
        stamp = self.due()
        if stamp is None:
            return
        try:
            attempt = Attempt(run=self._config.run, stamp=stamp)
            older = self._newest is not None and stamp < self._newest
            outdated = finishing and older

            def left() -> bool:
                """A newer one is due; or this process is to finish amid the wait for an older one, and tries that for OUTDATED_S then."""
                return (self.due() or stamp) > stamp or (older and not finishing and self._orders.finish.is_set())

            deadline_s = OUTDATED_S if outdated else self._config.deadline_s
            report = drain(self._slots, attempt, self._root, deadline_s, self._write, left)
        except Exception as error:  # of a slot that somebody has written over: it is given up, and the others are not
            last = outdated or (finishing and self._failures + 1 >= LAST_TRIES)
            yield self._failed(stamp, error, again=isinstance(error, SiteError) and not last)
            yield from self._retire()  # what was killed before it got to this, or is too old by now, may be the space that is lacking
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
            "seconds": round(report.write_s + report.commit_s, 3),
            "write_s": round(report.write_s, 3),
            "commit_s": round(report.commit_s, 3),
            "directory": str(report.snapshot),
        }
        if report.commits:
            self._newest = max(stamp, self._newest or stamp)
            yield from self._retire()

    def _retire(self) -> Iterator[Event]:
        """By the node that commits."""
        if not any(slot.header().rank == 0 for slot in self._slots[0]):
            return
        with suppress(MachineError):  # the next snapshot tries again
            for attempt, why in catalog.retire(
                self._root, self._config, clock.wall_s(), self._orders.protected | self._undrained(), self._known
            ):
                place = str(attempt.under(self._root))
                yield {"event": "retired", "step": attempt.stamp.step, "why": why, "directory": place}

    def _undrained(self) -> frozenset[Attempt]:
        """What is written again, by the same name, after a kill amid its COMMIT: in an object store a deletion that hung may be carried
        out over it."""
        headers = [slot.header() for slots in self._slots for slot in slots]
        waiting = {header.stamp for header in headers if header.whole and header.durable and not header.drained}
        return frozenset(Attempt(run=self._config.run, stamp=stamp) for stamp in waiting)

    def reserve(self, nbytes: int) -> Iterator[Event]:
        """Take memory ahead of need, where not as much was taken before."""
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
        """Forget what failed before: the last tries begin."""
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
    return str(error) if isinstance(error, ResilientError) else f"its slots hold what cannot be read ({error!r})"


def run(config: DrainConfig, stdin_fd: int, tell: Tell) -> None:
    """Until "finish" or the end of `stdin_fd`, and what was pending then. tell: for events, on whatever thread."""
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


class Lines:
    """Events on stdout, each in one piece."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def tell(self, event: Event) -> None:
        with self._lock:
            print(json.dumps(event), flush=True)


def main(arguments: list[str]) -> int:
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # they may reach all processes of the job; the agent says when to end
        signal.signal(number, signal.SIG_IGN)
    try:
        run(DrainConfig.from_json(arguments[0]), sys.stdin.fileno(), Lines().tell)
    except ResilientError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
