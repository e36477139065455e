"""Passes file descriptors of the agent's shared-memory files to ranks in another pid namespace (`resilience/ipc/descriptor_client.py`).
Each request of a rank also tells the agent the rank's pid in the agent's own namespace."""

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
_FLAGS = os.O_ACCMODE | os.O_APPEND | os.O_NOCTTY
_PEER = struct.Struct("3i")


class Door:
    """A socket that serves files as long as this process lives. A caller must have the token. The caller must also run as the agent's user
    or root, or be a descendant of the agent."""

    def __init__(self, paths: Collection[str]) -> None:
        """paths: the files that may be requested, as paths in this agent's own /proc."""
        name, self.token = f"mt-resilient-{secrets.token_hex(8)}", secrets.token_hex(16)
        self._paths = frozenset(paths)
        self.pids: dict[tuple[int, int], int] = {}
        """(Local rank, pid in the rank's own namespace) → pid in this agent's namespace."""
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
            except OSError:  # the process has no free file descriptor
                sleep(_AGAIN_S)
                continue
            with closing(asking), suppress(Exception):  # a bad request must not end the service
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
            fd = os.open(path, flags & _FLAGS | os.O_CLOEXEC)  # opened anew, so that it has its own locks
            try:
                socket.send_fds(asking, [b"."], [fd])
            finally:
                os.close(fd)
