"""Finds the agents of other jobs on this machine, so that a Prometheus finds all jobs by asking one agent of each machine."""

from __future__ import annotations

import json
from contextlib import closing, suppress
from http.client import HTTPConnection, HTTPException
from typing import Any

from ...resilience.errors import StoreUnavailable
from ...resilience.report.metrics import AWAY, JOB, OWN, Target
from ..config import AgentPolicy

PORTS = range(AgentPolicy.metrics_port, AgentPolicy.metrics_port + 16)
"""Where an agent listens to which the user gave no port: at the first of these that is free."""
_DEADLINE_S = 1.0


def found(own: int, host: str) -> list[Target]:
    """Return the targets of all jobs that have an agent at one of PORTS, but for `own`. host: what Prometheus calls this machine. Raises
    StoreUnavailable if one of these agents does not know its job's nodes now."""
    return [each for port in PORTS if port != own for each in _told(port, f"{host}:{port}")]


def namesake(own: int, job: str) -> str:
    """Return a sentence if another job on this machine has the name of this one; empty: none is known to."""
    with suppress(StoreUnavailable):
        if any(each["labels"].get(JOB) == job for each in found(own, "127.0.0.1")):
            return (
                f"another job on this machine is named {job}, too: a Prometheus counts both as one. "
                "--job NAME gives this one a name of its own"
            )
    return ""


def _told(port: int, name: str) -> list[Target]:
    """Return the targets that an agent at this port names; none if there is another program, or none."""
    with suppress(OSError, HTTPException, ValueError), closing(HTTPConnection("127.0.0.1", port, _DEADLINE_S)) as asked:
        asked.request("GET", OWN, headers={"Host": name})
        answer = asked.getresponse()
        told = answer.read(1 << 24)
        if answer.status == 503 and told == AWAY:
            raise StoreUnavailable(f"the etcd of the job at port {port} does not answer")
        targets = json.loads(told) if answer.status == 200 else []
        return [each for each in targets if _is_target(each)] if isinstance(targets, list) else []
    return []


def _is_target(told: Any) -> bool:
    return isinstance(told, dict) and isinstance(told.get("targets"), list) and isinstance(told.get("labels"), dict)
