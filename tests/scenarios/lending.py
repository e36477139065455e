"""Copies of snapshots in another node's memory, simulated: what `Copies` and the threads of two drain processes do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mt_resilient.checkpoint.arena.slot_header import Stamp
from mt_resilient.resilience.membership import buddy_sources
from mt_resilient.resilience.model.generation import GenerationRecord
from mt_resilient.resilience.model.node import Copy
from mt_resilient.resilience.model.state_machine import Phase
from mt_resilient.resilience.model.types import Generation, Step

from .kept import Kept

if TYPE_CHECKING:
    from .node import Node

EVERY = 3
"""Steps from one that is marked to the next."""
COPY_S = 2
FETCH_S = 3
"""Ticks until a part that is asked for has come: ranks start and build in two, and wait."""
GUESTS = 2


class Lending:
    def __init__(self, node: Node) -> None:
        self._node = node
        self.guests: dict[Stamp, Kept] = {}
        self.unfetched: list[Stamp] = []
        self.fetched: dict[Stamp, int] = {}
        self._asked = 0
        """Generation for which this node's part has been asked of another."""
        self._sent = Stamp(-1, 0, -1)
        self._to = ""
        """The agent that has it."""
        self._due: tuple[Stamp, float] = (self._sent, 0.0)
        self._coming: tuple[GenerationRecord, float] | None = None
        """What is being fetched, and when it will be here."""

    def _other(self, name: Any, record: GenerationRecord) -> Node | None:
        """That member, if a connection to it would stand."""
        other, cut = self._node.job.nodes.get(name), self._node.job.cut.peers
        there = other is not None and other.code is None and other.instance == record.members.get(name)
        return other if there and not cut & {self._node.name, name} else None

    def send(self, now_s: float) -> None:
        """The newest marked snapshot that all ranks hold, while they train."""
        record = self._node.record
        if record is None or self._node.group is None or record.phase not in (Phase.LAUNCH, Phase.RUN):
            return
        holder = self._other(buddy_sources.holder(record, self._node.name), record)
        kept = [kept for kept in self._node.arena.values() if kept.sealed and kept.marked]
        newest = max(kept, key=lambda each: each.stamp, default=None)
        if holder is None or holder.group is None or newest is None:
            return
        if (newest.stamp, holder.instance) == (self._sent, self._to) or self._node.faults.drain_dead:
            return
        if self._due[0] != newest.stamp:
            self._due = newest.stamp, now_s + COPY_S
        if now_s >= self._due[1] and holder.lending.takes(newest):
            self._sent, self._to = newest.stamp, holder.instance

    def takes(self, kept: Kept) -> bool:
        latest = max((stamp.generation for stamp in self.guests), default=-1)
        if kept.stamp.generation < latest:
            return False
        self.guests[kept.stamp] = replace(kept, durable=False, drained=True)
        for stamp in sorted(self.guests)[:-GUESTS]:
            del self.guests[stamp]
        return True

    def ask(self, record: GenerationRecord, now_s: float) -> None:
        """Begin to fetch this node's part of the state, if it lacks it."""
        if record.sources.get(self._node.name) is not None and self._asked != record.number:
            self._asked, self._coming = record.number, (record, now_s + FETCH_S)

    @property
    def fetching(self) -> bool:
        return self._coming is not None

    def abandon(self) -> None:
        self._coming = None

    def fetch(self, now_s: float) -> None:
        """What was asked for comes, or never will."""
        if self._coming is None or now_s < self._coming[1]:
            return
        record, self._coming = self._coming[0], None
        name, source = self._node.name, record.sources[self._node.name]
        holder = None if self._node.faults.drain_dead else self._other(source.holder, record)
        stamp = Stamp(source.generation, source.rewinds, record.resume_step)
        kept = holder.lending.guests.get(stamp) if holder else None
        if kept:
            self._node.arena[record.resume_step] = replace(kept, drained=False)
            self.fetched[stamp] = record.number
            self._node.say(f"{name} gets its part of step {record.resume_step} from {source.holder}")
        else:
            self.unfetched.append(stamp)
            self._node.say(f"{name} does not get its part of step {record.resume_step} from {source.holder}")

    def forget(self, wrong: Callable[[Stamp], bool]) -> None:
        for stamp in [stamp for stamp in self.guests if wrong(stamp)]:
            del self.guests[stamp]

    def told(self) -> dict[str, Any]:
        """For the status."""
        return {
            "copies": tuple(
                Copy(
                    node_rank=kept.seat[0],
                    nodes=kept.seat[1],
                    step=Step(stamp.step),
                    generation=Generation(stamp.generation),
                    rewinds=stamp.rewinds,
                )
                for stamp, kept in sorted(self.guests.items())
            ),
            "unfetched": tuple(self.unfetched),
        }


def lent(nodes: list[Node]) -> list[dict[Stamp, Kept]]:
    """What the members of a generation could have from each other, by node rank."""
    found: list[dict[Stamp, Kept]] = [{} for _ in nodes]
    held = {
        kept.stamp
        for at, node in enumerate(nodes)
        for kept in node.arena.values()
        if kept.sealed and kept.seat == (at, len(nodes)) and node.replicas.fit(kept.stamp)
    }
    for node in nodes:
        for stamp, kept in node.lending.guests.items():
            rank, count = kept.seat
            if stamp in held and count == len(nodes) and nodes[rank] is not node:
                found[rank] |= {stamp: kept} if stamp not in nodes[rank].lending.unfetched else {}
    return found
