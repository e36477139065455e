"""Opens the agent's files in a rank, through /proc. A rank in its own PID namespace does not see the agent there. So such a rank asks the
agent for a file's descriptor, over a Unix socket with an abstract name.

rank ──path, token──▶ agent.ranks.descriptor_server ──a descriptor of its own──▶ rank
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from contextlib import closing

from .handoff import local_rank

VARIABLE = "MT_RESILIENT_DOOR"
_ANSWER_S = 10.0
_ERROR_BYTES = 200


def sign(name: str, token: str) -> dict[str, str]:
    """Return the environment variable by which ranks find the agent's socket (`descriptor_server.Door`)."""
    return {VARIABLE: json.dumps([_namespace(), name, token])}


def opened(path: str, flags: int, environ: Mapping[str, str] = os.environ) -> int:
    """Return a new descriptor of the agent's file `path`. An exec closes the descriptor. Raises OSError."""
    known = environ.get(VARIABLE)
    namespace, name, token = json.loads(known) if known else (_namespace(), "", "")
    if namespace == _namespace():
        try:
            return os.open(path, flags | os.O_CLOEXEC)
        except PermissionError:  # the agent or the rank has changed its user
            if not name:
                raise
    asked = {"path": path, "flags": flags, "token": token, "rank": local_rank(environ), "pid": os.getpid()}
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as asking:
        asking.settimeout(_ANSWER_S)
        asking.connect(f"\0{name}")
        asking.send(json.dumps(asked).encode())
        said, fds, *_ = socket.recv_fds(asking, _ERROR_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
    if not fds:
        raise OSError(said.decode(errors="replace") or "the agent sent no descriptor")
    return fds[0]


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
