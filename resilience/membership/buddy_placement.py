"""Computes which node holds the copies of which node's snapshots, from the members and their racks. Pure.

    half the ring away ──▶ if on the same rack: two such nodes exchange holders ──▶ the rest exchange with nodes away from their rack

The members form a ring by node rank. Nodes of a rack share switch and power, so they are lost together. Each node has one holder (the node
with its copies), and holds the copies of one other node, its guest. A holder is half the ring away for two reasons. Sorted names mostly
sort the racks too, so a holder half the ring away is mostly on another rack. With an even number of members, two nodes half the ring apart
hold each other's copies. So there are half as many pairs of nodes that must not be lost together as on a ring of neighbours.

The result depends only on node ranks and racks. So a node that takes another node's rank on the same rack also takes its guest and its
holder, and no other node's holder changes. On another rack, a few more holders change, because an exchange first looks for partners nearby.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ..model.types import NodeId

RACK = "rack"
"""The label that shows which nodes are lost together."""


def holders(members: Sequence[NodeId], labels: Mapping[NodeId, Mapping[str, str]]) -> dict[NodeId, NodeId]:
    """Return, for each node, the node that holds its copies; empty for a single node. As few nodes as possible have a holder on their own
    rack: none, unless more than half of all nodes are on one rack. members: sorted by node rank; labels: the labels of each node, if known.
    A node without the label `rack` is on a rack of its own. 10,000 nodes take some 30 ms."""
    count = len(members)
    if count < 2:
        return {}
    racks = [labels.get(node, {}).get(RACK) or at for at, node in enumerate(members)]
    of = [opposite(at, count) for at in range(count)]
    blocks = [[at] if racks[at] == racks[holder] else [] for at, holder in enumerate(of)]
    """Blocks of members' indices: nodes whose holder is on their own rack. All nodes of a block are on the same rack."""
    while len(blocks) > 1:
        blocks = [_joined(of, racks, blocks[at : at + 2]) for at in range(0, len(blocks), 2)]
    left = blocks[0]
    if left:
        for at, other in zip(left, _apart(of, racks, racks[left[0]]), strict=False):
            _exchange(of, at, other)
    return {node: members[of[at]] for at, node in enumerate(members)}


def opposite(at: int, count: int) -> int:
    """Return the index of the member half the ring away."""
    return (at + count // 2) % count


def _joined(of: list[int], racks: Sequence[str | int], blocks: Sequence[list[int]]) -> list[int]:
    """Let nodes of two blocks exchange holders, and return the remaining indices of both. A last block without a neighbour stays as it
    is."""
    one, other = blocks if len(blocks) == 2 else (*blocks, [])
    while one and other and racks[one[-1]] != racks[other[-1]]:
        _exchange(of, one.pop(), other.pop())
    return one + other


def _exchange(of: list[int], one: int, other: int) -> None:
    of[one], of[other] = of[other], of[one]


def _apart(of: Sequence[int], racks: Sequence[str | int], rack: str | int) -> Iterator[int]:
    """Yield the indices of nodes that are not on that rack and have no holder there."""
    return (at for at in [*range(len(of))] if rack not in (racks[at], racks[of[at]]))
