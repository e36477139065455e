"""Serves the agent's files to ranks that cannot see its process (`resilience/ipc/descriptor_client.py`). So it also learns the pids by
which the agent sees those ranks."""

from __future__ import annotations

import json
import os
import secrets
import socket
import struct
import threading
from collections.abc import Collection
from contextlib import closing, suppress

from ...resilience.clock import sleep
from ...resilience.ipc.descriptor_client import sign
from ...resilience.ipc.file_descriptors import high
from .orphans import is_ours

_PATIENCE_S = 1.0
_AGAIN_S = 0.1
_FLAGS = os.O_ACCMODE | os.O_APPEND
_PEER = struct.Struct("3i")


class Door:
    """A socket that serves as long as this process lives. It serves processes with the token that run as the same user or root, and
    descendants that have become another user."""

    def __init__(self, paths: Collection[str]) -> None:
        """paths: the files that are served, as paths in this agent's own /proc."""
        name, self.token = f"mt-resilient-{secrets.token_hex(8)}", secrets.token_hex(16)
        self._paths = frozenset(paths)
        self.pids: dict[tuple[int, int], int] = {}
        """Local rank and its pid in its own namespace → its pid as this agent sees it."""
        self.environment = sign(name, self.token)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listening.bind(f"\0{name}")
        listening.listen(64)
        self._listening = socket.socket(fileno=high(listening.detach()))
        threading.Thread(target=self._serve, name="door", daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                asking, _ = self._listening.accept()
            except OSError:  # no descriptor is free
                sleep(_AGAIN_S)
                continue
            with closing(asking), suppress(Exception):  # a bad request must not close the door to the others
                self._answer(asking)

    def _answer(self, asking: socket.socket) -> None:
        pid, uid, _ = _PEER.unpack(asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
        if uid not in (0, os.getuid()) and not is_ours(pid, ()):
            return
        asking.settimeout(_PATIENCE_S)
        asked = json.loads(asking.recv(4096))
        path, rank, inner, flags = asked["path"], int(asked["rank"]), int(asked["pid"]), int(asked["flags"])
        if not secrets.compare_digest(asked["token"], self.token) or path not in self._paths:
            asking.send(b"the agent has no such file for this process")
        elif pid <= 0:
            asking.send(b"the agent does not see this process: it is in a container of its own beside the agent's")
        else:
            self.pids[rank, inner] = pid
            fd = os.open(path, flags & _FLAGS | os.O_CLOEXEC)  # a new open file, with its own locks
            try:
                socket.send_fds(asking, [b"."], [fd])
            finally:
                os.close(fd)
