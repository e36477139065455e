"""Reports for which nodes the job waits, and that this node stands by (as a spare), each once."""

from __future__ import annotations

from ...resilience.model.generation import GenerationRecord
from ...resilience.model.types import NodeId
from ...resilience.text import formatting
from ..output.event_log import Telling

AWAITS_S = 3.0
"""Seconds that nodes that start together may take until the agent reports that the job waits for them."""


class Awaiting:
    def __init__(self, node_id: NodeId, telling: Telling) -> None:
        self._id, self._telling = node_id, telling
        self._stands_by = False
        self._awaits, self._since_s, self._told = "", 0.0, ""
        """The sentence that says for which nodes the job waits, since when (monotonic), and the sentence that was last reported."""

    def look(self, awaits: str, record: GenerationRecord | None, now_s: float) -> None:
        """Report a wait after it has lasted for AWAITS_S, and again if the job waits for other nodes. awaits: a sentence that says for
        which nodes the job waits; empty: it waits for none. now_s: monotonic seconds."""
        if awaits != self._awaits:
            self._awaits, self._since_s = awaits, now_s
        elif awaits and awaits != self._told and now_s - self._since_s > AWAITS_S:
            self._told = awaits
            self._telling.say(awaits)
        stands_by = record is not None and not record.over and self._id not in record.members
        if stands_by and record and not self._stands_by:
            self._telling.say(f"{self._id} stands by; the job is on {formatting.listed([*record.members])}")
        self._stands_by = stands_by
