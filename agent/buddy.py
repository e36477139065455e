"""The drain process's part in the buddy tier: snapshots leave for the buddy's memory, and copies of another node's are kept in guest slots.

arena → `Sending` → the buddy; somebody's buddy → `Keeping` → guest slots → `_fetch` of whoever has lost his own. Threads of the drain
process, with slots of their own: neither a slow buddy nor a hanging disk waits for the other. What they have to tell is handed to `tell`.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from ..checkpoint import frames, tiers
from ..checkpoint.arena import Slot
from ..checkpoint.connection import Address, Connection, Lost, Refused, answer, call
from ..checkpoint.drain import holding
from ..checkpoint.frames import Word
from ..checkpoint.header import Stamp
from ..checkpoint.replicate import fetch, give, serve
from ..resilience import clock
from ..resilience.errors import ResilientError, UsageError

Event = dict[str, object]
Tell = Callable[[Event], None]

TOKEN = "MT_RESILIENT_BUDDY_TOKEN"
"""Environment variable with the run's secret, at least 32 hexadecimal digits: arguments can be read by every user of a machine."""
BACKOFF_S = (0.1, 10.0)
"""Before the buddy is called again, doubled after each further failure; and before a port that is taken is tried again."""
STRANGERS = 16
"""Callers that may be at proving who they are; further ones are hung up on."""
STOP_S = 1.0


@dataclass(frozen=True, kw_only=True)
class BuddyConfig:
    listen: str = ""
    """host:port where copies are taken and given; empty: nowhere."""
    send_to: str = ""
    """host:port of the buddy's drain process; empty: none, until it is named (`Buddy.send_to`)."""
    guests: tuple[tuple[str, ...], ...] = ()
    """Paths of the slots for copies, two per local rank of the node whose buddy this one is."""
    poll_s: float = 0.05
    """Between looks at the headers."""
    stall_s: float = 10.0
    """When nothing moves for so long, the other end counts as lost. Taking memory for the first copy counts too: about 1 s per 3 GB."""
    patience_s: float = 0.0
    """How long the buddy may be away until that is told: it may be about to start, or the job about to go on without its node."""
    hold_s: float = 60.0
    """How long the slots of one snapshot may be held while they are copied, so longer than that takes: a rank that finds no slot to
    overwrite meanwhile skips a snapshot."""

    def __post_init__(self) -> None:
        for name in ("listen", "send_to"):
            host, _, port = getattr(self, name).rpartition(":")
            if getattr(self, name) and not (host and port.isascii() and port.isdigit() and int(port) < 1 << 16):
                raise UsageError(f"buddy: {name} has to be host:port, and is {getattr(self, name)!r}")
        if bool(self.listen) != bool(self.guests) or any(len(row) < 2 for row in self.guests):
            raise UsageError("buddy: whoever listens has two guest slots or more per rank, and nobody else has any")
        if min(self.poll_s, self.stall_s, self.hold_s) <= 0:
            raise UsageError("buddy: poll_s, stall_s and hold_s have to be positive")

    @classmethod
    def from_object(cls, found: dict[str, object]) -> BuddyConfig:
        if unknown := found.keys() - {field.name for field in fields(cls)}:
            raise UsageError(f"buddy: there is no configuration key {', '.join(sorted(unknown))}")
        return cls(**found)  # type: ignore[arg-type]


