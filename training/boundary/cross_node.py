"""Exchanges the nodes' reports at a boundary (the moment between two steps): row of each node → MAX over all nodes. A thread of each node's
first rank does this.

Rows of one node → (its ranks' pages of shared memory) → its first rank → rounds with the first ranks of other nodes → its page → all ranks
of the node. All of this runs while the next step is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from queue import SimpleQueue
from threading import Thread
from typing import TypeAlias

import torch
import torch.distributed as dist

from ...resilience.inprocess.tally import ROW

Row: TypeAlias = tuple[float, ...]
NO_END = timedelta(days=7)
"""The longest wait for the other nodes. The agent judges whether a node hangs, because it knows which ranks evaluate or start."""
MOST_IN_ONE = 64
"""The most nodes in one group. When a group of n begins, each member reads 154 + 8 n bytes from the job's store for every other member. In
total that is 3 MB for 64 nodes, and 70 GB for 2,048. More nodes form a grid whose rows and columns are groups: 0.2 GB for 2,048."""
_made = count()
"""Numbers the groups of a process. All first ranks create their groups in the same order."""


@dataclass(frozen=True)
class _Hop:
    """One round: send to the node `behind`, and receive from the node `before`."""

    group: dist.ProcessGroupGloo
    behind: int
    before: int
    tag: int
    told: torch.Tensor = field(default_factory=lambda: torch.zeros(ROW, dtype=torch.float64, device="cpu"))
    heard: torch.Tensor = field(default_factory=lambda: torch.zeros(ROW, dtype=torch.float64, device="cpu"))


class Rounds:
    """Computes MAX by dissemination (Hensgen, Finkel and Manber 1988). In round k, each node sends its current maximum to the node 2^k
    after it, and receives the maximum of the node 2^k before it. After log2(nodes) rounds, rounded up, each node has the maximum of all
    nodes, for any number of nodes. A row may count twice, which does not change a MAX. (gloo's own all-reduce is a ring of 2 (nodes - 1)
    rounds.) In a grid, the rounds go first along the rows, then along the columns. If the grid's last row is not full, some columns have no
    node in it. The nodes of these columns receive its maximum in further rounds along the rows."""

    def __init__(self, node: int, nodes: int, most_in_one: int = MOST_IN_ONE) -> None:
        """Collective among the first ranks of all nodes."""
        number = next(_made)
        # `new_group` is not used: it needs every rank of the job at its barrier, and changes the numbers of the script's groups.
        store = dist.distributed_c10d._get_default_store()

        def group(name: str, rank: int, size: int) -> tuple[dist.ProcessGroupGloo, int, int]:
            # All connections are made at the beginning. If gloo made them at their first use, a receive would wait until its sender
            # uses the same connection, and that sender would wait likewise, around a ring.
            prefix = dist.PrefixStore(f"mt-resilient/{number}/{name}", store)
            return dist.ProcessGroupGloo(prefix, rank, size, timeout=NO_END), rank, size

        width = nodes if nodes <= most_in_one else _width(nodes)
        row, column = divmod(node, width)
        along = group(f"row {row}", column, min(width, nodes - row * width))
        phases = [along]
        if width < nodes:
            phases.append(group(f"column {column}", row, -(-(nodes - column) // width)))
        if nodes % width:
            phases.append(along)
        self._hops = [
            _Hop(gloo, (rank + 2**k) % size, (rank - 2**k) % size, tag=phase << 8 | k)
            for phase, (gloo, rank, size) in enumerate(phases)
            for k in range((size - 1).bit_length())
        ]

    def maxima(self, row: Row) -> Row:
        # All receives begin first: gloo sends nothing before the other end has announced its receive.
        coming = [hop.group.recv([hop.heard], hop.before, hop.tag) for hop in self._hops]
        for hop, arrival in zip(self._hops, coming, strict=True):
            hop.told.numpy()[:] = row
            going = hop.group.send([hop.told], hop.behind, hop.tag)
            arrival.wait()
            row = tuple(map(max, row, hop.heard.tolist()))
            going.wait()
        return row


def _width(nodes: int) -> int:
    """Return the grid's width: the smallest power of two that is at least the square root, so that powers of two fill the grid."""
    return 1 << ((nodes - 1).bit_length() + 1) // 2


class Speaker:
    """Exchanges rows for a node, on a thread of the node's first rank."""

    def __init__(self, rounds: Rounds, hear: Callable[[int], list[Row]], speak: Callable[[int, Row], None]) -> None:
        """hear: waits for the rows with that ordinal of the node's other ranks, and returns them. speak: writes a row for all ranks of the
        node."""
        self._rounds, self._hear, self._speak = rounds, hear, speak
        self._said: SimpleQueue[tuple[int, Row]] = SimpleQueue()
        self.failure: Exception | None = None
        Thread(target=self._run, name="mt-resilient-sentinel", daemon=True).start()

    def say(self, ordinal: int, mine: Row) -> None:
        self._said.put((ordinal, mine))

    def _run(self) -> None:
        try:
            while True:
                ordinal, mine = self._said.get()
                known = tuple(max(column) for column in zip(mine, *self._hear(ordinal), strict=True))
                self._speak(ordinal, self._rounds.maxima(known))
        except Exception as error:  # the main thread raises it, since the row that it waits for will not come
            self.failure = error
