"""Decides how often the agent's loop looks at things. Pure.

generation record, this node's last status in etcd ──▶ is something under way, is an order open, is the start fully reported?
"""

from __future__ import annotations

from ...resilience.diagnose.root_cause import HEARD_S
from ...resilience.model.generation import GenerationRecord
from ...resilience.model.node import NodeStatus
from ...resilience.model.state_machine import Phase

STARTING_S = 60.0
"""How long after its launch a generation may still have something to report about its start. A script may never report anything, so the
time is limited."""


def busy(record: GenerationRecord | None, told: NodeStatus | None, now: float) -> bool:
    """Return whether something is under way that other nodes wait for. now: wall-clock seconds."""
    exits = told.exits if told else ()
    if any(0 <= now - ended.at_s < HEARD_S for ended in exits):
        return True  # the leader waits this long for the other nodes' reports
    return record is None or record.phase not in (Phase.RUN, Phase.LAUNCH)


def starting(record: GenerationRecord, told: NodeStatus | None, now: float) -> bool:
    """Return whether the generation, launched just now, still has something to report about its start."""
    if now - record.launched_s > STARTING_S:
        return False
    waits = record.replay_until > record.resume_step
    return told is None or not told.stepped_s or (waits and not told.replayed_s)


def ordered(record: GenerationRecord | None, told: NodeStatus | None) -> bool:
    """Return whether the ranks have not yet carried out an order."""
    if told is None or record is None:
        return False
    obeyed = max((rewind.order for rewind in told.rewinds), default=0)
    rewinds = record.rewind is not None and record.rewind.number > max(obeyed, told.declined)
    written = told.snapshot == record.saves and 0 <= told.snapshot_step <= max(told.durable_steps, default=-1)
    snaps = bool(record.saves) and not written
    return rewinds or snaps or record.waits != told.paused