class Sending:
    """Copies the newest complete snapshot that is marked, over one connection, for as long as it runs."""

    def __init__(self, config: BuddyConfig, token: bytes, arena: Sequence[Sequence[str]], tell: Tell) -> None:
        self._config, self._token, self._tell = config, token, tell
        self._slots = [[Slot(path) for path in row] for row in arena]
        self.to = config.send_to
        """Whom to; another thread may change it."""
        self._last: Stamp | None = None
        """The newest one that is settled: copied, or refused for good."""
        self._wait_s = BACKOFF_S[0]
        self._lost = False
        self._away_s = 0.0
        """Since when the buddy does not answer; 0: it does."""
        self._why = ""
        """Why copies do not arrive, as it was told last."""
        self._over = threading.Event()

    def run(self) -> None:
        to = self.to
        while not self._over.is_set():
            if to != self.to:  # who has nothing yet
                to, self._last, self._lost, self._away_s, self._wait_s = self.to, None, False, 0.0, BACKOFF_S[0]
            if not to:
                self._over.wait(self._config.poll_s)
                continue
            try:
                with call(_address(to), self._token, self._config.stall_s) as connection:
                    if self._lost:
                        self._tell({"event": "buddy back"})
                    self._lost, self._away_s = False, 0.0
                    while to == self.to and not self._over.is_set():
                        if not self._copied_one(connection):
                            connection.idle(self._config.poll_s)
            except (Lost, Refused) as error:
                if to != self.to:
                    continue
                self._away_s = self._away_s or clock.monotonic_s()
                if not self._lost and clock.monotonic_s() - self._away_s >= self._config.patience_s:
                    self._tell({"event": "buddy lost", "reason": str(error)})
                    self._lost = True
                self._over.wait(self._pause_s())

    def _copied_one(self, connection: Connection) -> bool:
        """Whether there was one to be copied, and its end is known."""
        headers = [[slot.header() for slot in row] for row in self._slots]
        stamp = tiers.newest(headers, len(self._slots), self._last)
        if stamp is None:
            return False
        started, moved = clock.monotonic_s(), 0
        with holding(self._slots, stamp) as held:
            for row, (slot, view) in enumerate(held or ()):
                outcome = give(connection, row, len(self._slots), slot, view, started + self._config.hold_s)
                moved += view.header.image.memory_bytes if outcome.word is Word.KEPT else 0
                if not outcome.there:
                    break
        if not held or outcome.word is Word.VOID:
            return False
        named: Event = {"step": stamp.step, "generation": stamp.generation}
        if not outcome.there:
            again_s = self._wait_s if outcome.word is Word.LATER else None
            if outcome.why != self._why:
                self._tell({"event": "not replicated", **named, "reason": outcome.why, "retry_in_s": again_s})
            self._why = outcome.why
            if again_s:
                connection.idle(self._pause_s())
                return False
        self._last = stamp
        if outcome.there:
            self._wait_s, self._why = BACKOFF_S[0], ""
            took_s = round(clock.monotonic_s() - started, 3)
            self._tell({"event": "replicated", **named, "bytes": moved, "seconds": took_s})
        return True

    def _pause_s(self) -> float:
        """How long to wait now; the next one is longer, until a copy arrives."""
        wait_s, self._wait_s = self._wait_s, min(2 * self._wait_s, BACKOFF_S[1])
        return wait_s

    def stop(self) -> None:
        self._over.set()


class Keeping:
    """Listens; every caller has a thread."""

    def __init__(self, config: BuddyConfig, token: bytes, tell: Tell) -> None:
        self._config, self._token, self._tell = config, token, tell
        self._strangers = threading.Semaphore(STRANGERS)
        self._connections: set[Connection] = set()
        self._told: set[str] = set()
        self._over = threading.Event()

    def run(self) -> None:
        wait_s = BACKOFF_S[0]
        while not self._over.is_set():
            try:
                address = _address(self._config.listen)
                family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
                with socket.create_server(address, family=family) as server:
                    self._listen(server)
            except OSError as error:
                self._once("deaf", f"cannot listen on {self._config.listen}: {error.strerror or error}")
                self._over.wait(wait_s)
                wait_s = min(2 * wait_s, BACKOFF_S[1])

    def _listen(self, server: socket.socket) -> None:
        server.settimeout(STOP_S / 2)
        while not self._over.is_set():
            try:
                caller, _ = server.accept()
            except TimeoutError:
                continue
            if self._strangers.acquire(blocking=False):
                threading.Thread(target=self._answer, args=(caller,), daemon=True).start()
            else:
                caller.close()

    def _answer(self, caller: socket.socket) -> None:
        try:
            connection = Connection(caller, self._config.stall_s)
        except OSError:  # it has hung up already
            caller.close()
            self._strangers.release()
            return
        self._connections.add(connection)
        try:
            with connection:
                try:
                    answer(connection, self._token)
                finally:
                    self._strangers.release()
                guests = [[Slot(path, turn=self._config.guests[0][0]) for path in row] for row in self._config.guests]
                try:
                    serve(connection, guests, self._config.hold_s)
                finally:
                    for slot in (slot for row in guests for slot in row):
                        slot.close()
        except Refused as error:
            self._once("turned away", str(error))
        except Lost:
            pass  # its own side tells it
        finally:
            self._connections.discard(connection)

    def _once(self, event: str, reason: str) -> None:
        if reason not in self._told:
            self._told.add(reason)
            self._tell({"event": event, "reason": reason})

    def stop(self) -> None:
        self._over.set()
        for connection in list(self._connections):
            connection.close()


