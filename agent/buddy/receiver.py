"""Receives copies of another node's snapshots into guest slots, and serves them to a node that has lost its memory. Guest slots are shared
memory for such copies."""

from __future__ import annotations

import socket
import threading

from ...checkpoint.arena.arena import Slot
from ...checkpoint.buddy.connection import Connection, Lost, Refused, answer
from ...checkpoint.buddy.transfer import serve
from .buddy_config import BACKOFF_S, STOP_S, BuddyConfig, Tell, address_of

STRANGERS = 16
"""The most callers that may be authenticating at the same time. Further callers are disconnected."""


class Keeping:
    """Listens for callers, and serves each in a thread of its own."""

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
                address = address_of(self._config.listen)
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
        except OSError:  # the caller has closed the connection already
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
            pass  # the caller's side reports it
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
