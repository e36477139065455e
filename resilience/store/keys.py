"""The names of all keys in the store. No other module writes out a key's name."""

from __future__ import annotations

from dataclasses import dataclass

from ..model.types import Generation, NodeId


class _Under:
    """A key, or a prefix of keys, under the job's root."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __get__(self, keys: Keys, _: type) -> str:
        return keys.root + self._path


@dataclass(frozen=True)
class Keys:
    job: str

    @property
    def root(self) -> str:
        return f"/mt/{self.job}/"

    spec = _Under("spec")
    helm = _Under("helm/")
    """Prefix of the keys that every agent watches. Only the leader watches all other keys."""
    leader = _Under("helm/leader")
    generation = _Under("helm/generation")
    nodes = _Under("nodes/")
    statuses = _Under("status/")
    acks = _Under("acks/")
    deaths = _Under("deaths/")
    quarantines = _Under("quarantine/")
    incidents = _Under("incidents/")
    requests = _Under("requests/")
    answers = _Under("answers/")
    described = _Under("described")
    """Exists for a short time after the job's Spec was written. A lease ends it, so that no two machines' clocks are compared."""
    meeting = _Under("preflight/here/")
    """Prefix of the nodes that wait to measure the network links between them."""
    roster = _Under("preflight/roster")
    modules = _Under("modules")
    """The modules that the ranks import, compressed by zlib. The warm processes of spares import them too."""
    room = _Under("room")
    """Bytes of memory that a snapshot of one rank takes. Spares allocate that much before they need it."""
    token = _Under("token")
    """The secret that nodes show each other before they send or receive copies of snapshots."""

    def place(self, life: int) -> str:
        """Key with the name of a mark, which every node must find in its storage for snapshots. life: the first generation since the job
        was started."""
        return f"{self.root}place/{life}"

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

    def death(self, instance: str) -> str:
        """Key by which a neighbour reports that an agent is dead. The key is bound to the neighbour's lease."""
        return self.deaths + instance

    def incident(self, ident: str) -> str:
        return self.incidents + ident

    def request(self, ident: str) -> str:
        return self.requests + ident

    def answer(self, ident: str) -> str:
        return self.answers + ident
