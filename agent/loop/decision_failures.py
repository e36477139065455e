"""Handles failed decisions of the controller: a bug in this program, or a record in etcd that no agent can read. A failed decision must not
end the training.

error ──▶ reported once, all of the job's data is read anew ──▶ retried ──▶ success; or raised, if ranks wait for a decision
"""

from __future__ import annotations

from ...resilience.model.generation import GenerationRecord
from ...resilience.model.state_machine import Phase
from ..node import Node
from ..output.event_log import Telling

AGAIN_S = 1.0
"""Seconds until the next try, which reads all of the job's data from etcd anew."""
PATIENCE_S = 10.0
"""Seconds that ranks that do not train may wait for a decision. If they wait longer, the leading agent exits, and so does each next leader.
A scheduler or an operator can then restart the job from the newest snapshot."""


class Lapse:
    def __init__(self, node: Node, telling: Telling) -> None:
        self._node, self._telling = node, telling
        self._told = ""
        self._until_s = 0.0
        self._waits_s: float | None = None
        """Monotonic time since when ranks have waited for a decision; None: they do not wait."""

    def rests(self, now_s: float) -> bool:
        """Return whether it is too early for the next try. now_s: monotonic."""
        return now_s < self._until_s

    def met(self, error: Exception, record: GenerationRecord | None, now_s: float) -> None:
        """Record that a decision, or reading its records, has failed. Raises `error` if ranks have waited for longer than PATIENCE_S."""
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
                f"the agent cannot judge faults at present: {said}. It tries again each second, and ranks that train continue. Report this",
                "bad",
            )

    def over(self) -> None:
        """Record that a decision has succeeded."""
        if self._told:
            self._telling.say("the agent can judge faults again", "good")
        self._told, self._waits_s = "", None

    def _at_work(self, record: GenerationRecord | None) -> bool:
        """Return whether the ranks train, as far as this node can see. If another node's ranks stop, this node's ranks soon become silent.
        While the job ends, return whether the drain process still writes."""
        if record is not None and record.phase is Phase.ENDING:
            return not self._node.drain.finished
        if record is None or record.phase not in (Phase.LAUNCH, Phase.RUN) or self._node.lookout.stalls:
            return False
        group = self._node.group
        return group is None or not any(process.ended_s for process in group.watched())
