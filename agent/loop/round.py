"""The order of one round with the store, as agents and the nodes of the scenarios play it.

lease ──▶ what this node says ──▶ controller ──▶ generation record ──▶ what this node does ──▶ how long its ranks may go on
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...resilience.controller import Controller
from ...resilience.model.generation import GenerationRecord
from ...resilience.model.state_machine import Phase
from ..peers.fencing import Fence
from ..peers.lease import Heartbeat
from .store_outage import Outage


@dataclass(kw_only=True)
class Round:
    """All methods raise StoreUnavailable and LeaseGone; then the round is over, and the next one tries again."""

    heartbeat: Heartbeat
    controller: Controller
    outage: Outage
    fence: Fence | None
    """Where there are other nodes."""
    over: int
    """The generation that the job had ended with before this agent came, 0 for none."""
    say_again: Callable[[], None]
    """etcd may have lost what this node has acknowledged."""
    publish: Callable[[GenerationRecord], None]
    """Say how this node is."""
    obey: Callable[[GenerationRecord], bool]
    """Do what the record asks now; whether there may be more to do at once."""
    record: GenerationRecord | None = None
    """The newest; None before the controller has seen what a predecessor of this agent said last."""

    def begin(self, now_s: float) -> None:
        """now_s: monotonic, as in all of them."""
        self.heartbeat.beat(now_s)
        if self.fence:
            self.fence.bind(None)
        if self.outage.held(self.heartbeat.lease, self.record):
            self.say_again()

    def decide(self, now_s: float, wall_s: float) -> bool:
        """Let the controller look, and read what is to be obeyed; whether it has written. Raises MachineError where etcd has lost what it
        knew of the job and nobody can tell it."""
        wrote = self.controller.tick(self.heartbeat.lease, wall_s)
        record = self.outage.looked(self.controller.record(), self.record, now_s)
        self.record = None if record and record.phase is Phase.ENDED and record.number <= self.over else record
        return wrote

    def turn(self, decide: Callable[[], bool]) -> bool:
        """Publish, decide, obey; whether one may lead to the other at once."""
        if self.record is not None:
            self.publish(self.record)
        wrote = decide()
        if self.record and self.heartbeat.instance not in self.record.members.values():
            self.heartbeat.confirm()
        return (self.record is not None and self.obey(self.record)) or wrote

    def end(self) -> None:
        """The record was read since this agent has its lease."""
        if self.fence:
            self.fence.bind(self.record)
