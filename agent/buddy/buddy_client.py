"""The agent's part in copies of snapshots: where copies of its own snapshots go, which copies it holds, and how it fetches a lost part.

    ranks' marked snapshots ──drain process (`service.py`)──▶ the holder's guest slots ──▶ the node that takes this node's place

A guest slot is shared memory for another node's copy. The agent owns the guest slots, so copies outlive the ranks and the drain process.
`resilience/membership/buddy_sources.py` chooses which copies are used, and at which step every node has its part.
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
"""Guest slots for each rank of the node whose copies this node holds. One copy stays whole while the next one arrives."""


def address(store: Store, keys: Keys, record: GenerationRecord, member: NodeId) -> str:
    """Return the HOST:PORT at which `member` receives and serves copies. Empty: its agent is not the agent in `record`, or it offers no
    copies. Raises StoreUnavailable."""
    entry = store.get(keys.node(member))
    try:
        there = loads(NodeRecord, entry.value) if entry else None
    except InternalError:  # the leader reports it
        return ""
    fits = there is not None and there.instance == record.members.get(member) and there.copies_port
    return f"{there.address}:{there.copies_port}" if there and fits else ""


class Copies:
    def __init__(self, ranks: int, address: str, token: str, policy: CopiesPolicy) -> None:
        """ranks: number of ranks of this node. address: the host address at which other nodes reach this node. token: the job's secret, in
        hexadecimal digits."""
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
        """Configuration that the drain process gets as an argument. The token must not be an argument, so it is in the environment:"""
        self.environment = {TOKEN: token}
        self.unfetched: list[Stamp] = []
        """Snapshots whose copy the other node did not deliver."""
        self.fetching: Stamp | None = None
        self._took_s = 0.0
        self._next_s = 0.0
        self._given_up_s = 0.0
        """Monotonic time until which the last requested copy may still be under way; 0: no copy is."""

    def held(self) -> tuple[Copy, ...]:
        """Return the complete copies. Each copy contains a snapshot's parts of all ranks of one node."""
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
        """Free each sealed copy that no longer belongs to the lineage: `wrong` returns True for its stamp."""
        for slot in chain(*self._slots):
            header = slot.header()
            if header.state is State.SEALED and wrong(header.stamp):
                slot.free()

    def begin(self) -> None:
        """Make the next copy due immediately, because new ranks have started."""
        self._next_s = self._given_up_s = 0.0

    def due(self, now_s: float) -> bool:
        """Return whether a snapshot is due to be copied, and if so, set the next time. No snapshot is due while the last copy is under way.
        Ranks keep two marked snapshots (those to be copied), so a lost node can meanwhile be restored from the earlier copy. now_s:
        monotonic."""
        if not self.policy.every_s or now_s < max(self._next_s, self._given_up_s):
            return False
        self._next_s = now_s + self.policy.interval_s(self._took_s)
        self._given_up_s = now_s + 2 * self.policy.hold_s
        return True

    def heard(self, event: dict[str, Any]) -> None:
        """Update this object's state from an event of the drain process."""
        if event["event"] == "replicated":
            self._took_s, self._given_up_s = float(event["seconds"]), 0.0
        if self.fetching is None or event["event"] not in ("fetched", "not fetched"):
            return
        if event["event"] != "fetched":
            self.unfetched.append(self.fetching)
        self.fetching = None
