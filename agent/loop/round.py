"""The order of one round with etcd, for agents and for the nodes of the scenarios.

lease ──▶ this node's status ──▶ controller ──▶ generation record ──▶ this node's actions ──▶ how long its ranks may go on
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
    """None for a job of one node."""
    over: int
    """The generation with which the job had ended before this agent came, 0 for none."""
    say_again: Callable[[], None]
    """Called when etcd may have lost this node's acknowledgements: it writes them again."""
    publish: Callable[[GenerationRecord], None]
    """Publishes this node's status."""
    obey: Callable[[GenerationRecord], bool]
    """Does what the record asks now; returns whether there may be more to do at once."""
    record: GenerationRecord | None = None
    """The newest record. None: not read yet, or it is the one that ended the job before this agent came."""

    def begin(self, now_s: float) -> None:
        """Renew the lease, and find out whether etcd has lost something. now_s: monotonic, as in all methods."""
        self.heartbeat.beat(now_s)
        if self.fence:
            self.fence.bind(None)
        if self.outage.held(self.heartbeat.lease, self.record):
            self.say_again()

    def decide(self, now_s: float, wall_s: float) -> bool:
        """Run the controller, and read the record to obey. Return whether the controller has written. Raises MachineError if etcd has lost
        the job's data and no agent can write them again."""
        wrote = self.controller.tick(self.heartbeat.lease, wall_s)
        record = self.outage.looked(self.controller.record(), self.record, now_s)
        self.record = None if record and record.phase is Phase.ENDED and record.number <= self.over else record
        return wrote

    def turn(self, decide: Callable[[], bool]) -> bool:
        """Publish, decide, obey. Return whether another turn may have something to do at once."""
        if self.record is not None:
            self.publish(self.record)
        wrote = decide()
        if self.record and self.heartbeat.instance not in self.record.members.values():
            self.heartbeat.confirm()
        return (self.record is not None and self.obey(self.record)) or wrote

    def end(self) -> None:
        """Tell the ranks how long they may go on: this agent has read the record under its present lease."""
        if self.fence:
            self.fence.bind(self.record)
