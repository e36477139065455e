"""The drain process's part in copies: it sends this node's snapshots to the buddy's memory, and keeps another node's copies in guest slots.

arena → `Sending` → the buddy's `Keeping` → guest slots → `_fetch` of the node that has lost its part. Sending, keeping and fetching run in
three threads of the drain process, each with its own `Slot` objects. So a slow buddy does not delay writes to disk, and a hanging disk does
not delay copies. The threads report events through `tell`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence

from ...checkpoint.arena.arena import Slot
from ...checkpoint.arena.slot_header import Stamp
from ...checkpoint.buddy import admission, protocol
from ...checkpoint.buddy.connection import Connection, Lost, call
from ...checkpoint.buddy.transfer import fetch
from ...resilience import clock
from ...resilience.errors import MachineError, ResilientError
from .buddy_config import BACKOFF_S, STOP_S, BuddyConfig, Event, Tell, address_of
from .receiver import Keeping
from .sender import Sending

TOKEN = "MT_RESILIENT_BUDDY_TOKEN"
"""Environment variable with the job's secret, at least 32 hexadecimal digits. The secret is not an argument, because every user of a
machine can read arguments."""
FETCH_TRIES = 3
"""A fetch fails when this many connections have broken. If the other node's drain process has died, a retry can still succeed, because that
node's agent owns the copy."""


class Buddy:
    """Sends copies, and keeps another node's copies if `listen` is configured."""

    def __init__(self, config: BuddyConfig, arena: Sequence[Sequence[str]], tell: Tell) -> None:
        """arena: paths of the slots, for each local rank that takes part. Raises UsageError if there is no token."""
        self._token = protocol.secret(os.environ.get(TOKEN, ""))
        self._config, self._arena, self._tell = config, arena, tell
        self._sending = Sending(config, self._token, arena, tell)
        self._parts: list[Sending | Keeping] = [self._sending]
        if config.listen:
            self._parts.append(Keeping(config, self._token, tell))
        self._threads = [threading.Thread(target=_told, args=(part.run, tell), daemon=True) for part in self._parts]
        for thread in self._threads:
            thread.start()

    def send_to(self, address: str) -> None:
        """Send copies to `address` (host:port) from now on; empty: send none."""
        self._sending.to = address

    def fetch(self, address: str, stamp: Stamp, first_rank: int) -> None:
        """Fetch this node's part of snapshot `stamp` from the node at `address`. first_rank: this node's first global rank. The event
        "fetched" or "not fetched" reports the outcome."""
        arguments = (address, stamp, first_rank)
        threading.Thread(target=_told, args=(lambda: self._fetch(*arguments), self._tell), daemon=True).start()

    def _fetch(self, address: str, stamp: Stamp, first_rank: int) -> None:
        started, lost, parts = clock.monotonic_s(), 0, [*enumerate(self._arena, first_rank)]
        named: Event = {"step": stamp.step, "generation": stamp.generation, "from": address}
        moved = 0
        try:
            while parts:
                connection = self._reached(address)
                try:
                    with connection:
                        while parts:
                            moved += self._fetch_part(connection, stamp, *parts[0])
                            del parts[0]
                except Lost:
                    lost += 1
                    if lost == FETCH_TRIES:
                        raise
        except ResilientError as error:
            self._tell({"event": "not fetched", **named, "reason": str(error)})
        else:
            took_s = round(clock.monotonic_s() - started, 3)
            self._tell({"event": "fetched", **named, "bytes": moved, "seconds": took_s})

    def _fetch_part(self, connection: Connection, stamp: Stamp, rank: int, row: Sequence[str]) -> int:
        """Fetch one rank's part, and return its number of bytes. Skip a slot that is busy with an abandoned snapshot (which is still being
        written or copied). If all slots are busy, wait up to `stall_s` for one."""
        slots = [Slot(path, turn=self._arena[0][0]) for path in row]
        until_s = clock.monotonic_s() + self._config.stall_s
        try:
            while True:
                for index in admission.rooms([slot.header() for slot in slots]):
                    try:
                        return fetch(connection, stamp, rank, slots[index])
                    except MachineError as error:
                        busy = error
                if clock.monotonic_s() > until_s:
                    raise busy
                clock.sleep(self._config.poll_s)
        finally:
            for each in slots:
                each.close()

    def _reached(self, address: str) -> Connection:
        """Return a connection to the drain process at `address`, which may still be starting. Raises Lost and Refused."""
        until_s = clock.monotonic_s() + self._config.stall_s
        while True:
            try:
                return call(address_of(address), self._token, self._config.stall_s)
            except Lost:
                if clock.monotonic_s() > until_s:
                    raise
                clock.sleep(BACKOFF_S[0])

    def stop(self) -> None:
        """Stop sending and receiving. A copy that is under way stays incomplete, and is not used."""
        for part in self._parts:
            part.stop()
        for thread in self._threads:
            thread.join(STOP_S)


def _told(run: Callable[[], None], tell: Tell) -> None:
    """Run `run`, and report an unexpected error. Without copies, the drain process still writes to disk."""
    try:
        run()
    except Exception as error:
        tell({"event": "buddy lost", "reason": f"a bug in mt-resilient, please report it: {error!r}"})
        raise
