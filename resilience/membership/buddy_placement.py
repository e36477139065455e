"""Which node holds the copy of which node's snapshots: members and their racks → each node's holder. Pure.

    half the ring away ──▶ if on the same rack: two such nodes exchange holders ──▶ the rest exchange with nodes away from their rack

Nodes of a rack share switch and power, so they are lost together. The holders are a permutation without fixed points: each has one guest.
A holder is half the ring away, because sorted names mostly sort the racks too. Also, two nodes that hold each other's copies are lost
together more rarely than any two neighbours on a ring.

The result depends on node ranks and racks alone. So a node that takes another's node rank on the same rack takes its guest and its holder
too, and all other nodes keep theirs. On another rack, a few more nodes change, because an exchange looks for partners nearby first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ..model.types import NodeId

RACK = "rack"
"""The label that says which nodes are lost together."""


def holders(members: Sequence[NodeId], labels: Mapping[NodeId, Mapping[str, str]]) -> dict[NodeId, NodeId]:
    """Return, by node, which node holds its copy; empty for one node alone. As few nodes as possible have a holder on their own rack: none,
    unless more than half of all nodes are on one rack. members: in the order of node ranks; labels: of each node, if known. A node
    without the label `rack` shares its rack with no other. 10,000 nodes take some 30 ms."""
    count = len(members)
    if count < 2:
        return {}
    racks = [labels.get(node, {}).get(RACK) or at for at, node in enumerate(members)]
    of = [opposite(at, count) for at in range(count)]
    blocks = [[at] if racks[at] == racks[holder] else [] for at, holder in enumerate(of)]
    """Blocks of neighbouring places whose holder is on their own rack. All places of a block are on the same rack."""
    while len(blocks) > 1:
        blocks = [_joined(of, racks, blocks[at : at + 2]) for at in range(0, len(blocks), 2)]
    left = blocks[0]
    if left:
        for at, other in zip(left, _apart(of, racks, racks[left[0]]), strict=False):
            _exchange(of, at, other)
    return {node: members[of[at]] for at, node in enumerate(members)}


def opposite(at: int, count: int) -> int:
    """Return the place half the ring away."""
    return (at + count // 2) % count


def _joined(of: list[int], racks: Sequence[str | int], blocks: Sequence[list[int]]) -> list[int]:
    """Join two blocks without the places that exchange their holders here. A last block without a neighbour stays as it is."""
    one, other = blocks if len(blocks) == 2 else (*blocks, [])
    while one and other and racks[one[-1]] != racks[other[-1]]:
        _exchange(of, one.pop(), other.pop())
    return one + other


def _exchange(of: list[int], one: int, other: int) -> None:
    of[one], of[other] = of[other], of[one]


def _apart(of: Sequence[int], racks: Sequence[str | int], rack: str | int) -> Iterator[int]:
    """Yield the places that are not on that rack and have no holder there."""
    return (at for at in [*range(len(of))] if rack not in (racks[at], racks[of[at]]))
