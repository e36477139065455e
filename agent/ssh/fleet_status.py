"""Judges the agents that `run --hostfile` has started: whether the job can still begin, and how it has ended. Pure."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from ...resilience.errors import MachineError

SSH_FAILED = 255
"""ssh's own exit code, for any error of the connection (ssh(1), EXIT STATUS)."""
_KILLED = 128 + 9
_LATE_S = 60.0
"""If a connection breaks this long after the last agent left in order, the job was still going on. ssh itself takes 45 s to notice a
break."""


class Phase(StrEnum):
    CONNECTING = "connecting"
    UP = "up"
    """Its agent was started."""
    UNUSABLE = "unusable"
    """Its agent was never started: ssh, or the host, could not."""
    LOST = "lost"
    """The connection broke, or the agent was killed."""
    ENDED = "ended"
    """Its agent has left in order."""


@dataclass(frozen=True, kw_only=True)
class Member:
    node: str
    phase: Phase = Phase.CONNECTING
    code: int = 0
    """Exit code of the agent, or of ssh."""
    ended_s: float = 0.0
    """When ssh ended, on the monotonic clock."""


def gone(started: bool, code: int) -> Phase:
    """The phase of a node whose ssh has ended with `code`. started: its agent had been started."""
    if not started:
        return Phase.UNUSABLE
    return Phase.LOST if code in (SSH_FAILED, _KILLED) or code < 0 else Phase.ENDED


def how_lost(code: int) -> str:
    """How a node was lost, in words. code: ssh's."""
    if code < 0:
        return f"the connection is cut, for its ssh was ended by {signal.Signals(-code).name}"
    return "the connection broke" if code == SSH_FAILED else "its agent was killed"


def hopeless(members: Sequence[Member], least: int, *, begun: bool) -> str:
    """Why the job can no longer begin; empty: it can, or may yet. begun: it has begun; an agent that leaves then has had a part in it,
    whatever its code."""
    unusable = [member.node for member in members if member.phase is Phase.UNUSABLE]
    failed = [member for member in members if member.phase is Phase.ENDED and member.code and not begun]
    left = len(members) - len(unusable) - len(failed)
    if left >= least or not (unusable or failed):
        return ""
    why = [f"{', '.join(unusable)} cannot be used"] if unusable else []
    why += [f"the agent on {member.node} has left with code {member.code}" for member in failed]
    return (
        f"{least} of the {len(members)} hosts are wanted, and {', '.join(why)}; the others were told to leave. "
        "Mend that and give the same command again, or do with fewer nodes: --spares K, --nodes MIN:MAX"
    )


def exit_code(members: Sequence[Member]) -> int:
    """Exit code of the job: that of the agent which left last in order. An agent that left earlier is ignored: the job did not need it to
    finish. MachineError's code if none left in order, or if nodes were lost long after: those that had left were drained."""
    ended = [member for member in members if member.phase is Phase.ENDED]
    if not ended:
        return MachineError.exit_code
    last = max(ended, key=lambda member: member.ended_s)
    lost_s = max((member.ended_s for member in members if member.phase is Phase.LOST), default=0.0)
    return MachineError.exit_code if lost_s - last.ended_s > _LATE_S else last.code
