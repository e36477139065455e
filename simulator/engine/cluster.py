"""The machines, agents and ranks of a simulated job, and the World that its controller reads.

Nodes in the same state share one status object, so it is made once for thousands of nodes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from ...resilience.membership.buddy_placement import opposite
from ...resilience.membership.quarantine import readmitted
from ...resilience.model.cluster_state import World
from ...resilience.model.generation import Decision, GenerationRecord, Quarantine
from ...resilience.model.incident import Incident
from ...resilience.model.node import Ack, AckKind, NodeRecord, NodeStatus, Spec
from ...resilience.model.signals import InPlaceRewind, Mismatch, RankExit, RankStall, Straggler
from ...resilience.model.types import Generation, NodeId, Rank, Step
from .training import Training

NEVER = math.inf


@dataclass
class WorkerGroup:
    """The ranks of one generation. Each time is the second of the simulation at which all ranks reach that point, past or future."""

    generation: Generation
    resume: int
    attached_s: float
    built_s: float
    restored_s: float
    begins_s: float
    """When the ranks begin their first step."""
    stepped_s: float = NEVER
    broken_s: float = NEVER
    """When some rank ends or hangs, so that no rank makes progress."""
    gone_s: float = NEVER
    """When the last process of the group has ended."""
    reached: float = -1.0
    """Steps done when the group broke."""
    rewind: int = 0
    """Number of the last rewind order that the group received."""
    declined: int = 0
    """Number of the last rewind order that the group could not obey, because the state is no longer kept."""
    told_to_wait: bool = False
    waits: bool = False
    """Whether all ranks wait at a step boundary."""
    saves: str = ""
    """The move or request for which their state goes to disk (`GenerationRecord.saves`)."""
    exits: dict[NodeId, tuple[RankExit, ...]] = field(default_factory=dict)
    stalls: dict[NodeId, tuple[RankStall, ...]] = field(default_factory=dict)
    rewinds: list[InPlaceRewind] = field(default_factory=list)
    mismatches: dict[NodeId, tuple[Mismatch, ...]] = field(default_factory=dict)
    stragglers: dict[NodeId, tuple[Straggler, ...]] = field(default_factory=dict)

    def training(self, now_s: float) -> bool:
        return self.begins_s <= now_s < self.broken_s


class Cluster:
    """The simulated cluster. A machine is always the same node, whether it is a member, a spare, or away for repair. A machine that returns
    has a new agent."""

    def __init__(self, nodes: int, per_node: int, spares: int, sizes: tuple[int, ...], training: Training) -> None:
        self.per_node = per_node
        self.names = [NodeId(f"n{machine:05d}") for machine in range(nodes + spares)]
        self.machine = {name: machine for machine, name in enumerate(self.names)}
        self.training = training
        self.spec = Spec(command=("simulated",), sizes=sizes, spares=spares, ranks=per_node)
        self.record: GenerationRecord | None = None
        self.nodes: dict[NodeId, NodeRecord] = {}
        """Nodes with a living agent."""
        self.since_s: dict[NodeId, float] = {}
        """By node: when its agent started."""
        self.acks: dict[NodeId, Ack] = {}
        self.incidents: dict[str, Incident] = {}
        self.quarantine: dict[NodeId, Quarantine] = {}
        self.group: WorkerGroup | None = None
        self.place: dict[NodeId, int] = {}
        """Node rank of each member."""
        self.newcomers: dict[NodeId, tuple[int, ...]] = {}
        """By member whose memory holds nothing yet: the steps that it can fetch from its buddy (the node that holds its copies)."""
        self.bad_from = -1
        """First step whose state is known to be wrong."""
        self._instances = 0

    # -- agents -----------------------------------------------------------------------------------------------------------

    def register(self, name: NodeId, now_s: float) -> None:
        """Start an agent on the node."""
        self._instances += 1
        self.nodes[name] = NodeRecord(instance=f"agent-{self._instances}", host=name, pid=1, ranks=self.per_node)
        self.since_s[name] = now_s

    def leave(self, name: NodeId) -> None:
        """Remove the node's agent and its acknowledgement."""
        self.nodes.pop(name, None)
        self.acks.pop(name, None)

    def readmit(self, name: NodeId, now_s: float) -> None:
        """Readmit the node, which an operator has repaired."""
        if name in self.quarantine:
            self.quarantine[name] = readmitted("an operator", now_s)

    def rank(self, name: NodeId) -> Rank:
        """Return the node's first rank."""
        return Rank(self.per_node * self.place[name])

    def present(self) -> list[NodeId]:
        """Return the members whose agent is the one in the record."""
        members = self.record.members if self.record else {}
        return [name for name, it in members.items() if name in self.nodes and self.nodes[name].instance == it]

    def acknowledge(self, names: Iterable[NodeId], kind: AckKind, now_s: float) -> None:
        assert self.record
        generation = self.record.number
        for name in names:
            instance = self.nodes[name].instance
            self.acks[name] = Ack(kind=kind, generation=generation, instance=instance, at_s=now_s, port=1)

    def _seated(self, before: GenerationRecord | None, now_s: float) -> None:
        """Find the new members of a generation, and the steps that their buddies hold for them."""
        assert self.record
        members = list(self.record.members)
        self.place = {name: at for at, name in enumerate(members)}
        if before is None:
            return
        if len(members) != len(before.members):
            self.training.forget()  # another number of ranks splits the state differently: it comes from disk
        fresh = {name for name, it in self.record.members.items() if before.members.get(name) != it}
        fresh |= self.newcomers.keys() & self.place.keys()
        copied = self.training.copied(now_s)
        for name in sorted(fresh):
            keeper = members[opposite(self.place[name], len(members))]
            there = copied >= 0 and keeper not in fresh and keeper in self.nodes
            self.newcomers[name] = (copied,) if there else ()
        self.newcomers = {name: kept for name, kept in self.newcomers.items() if name in self.place}

    # -- what a controller reads and writes -----------------------------------------------------------------------------

    def write(self, decision: Decision, now_s: float) -> None:
        for incident in decision.incidents:
            self.incidents[incident.id] = incident
        self.quarantine |= decision.quarantine
        if decision.record:
            before, self.record = self.record, decision.record
            if before is None or before.number != self.record.number:
                self.acks = {}
                self._seated(before, now_s)

    def world(self, now_s: float) -> World:
        return World(
            spec=self.spec,
            record=self.record,
            nodes=self.nodes,
            since_s=self.since_s,
            status=self._statuses(now_s),
            acks=self.acks,
            incidents=tuple(self.incidents.values()),
            requests=(),
            quarantine=self.quarantine,
        )

    def _statuses(self, now_s: float) -> dict[NodeId, NodeStatus]:
        if self.record is None:
            return {}
        usual = self._usual(now_s)
        found = dict.fromkeys(self.record.members, usual)
        group = self.group
        if group is None:
            for name, memory in self.newcomers.items():
                found[name] = replace(usual, memory_steps=tuple(map(Step, memory)))
            return found
        told: dict[NodeId, dict[str, object]] = {}
        for what in ("exits", "stalls", "mismatches", "stragglers"):
            for name, seen in getattr(group, what).items():
                told.setdefault(name, {})[what] = seen
        for name, changes in told.items():
            if name in found:
                found[name] = replace(found[name], **changes)  # type: ignore[arg-type]
        return found

    def _usual(self, now_s: float) -> NodeStatus:
        """Return the status of every node on which nothing special has happened."""
        assert self.record
        training, group = self.training, self.group
        memory, durable = training.memory(now_s), training.durable(now_s)
        agreed = tuple(step for step in sorted({*memory, *durable}) if self.bad_from < 0 or step < self.bad_from)
        kept = {
            "memory_steps": tuple(map(Step, memory)),
            "durable_steps": tuple(map(Step, durable)),
            "agreed_steps": tuple(map(Step, agreed)),
        }
        if group is None:
            return NodeStatus(generation=self.record.number, at_s=now_s, **kept)  # type: ignore[arg-type]
        until_s = min(now_s, group.broken_s)
        done = group.reached if group.reached >= 0 else -1.0
        if training.track:
            done = training.track.finished(now_s)
        elif until_s >= group.restored_s:
            done = max(done, group.resume)
        marks = {
            name: at_s
            for name in ("attached_s", "built_s", "restored_s", "stepped_s")
            if (at_s := getattr(group, name)) <= until_s
        }
        if (back := self._replayed(until_s)) is not None:
            marks["replayed_s"] = back
        step = Step(math.floor(done))
        return NodeStatus(
            generation=group.generation,
            at_s=now_s,
            min_step=step,
            max_step=step,
            alive=self.per_node,
            launch="warm",
            rewinds=tuple(group.rewinds),
            declined=group.declined,
            paused=group.waits,
            snapshot=group.saves,
            **kept,  # type: ignore[arg-type]
            **marks,  # type: ignore[arg-type]
        )

    def _replayed(self, until_s: float) -> float | None:
        """Return when the ranks were back at the step where the last fault struck; None: they are not."""
        assert self.record
        track = self.training.track
        if track is None or track.at(until_s) < self.record.replay_until or self.record.replay_until < 0:
            return None
        return min(until_s, max(track.at_s, track.when(self.record.replay_until)))
