"""What the nodes say to each other at a boundary: the row of each node → MAX over all nodes, on a thread of each node's first rank.

Rows of one node → (its pages) → its first rank → rounds with the first ranks of other nodes → its page → all ranks of the node. All of it
goes on while the next step is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from itertools import count
from queue import SimpleQueue
from threading import Thread
from typing import TypeAlias

import torch
import torch.distributed as dist

from ..resilience.boundary import ROW

Row: TypeAlias = tuple[float, ...]
NO_END = timedelta(days=7)
"""How long to wait for the others: whether one of them hangs is the agent's to judge, which knows who evaluates and who starts."""
_made = count()
"""Numbers the groups of a process: all first ranks make theirs in the same order."""


class Rounds:
    """MAX by dissemination (Hensgen, Finkel and Manber 1988): in round k each node tells the node 2^k behind it what it knows, and learns
    what the one 2^k before it knows. After log2(nodes) rounds, rounded up, each knows of all, for any number of nodes: that a row may
    count twice does a MAX no harm. (gloo's own all-reduce is a ring, of 2 (nodes - 1) rounds.)"""

    def __init__(self, node: int, nodes: int) -> None:
        """Collective among the first ranks of all nodes."""
        self._peers = [((node + far) % nodes, (node - far) % nodes) for far in _distances(nodes)]
        self._out = [torch.zeros(ROW, dtype=torch.float64) for _ in self._peers]
        self._in = [torch.zeros(ROW, dtype=torch.float64) for _ in self._peers]
        # Not by `new_group`: that wants every rank of the job at its barrier, and numbers the script's groups anew.
        store = dist.PrefixStore(f"mt-resilient/{next(_made)}", dist.distributed_c10d._get_default_store())
        # With all connections from the beginning: where gloo makes them when they are first used, a receive waits until its sender comes
        # to the same connection, and so around a ring.
        self._group = dist.ProcessGroupGloo(store, node, nodes, timeout=NO_END)

    def maxima(self, row: Row) -> Row:
        group = self._group
        # All at once and first: gloo sends nothing before the other end has said that it waits.
        coming = [group.recv([self._in[k]], before, k) for k, (_, before) in enumerate(self._peers)]
        for k, (behind, _) in enumerate(self._peers):
            self._out[k].numpy()[:] = row
            going = group.send([self._out[k]], behind, k)
            coming[k].wait()
            row = tuple(map(max, row, self._in[k].tolist()))
            going.wait()
        return row


def _distances(nodes: int) -> list[int]:
    return [2**k for k in range((nodes - 1).bit_length())]


class Speaker:
    """Speaks for a node, on a thread of its first rank."""

    def __init__(self, rounds: Rounds, hear: Callable[[int], list[Row]], speak: Callable[[int, Row], None]) -> None:
        """hear: the rows of the node's other ranks with that ordinal, waited for; speak: tell all ranks of the node."""
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
        except Exception as error:  # for the main thread, which waits for what was not said
            self.failure = error
