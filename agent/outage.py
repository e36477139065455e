"""While etcd does not answer, and when it has lost what it knew: what is told, what is done about it.

no answer ──▶ told once; our own server is started again        empty ──▶ who trains tells it the job again
"""

from __future__ import annotations

from collections.abc import Callable

from ..resilience import phrases
from ..resilience.errors import MachineError, ResilientError
from ..resilience.orders import GenerationRecord
from .node import Node
from .telling import Telling

EMPTIED_S = 30.0
"""How long those that train may take to tell an etcd that has lost its data what the job is."""


class Outage:
    def __init__(
        self,
        node: Node,
        telling: Telling,
        mend: Callable[[], object] | None,
        remind: Callable[[GenerationRecord], object],
    ) -> None:
        """mend: called in each round in which the store does not answer (embedded etcd: start it again); remind: tells it what the job is,
        and this record. Times are in seconds, monotonic."""
        self._node, self._telling, self._mend, self._remind = node, telling, mend, remind
        self._down_s = 0.0
        self._emptied_s = 0.0
        """Since when etcd knows nothing of the job any more; 0: it does."""

    def lasts(self, error: ResilientError, now_s: float, *, fenced_soon: bool = False) -> None:
        """fenced_soon: the ranks are not to outlive the lease."""
        if not self._down_s:
            self._down_s = now_s
            until = "training goes on, no recovery is possible until it is back"
            if fenced_soon:
                until = (
                    "training goes on for the rest of this agent's lease; then its ranks are ended, for those that stand by are enough "
                    "to begin without them"
                )
            self._telling.say(f"{error}; {until}", "bad")
        if self._mend:
            self._mend()

    def over(self, now_s: float) -> None:
        if self._down_s:
            self._telling.say(f"etcd answers again, after {phrases.seconds(now_s - self._down_s)}", "good")
        self._down_s = 0.0

    def looked(
        self, found: GenerationRecord | None, known: GenerationRecord | None, now_s: float
    ) -> GenerationRecord | None:
        """The record to obey. found: what etcd has; known: what it had. Where it has begun anew without its data, who has ranks of this
        generation tells it: while they are not fenced, no later one can have begun. Who knows of a later one than they waits in vain.
        Raises StoreUnavailable, and MachineError where nobody can tell it."""
        if known is None or (found is not None and found.number >= known.number):
            self._emptied_s = 0.0
            return found
        gang = self._node.gang
        if not self._emptied_s:
            self._emptied_s = now_s
            self._telling.say(
                "etcd has lost its data, and with it what it knew of this job: those that train tell it again", "bad"
            )
        if gang and gang.generation == known.number and not gang.fenced:
            self._remind(known)
        elif now_s - self._emptied_s > EMPTIED_S:
            raise MachineError(
                "etcd has lost its data, and nobody trains who could tell it what it knew of this job; nothing runs here any more. Look "
                "after it, then give the same command again: it goes on from the newest snapshot"
            )
        return known
