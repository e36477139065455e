"""The store's keyspace. The only place that spells it."""

from __future__ import annotations

from dataclasses import dataclass

from ..model.types import Generation, NodeId


@dataclass(frozen=True)
class Keys:
    job: str

    @property
    def root(self) -> str:
        return f"/mt/{self.job}/"

    @property
    def spec(self) -> str:
        return self.root + "spec"

    @property
    def helm(self) -> str:
        """What every agent watches; all else only the leader does."""
        return self.root + "helm/"

    @property
    def leader(self) -> str:
        return self.helm + "leader"

    @property
    def generation(self) -> str:
        return self.helm + "generation"

    @property
    def nodes(self) -> str:
        return self.root + "nodes/"

    @property
    def statuses(self) -> str:
        return self.root + "status/"

    @property
    def acks(self) -> str:
        return self.root + "acks/"

    @property
    def quarantines(self) -> str:
        return self.root + "quarantine/"

    @property
    def described(self) -> str:
        """Somebody has described the job just now: on a lease, so that no two machines' clocks are compared."""
        return self.root + "described"

    def place(self, life: int) -> str:
        """A mark that is to be seen among the snapshots, in a life of the job: from this generation on."""
        return f"{self.root}place/{life}"

    @property
    def incidents(self) -> str:
        return self.root + "incidents/"

    @property
    def requests(self) -> str:
        return self.root + "requests/"

    @property
    def answers(self) -> str:
        return self.root + "answers/"

    @property
    def meeting(self) -> str:
        """Nodes that wait to measure each other."""
        return self.root + "preflight/here/"

    @property
    def roster(self) -> str:
        return self.root + "preflight/roster"

    def met(self, node: NodeId) -> str:
        return self.meeting + node

    def links(self, session: str, number: int) -> str:
        """Of one of the two pairings."""
        return f"{self.root}preflight/links/{session}/{number}/"

    def node(self, node: NodeId) -> str:
        return self.nodes + node

    def status(self, node: NodeId) -> str:
        return self.statuses + node

    def ack(self, generation: Generation, node: NodeId) -> str:
        return f"{self.acks}{generation}/{node}"

    def quarantine(self, node: NodeId) -> str:
        return self.quarantines + node

    @property
    def deaths(self) -> str:
        return self.root + "deaths/"

    @property
    def modules(self) -> str:
        """What the ranks import, zlib: for the warm processes of those that stand by."""
        return self.root + "modules"

    @property
    def room(self) -> str:
        """Bytes of memory that a snapshot of one rank takes: those that stand by take as much ahead of need."""
        return self.root + "room"

    @property
    def token(self) -> str:
        """What the nodes show each other before they take or give copies of snapshots."""
        return self.root + "token"

    def death(self, instance: str) -> str:
        """Written by the neighbour of an agent that has died, and bound to its lease."""
        return self.deaths + instance

    def incident(self, ident: str) -> str:
        return self.incidents + ident

    def request(self, ident: str) -> str:
        return self.requests + ident

    def answer(self, ident: str) -> str:
        return self.answers + ident