class Buddy:
    """Both directions, as far as they are configured."""

    def __init__(self, config: BuddyConfig, arena: Sequence[Sequence[str]], tell: Tell) -> None:
        """arena: paths of the slots of the ranks that take part. Raises UsageError where there is no token."""
        self._token = frames.secret(os.environ.get(TOKEN, ""))
        self._config, self._arena, self._tell = config, arena, tell
        self._sending = Sending(config, self._token, arena, tell)
        self._parts: list[Sending | Keeping] = [self._sending]
        if config.listen:
            self._parts.append(Keeping(config, self._token, tell))
        self._threads = [threading.Thread(target=_told, args=(part.run, tell), daemon=True) for part in self._parts]
        for thread in self._threads:
            thread.start()

    def send_to(self, address: str) -> None:
        """From now on copies go there; empty: nowhere."""
        self._sending.to = address

    def fetch(self, address: str, stamp: Stamp, first_rank: int) -> None:
        """Get back what whoever listens there keeps of our ranks, the first of which is `first_rank`; "fetched" or "not fetched" tells how
        it has ended."""
        arguments = (address, stamp, first_rank)
        threading.Thread(target=_told, args=(lambda: self._fetch(*arguments), self._tell), daemon=True).start()

    def _fetch(self, address: str, stamp: Stamp, first_rank: int) -> None:
        started, moved = clock.monotonic_s(), 0
        named: Event = {"step": stamp.step, "generation": stamp.generation, "from": address}
        try:
            with self._reached(address) as connection:
                for rank, row in enumerate(self._arena, first_rank):
                    slots = [Slot(path, turn=self._arena[0][0]) for path in row]
                    slot = slots[tiers.room([slot.header() for slot in slots])]
                    fetch(connection, stamp, rank, slot)
                    moved += slot.header().image.memory_bytes
                    for each in slots:
                        each.close()
        except ResilientError as error:
            self._tell({"event": "not fetched", **named, "reason": str(error)})
        else:
            took_s = round(clock.monotonic_s() - started, 3)
            self._tell({"event": "fetched", **named, "bytes": moved, "seconds": took_s})

    def _reached(self, address: str) -> Connection:
        """A connection to whoever listens there, which may be about to. Raises Lost and Refused."""
        until_s = clock.monotonic_s() + self._config.stall_s
        while True:
            try:
                return call(_address(address), self._token, self._config.stall_s)
            except Lost:
                if clock.monotonic_s() > until_s:
                    raise
                clock.sleep(BACKOFF_S[0])

    def stop(self) -> None:
        """End both; what is under way stays torn."""
        for part in self._parts:
            part.stop()
        for thread in self._threads:
            thread.join(STOP_S)


def _told(run: Callable[[], None], tell: Tell) -> None:
    """The disk's tier goes on without this one, but not in silence."""
    try:
        run()
    except Exception as error:
        tell({"event": "buddy lost", "reason": f"ours, report it: {error!r}"})
        raise


def _address(text: str) -> Address:
    host, _, port = text.rpartition(":")
    return host, int(port)
