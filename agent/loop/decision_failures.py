"""When our own judgement fails: by a mistake of ours, or by a record in the store that nobody can read. Training is not to die of it.

error ──▶ told once, all is read anew ──▶ tried again ──▶ over, or, where ranks wait for a decision, let out
"""

from __future__ import annotations

from ...resilience.model.generation import GenerationRecord
from ...resilience.model.state_machine import Phase
from ..node import Node
from ..output.event_log import Telling

AGAIN_S = 1.0
"""Until the next try: all of the job is read for it."""
PATIENCE_S = 10.0
"""How long ranks that do not train may wait for a decision that cannot be made. Then this agent ends, and after it the one that leads next:
whoever has started them can start the job again, from the newest snapshot."""


class Lapse:
    def __init__(self, node: Node, telling: Telling) -> None:
        self._node, self._telling = node, telling
        self._told = ""
        self._until_s = 0.0
        self._waits_s: float | None = None
        """Since when ranks have waited."""

    def rests(self, now_s: float) -> bool:
        """Whether the next try is still to come. Times are in seconds, monotonic."""
        return now_s < self._until_s

    def met(self, error: Exception, record: GenerationRecord | None, now_s: float) -> None:
        """Deciding, or reading what was decided, has failed. Raises `error` where ranks have waited for too long."""
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
        """It has not failed."""
        if self._told:
            self._telling.say("faults can be judged again", "good")
        self._told, self._waits_s = "", None

    def _at_work(self, record: GenerationRecord | None) -> bool:
        """Whether the ranks train, as far as can be seen here: where those of another node do not, these will soon be silent. Or they are
        through, and what they have left is being written."""
        if record is not None and record.phase is Phase.ENDING:
            return not self._node.drain.finished
        if record is None or record.phase not in (Phase.LAUNCH, Phase.RUN) or self._node.lookout.stalls:
            return False
        group = self._node.group
        return group is None or not any(process.ended_s for process in group.watched())
