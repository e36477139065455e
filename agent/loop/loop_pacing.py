"""How closely the agent's loop looks at things. Pure.

generation record, what the store was told last ──▶ is something under way, is something ordered, is all of the start told?
"""

from __future__ import annotations

from ...resilience.diagnose.root_cause import HEARD_S
from ...resilience.model.generation import GenerationRecord
from ...resilience.model.node import NodeStatus
from ...resilience.model.state_machine import Phase

STARTING_S = 60.0
"""So long after its launch a generation may still have something to tell about its start: for ever no, since a script may have nothing."""


def busy(record: GenerationRecord | None, told: NodeStatus | None, now: float) -> bool:
    """Whether something is under way that others wait for. now: wall-clock seconds."""
    exits = told.exits if told else ()
    if any(0 <= now - ended.at_s < HEARD_S for ended in exits):
        return True  # who leads waits so long for the others' word, and no longer
    return record is None or record.phase not in (Phase.RUN, Phase.LAUNCH)


def starting(record: GenerationRecord, told: NodeStatus | None, now: float) -> bool:
    """Whether the generation, launched just now, still has something to tell about its start."""
    if now - record.launched_s > STARTING_S:
        return False
    waits = record.replay_until > record.resume_step
    return told is None or not told.stepped_s or (waits and not told.replayed_s)


def ordered(record: GenerationRecord | None, told: NodeStatus | None) -> bool:
    """Whether the ranks are about to do what somebody has ordered."""
    if told is None or record is None:
        return False
    obeyed = max((rewind.order for rewind in told.rewinds), default=0)
    rewinds = record.rewind is not None and record.rewind.number > max(obeyed, told.declined)
    written = told.snapshot == record.saves and 0 <= told.snapshot_step <= max(told.durable_steps, default=-1)
    snaps = bool(record.saves) and not written
    return rewinds or snaps or record.waits != told.paused
