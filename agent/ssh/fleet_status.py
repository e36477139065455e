"""Judges the agents that `run --hostfile` has started: whether the job can still begin, and how it has ended. Pure functions, without
I/O."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from ...resilience.errors import MachineError

SSH_FAILED = 255
"""ssh's own exit code for any error of the connection (ssh(1), EXIT STATUS)."""
_KILLED = 128 + 9
_LATE_S = 60.0
"""If a connection breaks more than this many seconds after the last agent exited (phase ENDED), the job was still running. ssh itself takes
45 s to notice a broken connection."""


class Phase(StrEnum):
    CONNECTING = "connecting"
    UP = "up"
    """The node's agent was started."""
    UNUSABLE = "unusable"
    """The node's agent was never started, because ssh or the host failed."""
    LOST = "lost"
    """The connection broke, or the agent was killed."""
    ENDED = "ended"
    """The node's agent has exited without being killed, with any exit code."""


@dataclass(frozen=True, kw_only=True)
class Member:
    node: str
    phase: Phase = Phase.CONNECTING
    code: int = 0
    """Exit code of the agent, or of ssh."""
    ended_s: float = 0.0
    """The time at which ssh ended, in seconds of the monotonic clock."""


def gone(started: bool, code: int) -> Phase:
    """Return the phase of a node whose ssh process has ended with exit code `code`. started: the node's agent had been started."""
    if not started:
        return Phase.UNUSABLE
    return Phase.LOST if code in (SSH_FAILED, _KILLED) or code < 0 else Phase.ENDED


def how_lost(code: int) -> str:
    """Return in words how a node was lost. code: ssh's exit code."""
    if code < 0:
        return f"its ssh process was ended by {signal.Signals(-code).name}"
    return "the connection broke" if code == SSH_FAILED else "its agent was killed"


def hopeless(members: Sequence[Member], least: int, *, begun: bool) -> str:
    """Return why the job can no longer begin; an empty text if it still may, or has begun. begun: the job has begun. An agent that exits
    afterwards took part in the job, whatever its exit code."""
    unusable = [member.node for member in members if member.phase is Phase.UNUSABLE]
    failed = [member for member in members if member.phase is Phase.ENDED and member.code and not begun]
    left = len(members) - len(unusable) - len(failed)
    if left >= least or not (unusable or failed):
        return ""
    why = [f"{', '.join(unusable)} cannot be used"] if unusable else []
    why += [f"the agent on {member.node} has exited with code {member.code}" for member in failed]
    return (
        f"the job needs {least} of the {len(members)} hosts, but {', '.join(why)}; the other agents were told to exit. "
        "Fix that and give the same command again, or use fewer nodes: --spares K, --nodes MIN:MAX"
    )


def exit_code(members: Sequence[Member]) -> int:
    """Return the job's exit code: the code of the last agent that exited (phase ENDED). Agents that exited earlier are ignored, because the
    job finished without them. Return MachineError's code if there is no such agent. Do the same if nodes were lost long after the last
    exit: the agents that exited had been drained."""
    ended = [member for member in members if member.phase is Phase.ENDED]
    if not ended:
        return MachineError.exit_code
    last = max(ended, key=lambda member: member.ended_s)
    lost_s = max((member.ended_s for member in members if member.phase is Phase.LOST), default=0.0)
    return MachineError.exit_code if lost_s - last.ended_s > _LATE_S else last.code
