"""Finds the agents of other jobs on this machine, so that a Prometheus finds all jobs by asking one agent of each machine."""

from __future__ import annotations

import asyncio
import json
from contextlib import closing

from ...resilience.report.metrics import JOB, OWN, Target
from ..config import AgentPolicy

PORTS = range(AgentPolicy.metrics_port, AgentPolicy.metrics_port + 16)
"""An agent whose user names no port for metrics listens on the first free one of these."""
_DEADLINE_S = 1.0
"""Seconds that the agents of this machine may take to answer. All are asked at the same time."""
_MOST_BYTES = 1 << 24


class OtherJobs:
    def __init__(self, own: int) -> None:
        """own: the port of this agent, which is not asked."""
        self._own = own
        self._last: dict[int, list[Target]] = {}
        """For each port, the last answer of the agent there."""

    def __call__(self, host: str) -> list[Target]:
        """Return the targets of all jobs that have an agent at one of PORTS. host: Prometheus's name for this machine. An agent may not
        answer now, or may not know its job's nodes because their etcd does not answer. Then its last answer counts."""
        told = asyncio.run(self._asked(host))
        self._last = {port: self._last.get(port, []) if targets is None else targets for port, targets in told.items()}
        return [target for targets in self._last.values() for target in targets]

    async def _asked(self, host: str) -> dict[int, list[Target] | None]:
        ports = [port for port in PORTS if port != self._own]
        return dict(zip(ports, await asyncio.gather(*(_told(port, f"{host}:{port}") for port in ports)), strict=True))


def namesake(own: int, job: str) -> str:
    """Return a sentence if another job on this machine has the same name; empty: no such job is known."""
    if any(each["labels"].get(JOB) == job for each in OtherJobs(own)("127.0.0.1")):
        return (
            f"another job on this machine is named {job}, too: a Prometheus counts both as one. "
            "--job NAME gives this one a name of its own"
        )
    return ""


async def _told(port: int, name: str) -> list[Target] | None:
    """Return the targets that an agent at this port names. Empty: there is another program at this port, or no program. None: there was no
    answer, or the agent does not know its targets now."""
    try:
        async with asyncio.timeout(_DEADLINE_S):
            answer, asked = await asyncio.open_connection("127.0.0.1", port)
            with closing(asked):
                asked.write(f"GET {OWN} HTTP/1.0\r\nHost: {name}\r\n\r\n".encode())
                told = b""
                while len(told) < _MOST_BYTES and (more := await answer.read(_MOST_BYTES)):
                    told += more
        head, _, body = told.partition(b"\r\n\r\n")
        status = head.split(maxsplit=2)[1:2]
        targets = json.loads(body) if status == [b"200"] else []
    except TimeoutError:
        return None
    except (OSError, ValueError):
        return []
    if status == [b"503"]:
        return None
    known = [each for each in targets if isinstance(each, dict)] if isinstance(targets, list) else []
    return [each for each in known if isinstance(each.get("targets"), list) and isinstance(each.get("labels"), dict)]
