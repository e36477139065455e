"""The machines of a simulated job, its agents, and its ranks; and the World that a controller would read of them.

Nodes that are alike share one status: what is told of thousands of them is made once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from ..resilience.decision import Decision
from ..resilience.orders import GenerationRecord, Incident
from ..resilience.signals import (
    Ack,
    AckKind,
    Generation,
    InPlaceRewind,
    Mismatch,
    NodeId,
    NodeRecord,
    NodeStatus,
    RankExit,
    RankStall,
    Spec,
    Step,
    Straggler,
)
from ..resilience.world import World
from .training import Training

NEVER = math.inf


@dataclass
class Gang:
    """The ranks of one generation. Times are those at which all of them have come so far, or will."""

    generation: Generation
    resume: int
    attached_s: float
    built_s: float
    restored_s: float
    begins_s: float
    """Their first step."""
    stepped_s: float = NEVER
    broken_s: float = NEVER
    """Some rank ended, or hangs: nobody goes on."""
    gone_s: float = NEVER
    """Nothing of it is left."""
    reached: float = -1.0
    """Steps done when it broke."""
    rewind: int = 0
    """The last order to go back that it was told."""
    exits: dict[NodeId, RankExit] = field(default_factory=dict)
    stalls: dict[NodeId, tuple[RankStall, ...]] = field(default_factory=dict)
    rewinds: list[InPlaceRewind] = field(default_factory=list)
    mismatches: dict[NodeId, Mismatch] = field(default_factory=dict)
    stragglers: dict[NodeId, Straggler] = field(default_factory=dict)

    def training(self, now_s: float) -> bool:
        return self.begins_s <= now_s < self.broken_s


class Cluster:
    """Seats are the nodes that the job knows by name; a machine that takes another one's place takes its name (somebody starts the agent
    there under it)."""

    def __init__(self, nodes: int, per_node: int, spares: int, training: Training) -> None:
        self.per_node = per_node
        self.seats = [NodeId(f"n{number:05d}") for number in range(nodes)]
        self.machine = dict(zip(self.seats, range(nodes), strict=True))
        self.seat = dict(enumerate(self.seats))
        self.spares = list(range(nodes, nodes + spares))
        self.rank = {seat: per_node * number for number, seat in enumerate(self.seats)}
        self.training = training
        self.spec = Spec(command=("simulated",), nodes=nodes)
        self.record: GenerationRecord | None = None
        self.nodes: dict[NodeId, NodeRecord] = {}
        self.acks: dict[NodeId, Ack] = {}
        self.incidents: dict[str, Incident] = {}
        self.gang: Gang | None = None
        self.newcomers: dict[NodeId, tuple[int, ...]] = {}
        """Agents that have started since the ranks last trained, and what each could fetch from its buddy."""
        self.bad_from = -1
        """First step whose state is known to be wrong."""
        self._instances = 0

    # -- agents -----------------------------------------------------------------------------------------------------------

    def register(self, seat: NodeId) -> None:
        """An agent starts there."""
        self._instances += 1
        self.nodes[seat] = NodeRecord(
            instance=f"agent-{self._instances}", host=f"m{self.machine[seat]}", pid=1, ranks=self.per_node
        )

    def leave(self, seat: NodeId) -> None:
        """Its agent's lease is gone, and so are the copies that it held."""
        self.nodes.pop(seat, None)
        self.acks.pop(seat, None)

    def empty(self, seat: NodeId) -> int:
        """The machine does not belong to the job any more."""
        machine = self.machine.pop(seat)
        del self.seat[machine]
        return machine

    def fill(self, seat: NodeId, machine: int) -> None:
        self.machine[seat], self.seat[machine] = machine, seat

    def buddy(self, seat: NodeId) -> NodeId:
        """Who holds its copies: the node half of the cluster away."""
        at = self.rank[seat] // self.per_node
        return self.seats[(at + max(1, len(self.seats) // 2)) % len(self.seats)]

    def fetched(self, seat: NodeId, now_s: float) -> tuple[int, ...]:
        """What a newcomer there can have from its buddy's memory."""
        keeper, copied = self.buddy(seat), self.training.copied(now_s)
        there = copied >= 0 and keeper != seat and keeper in self.nodes and keeper not in self.newcomers
        return (copied,) if there else ()

    def present(self) -> list[NodeId]:
        """Members whose agent is the one that the record names."""
        members = self.record.members if self.record else {}
        return [seat for seat, instance in members.items() if seat in self.nodes and self.nodes[seat].instance == instance]

    def acknowledge(self, seats: Iterable[NodeId], kind: AckKind, now_s: float) -> None:
        assert self.record
        generation = self.record.number
        for seat in seats:
            self.acks[seat] = Ack(
                kind=kind, generation=generation, instance=self.nodes[seat].instance, at_s=now_s, port=1
            )

    # -- what a controller reads and writes -----------------------------------------------------------------------------

    def write(self, decision: Decision) -> None:
        for incident in decision.incidents:
            self.incidents[incident.id] = incident
        if decision.record:
            if self.record is None or decision.record.number != self.record.number:
                self.acks = {}
            self.record = decision.record

    def world(self, now_s: float) -> World:
        return World(
            spec=self.spec,
            record=self.record,
            nodes=self.nodes,
            status=self._statuses(now_s),
            acks=self.acks,
            incidents=tuple(self.incidents.values()),
            requests=(),
        )

    def _statuses(self, now_s: float) -> dict[NodeId, NodeStatus]:
        if self.record is None:
            return {}
        usual = self._usual(now_s)
        found = dict.fromkeys(self.record.members, usual)
        gang = self.gang
        for seat, memory in self.newcomers.items():
            if seat in found and (gang is None or gang.resume < 0):
                found[seat] = replace(usual, memory_steps=tuple(map(Step, memory)), agreed_steps=())
        if gang is None:
            return found
        told: dict[NodeId, dict[str, object]] = {}
        for seat, gone in gang.exits.items():
            told.setdefault(seat, {})["exits"] = (gone,)
        for seat, stalls in gang.stalls.items():
            told.setdefault(seat, {})["stalls"] = stalls
        for seat, mismatch in gang.mismatches.items():
            told.setdefault(seat, {})["mismatches"] = (mismatch,)
        for seat, slow in gang.stragglers.items():
            told.setdefault(seat, {})["stragglers"] = (slow,)
        for seat, changes in told.items():
            if seat in found:
                found[seat] = replace(found[seat], **changes)  # type: ignore[arg-type]
        return found

    def _usual(self, now_s: float) -> NodeStatus:
        """What every node says that nothing is special about."""
        assert self.record
        training, gang = self.training, self.gang
        memory, durable = training.memory(now_s), training.durable(now_s)
        agreed = tuple(step for step in sorted({*memory, *durable}) if self.bad_from < 0 or step < self.bad_from)
        kept = {
            "memory_steps": tuple(map(Step, memory)),
            "durable_steps": tuple(map(Step, durable)),
            "agreed_steps": tuple(map(Step, agreed)),
        }
        if gang is None:
            return NodeStatus(generation=self.record.number, at_s=now_s, **kept)  # type: ignore[arg-type]
        until_s = min(now_s, gang.broken_s)
        done = gang.reached if gang.reached >= 0 else -1.0
        if training.track:
            done = training.track.finished(now_s)
        elif until_s >= gang.restored_s:
            done = max(done, gang.resume)
        marks = {
            name: at_s
            for name, at_s in (
                ("attached_s", gang.attached_s),
                ("built_s", gang.built_s),
                ("restored_s", gang.restored_s),
                ("stepped_s", gang.stepped_s),
            )
            if at_s <= until_s
        }
        if (back := self._replayed(until_s)) is not None:
            marks["replayed_s"] = back
        step = Step(math.floor(done))
        return NodeStatus(
            generation=gang.generation,
            at_s=now_s,
            min_step=step,
            max_step=step,
            alive=self.per_node,
            launch="warm",
            rewinds=tuple(gang.rewinds),
            **kept,  # type: ignore[arg-type]
            **marks,  # type: ignore[arg-type]
        )

    def _replayed(self, until_s: float) -> float | None:
        """When the ranks were back at the step where the last fault struck."""
        assert self.record
        track = self.training.track
        if track is None or track.at(until_s) < self.record.replay_until or self.record.replay_until < 0:
            return None
        return min(until_s, max(track.at_s, track.when(self.record.replay_until)))
