"""This node's part in copies of snapshots: whom its own go to, whose it holds, and how it gets back what it has lost.

    ranks' marked snapshots ──drain process (`service.py`)──▶ the holder's guest slots ──▶ whoever takes this node's place

The guest slots are the agent's, so that copies outlive ranks and drain process; what is chosen, and of which step all nodes have a copy, is
for `resilience/membership/buddy_sources.py` to say.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import chain
from typing import Any

from ...checkpoint.arena import arena
from ...checkpoint.arena.arena import Slot
from ...checkpoint.arena.slot_header import Header, Stamp, State
from ...checkpoint.buddy import admission
from ...checkpoint.durable.save_interval import CopiesPolicy
from ...resilience.errors import InternalError
from ...resilience.model.generation import GenerationRecord
from ...resilience.model.node import Copy, NodeRecord
from ...resilience.model.types import Generation, NodeId, Step
from ...resilience.store.codec import loads
from ...resilience.store.keys import Keys
from ...resilience.store.protocol import Store
from ..launch.ports import free_port
from .service import TOKEN

GUESTS = 2
"""Slots for each rank of the node whose copies are held: one stays whole while the next one arrives."""


def address(store: Store, keys: Keys, record: GenerationRecord, member: NodeId) -> str:
    """Where that member's copies are given and taken; empty where its agent is not the one of `record`, or takes no part. Raises
    StoreUnavailable."""
    entry = store.get(keys.node(member))
    try:
        there = loads(NodeRecord, entry.value) if entry else None
    except InternalError:  # told by whoever leads
        return ""
    fits = there is not None and there.instance == record.members.get(member) and there.copies_port
    return f"{there.address}:{there.copies_port}" if there and fits else ""


class Copies:
    def __init__(self, ranks: int, address: str, token: str, policy: CopiesPolicy) -> None:
        """ranks: of this node; address: where the others reach it; token: the job's secret, in hexadecimal digits."""
        self.policy = policy
        self.port = free_port()
        self._fds = arena.create(ranks, GUESTS)
        paths = arena.paths(self._fds, os.getpid())
        self._slots = [[Slot(path) for path in row] for row in paths]
        self.config = {
            "listen": f"{address}:{self.port}",
            "guests": paths,
            "stall_s": policy.stall_s,
            "hold_s": policy.hold_s,
            "patience_s": policy.stall_s,
        }
        """For the drain process; and what it must not be told as an argument:"""
        self.environment = {TOKEN: token}
        self.unfetched: list[Stamp] = []
        """What could not be had from its holder."""
        self.fetching: Stamp | None = None
        self._took_s = 0.0
        self._next_s = 0.0
        self._given_up_s = 0.0
        """When the copy that was asked for last, and has not come to its end, is waited for no longer."""

    def held(self) -> tuple[Copy, ...]:
        """The copies that are whole, of one node's ranks each."""
        rows = [[slot.header() for slot in row] for row in self._slots]
        found = []
        for stamp in sorted(admission.whole(rows)):
            of = [next(h for h in row if h.state is State.SEALED and h.stamp == stamp) for row in rows]
            if self._of_one_node(of):
                node_rank, nodes = of[0].rank // len(of), of[0].world // len(of)
                step, generation = Step(stamp.step), Generation(stamp.generation)
                found.append(
                    Copy(node_rank=node_rank, nodes=nodes, step=step, generation=generation, rewinds=stamp.rewinds)
                )
        return tuple(found)

    @staticmethod
    def _of_one_node(headers: list[Header]) -> bool:
        first = headers[0].rank
        together = [header.rank for header in headers] == [*range(first, first + len(headers))]
        return together and first % len(headers) == 0 and len({header.world for header in headers}) == 1

    def forget(self, wrong: Callable[[Stamp], bool]) -> None:
        """Those of a course of the training that was left."""
        for slot in chain(*self._slots):
            header = slot.header()
            if header.state is State.SEALED and wrong(header.stamp):
                slot.free()

    def begin(self) -> None:
        """Other ranks have started: the next snapshot is copied at once."""
        self._next_s = self._given_up_s = 0.0

    def due(self, now_s: float) -> bool:
        """Whether it is time to have a snapshot copied; if so, the next time is set. Not while the last one is on its way: ranks keep two,
        and meanwhile a lost node's part can come back of the one before. now_s: monotonic."""
        if not self.policy.every_s or now_s < max(self._next_s, self._given_up_s):
            return False
        self._next_s = now_s + self.policy.interval_s(self._took_s)
        self._given_up_s = now_s + 2 * self.policy.hold_s
        return True

    def heard(self, event: dict[str, Any]) -> None:
        """A word of the drain process."""
        if event["event"] == "replicated":
            self._took_s, self._given_up_s = float(event["seconds"]), 0.0
        if self.fetching is None or event["event"] not in ("fetched", "not fetched"):
            return
        if event["event"] != "fetched":
            self.unfetched.append(self.fetching)
        self.fetching = None
