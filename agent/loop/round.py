"""The sequence of one round with etcd, for agents and for the simulated nodes of the scenarios.

lease ──▶ this node's status ──▶ controller ──▶ generation record ──▶ this node's actions ──▶ how long its ranks may continue
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
    """One round. All methods may raise StoreUnavailable and LeaseGone; then the round is over, and the next round tries again."""

    heartbeat: Heartbeat
    controller: Controller
    outage: Outage
    fence: Fence | None
    """None for a job of one node."""
    over: int
    """Number of the generation with which the job had ended before this agent joined; 0: it had not ended."""
    say_again: Callable[[], None]
    """Called when etcd may have lost this node's acknowledgements: makes this node write them again."""
    publish: Callable[[GenerationRecord], None]
    """Publishes this node's status."""
    obey: Callable[[GenerationRecord], bool]
    """Does what the record requires now; returns whether there may be more to do immediately."""
    record: GenerationRecord | None = None
    """The newest record. None: no record was read yet, or the newest one ended the job before this agent joined."""

    def begin(self, now_s: float) -> None:
        """Renew the lease, and check whether etcd has lost data. now_s: monotonic, as in all methods."""
        self.heartbeat.beat(now_s)
        if self.fence:
            self.fence.bind(None)
        if self.outage.held(self.heartbeat.lease, self.record):
            self.say_again()
            self.controller.doubt()  # `end` may only rely on a record that was read under the new lease

    def decide(self, now_s: float, wall_s: float) -> bool:
        """Run the controller, and read the record to obey. Return whether the controller has written to etcd. Raises MachineError if etcd
        has lost the job's data and no agent can write the data again."""
        wrote = self.controller.tick(self.heartbeat.lease, wall_s)
        record = self.outage.looked(self.controller.record(), self.record, now_s)
        self.record = None if record and record.phase is Phase.ENDED and record.number <= self.over else record
        return wrote

    def turn(self, decide: Callable[[], bool]) -> bool:
        """Publish the status, decide, and obey the record. Return whether another call may have something to do immediately."""
        if self.record is not None:
            self.publish(self.record)
        wrote = decide()
        if self.record and self.heartbeat.instance not in self.record.members.values():
            self.heartbeat.confirm()
        return (self.record is not None and self.obey(self.record)) or wrote

    def end(self) -> None:
        """Write into the ranks' pages how long they may continue. Call `end` after this agent has read the record under its present
        lease."""
        if self.fence:
            self.fence.bind(self.record)
