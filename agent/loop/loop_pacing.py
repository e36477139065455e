"""Decides how often the agent's loop runs a round. Pure functions, without I/O.

generation record, this node's last status in etcd ──▶ is an action under way, is an order open, is the start fully reported?
"""

from __future__ import annotations

from ...resilience.diagnose.root_cause import HEARD_S
from ...resilience.model.generation import GenerationRecord
from ...resilience.model.node import NodeStatus
from ...resilience.model.state_machine import Phase

STARTING_S = 60.0
"""Seconds after its launch in which a generation may still have something to report about its start. The time is limited, because a script
may never report anything."""


def busy(record: GenerationRecord | None, told: NodeStatus | None, now: float) -> bool:
    """Return whether an action is under way that other nodes wait for. now: wall-clock seconds."""
    exits = told.exits if told else ()
    if any(0 <= now - ended.at_s < HEARD_S for ended in exits):
        return True  # the leader waits this long for the other nodes' reports
    return record is None or record.phase not in (Phase.RUN, Phase.LAUNCH)


def starting(record: GenerationRecord, told: NodeStatus | None, now: float) -> bool:
    """Return whether the generation was launched just now, and its start is not fully reported yet."""
    if now - record.launched_s > STARTING_S:
        return False
    waits = record.replay_until > record.resume_step
    return told is None or not told.stepped_s or (waits and not told.replayed_s)


def ordered(record: GenerationRecord | None, told: NodeStatus | None) -> bool:
    """Return whether an order is open: the ranks have not carried it out yet."""
    if told is None or record is None:
        return False
    obeyed = max((rewind.order for rewind in told.rewinds), default=0)
    rewinds = record.rewind is not None and record.rewind.number > max(obeyed, told.declined)
    written = told.snapshot == record.saves and 0 <= told.snapshot_step <= max(told.durable_steps, default=-1)
    snaps = bool(record.saves) and not written
    return rewinds or snaps or record.waits != told.paused
