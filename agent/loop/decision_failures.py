"""Handles failed decisions of the controller: a defect of ours, or a record in etcd that no agent can read. Training must not die of them.

error ──▶ reported once, everything is read anew ──▶ tried again ──▶ over, or, if ranks wait for a decision, raised
"""

from __future__ import annotations

from ...resilience.model.generation import GenerationRecord
from ...resilience.model.state_machine import Phase
from ..node import Node
from ..output.event_log import Telling

AGAIN_S = 1.0
"""Time until the next try, which reads the whole job anew."""
PATIENCE_S = 10.0
"""How long ranks that do not train may wait for a decision. Then this agent exits, and so does the next leader after it. A scheduler or an
operator can start the job again, from the newest snapshot."""


class Lapse:
    def __init__(self, node: Node, telling: Telling) -> None:
        self._node, self._telling = node, telling
        self._told = ""
        self._until_s = 0.0
        self._waits_s: float | None = None
        """Since when ranks have waited for a decision."""

    def rests(self, now_s: float) -> bool:
        """Return whether it is too early for the next try. Times are in seconds, monotonic."""
        return now_s < self._until_s

    def met(self, error: Exception, record: GenerationRecord | None, now_s: float) -> None:
        """Note that a decision, or the reading of one, has failed. Raises `error` if ranks have waited for too long."""
        self._until_s = now_s + AGAIN_S
        if self._at_work(record):
            self._waits_s = None
        else:
            self._waits_s = self._waits_s or now_s
            if now_s - self._waits_s > PATIENCE_S:
                raise error
        said = f"{type(error).__name__}: {error}"
        if said != self._told:
            self._told = said
            self._telling.say(
                f"no fault can be judged at present, it is tried again each second: {said}. Ranks that train go on; report it",
                "bad",
            )

    def over(self) -> None:
        """Note that a decision was made."""
        if self._told:
            self._telling.say("faults can be judged again", "good")
        self._told, self._waits_s = "", None

    def _at_work(self, record: GenerationRecord | None) -> bool:
        """Return whether the ranks train, as far as this node can see: if another node's ranks stop, these soon fall silent. While the job
        ends, return whether the drain process still writes."""
        if record is not None and record.phase is Phase.ENDING:
            return not self._node.drain.finished
        if record is None or record.phase not in (Phase.LAUNCH, Phase.RUN) or self._node.lookout.stalls:
            return False
        group = self._node.group
        return group is None or not any(process.ended_s for process in group.watched())
