"""The names of all keys in the store. No other module writes out a key's name."""

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
        """Prefix of the keys that every agent watches. Only the leader watches all other keys."""
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
        """Exists for a short time after the job's Spec was written. A lease ends it, so that no two machines' clocks are compared."""
        return self.root + "described"

    def place(self, life: int) -> str:
        """Key with the name of a mark, which every node must find in its storage for snapshots. life: the first generation since the job
        was started."""
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
        """Prefix of the nodes that wait to measure the network links between them."""
        return self.root + "preflight/here/"

    @property
    def roster(self) -> str:
        return self.root + "preflight/roster"

    def met(self, node: NodeId) -> str:
        return self.meeting + node

    def links(self, session: str, number: int) -> str:
        """Prefix of the links measured in one of the two pairings of nodes."""
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
        """The modules that the ranks import, compressed by zlib. The warm processes of spares import them too."""
        return self.root + "modules"

    @property
    def room(self) -> str:
        """Bytes of memory that a snapshot of one rank takes. Spares allocate that much before they need it."""
        return self.root + "room"

    @property
    def token(self) -> str:
        """The secret that nodes show each other before they send or receive copies of snapshots."""
        return self.root + "token"

    def death(self, instance: str) -> str:
        """Key by which a neighbour reports that an agent is dead. It is bound to the neighbour's lease."""
        return self.deaths + instance

    def incident(self, ident: str) -> str:
        return self.incidents + ident

    def request(self, ident: str) -> str:
        return self.requests + ident

    def answer(self, ident: str) -> str:
        return self.answers + ident
