"""This agent's duties to the other agents: report its neighbour's death, and end its own ranks if other nodes may continue without them.

neighbour's connection ──▶ `keys.death` ──▶ controller        lease, and the ranks' steps ──`fencing`──▶ the ranks are ended
"""

from __future__ import annotations

import zlib
from contextlib import suppress

from ...resilience.clock import monotonic_s, wall_s
from ...resilience.membership import buddy_sources
from ...resilience.model.generation import GenerationRecord
from ...resilience.model.node import Death, NodeRecord, Spec
from ...resilience.model.state_machine import Phase
from ...resilience.model.types import NodeId
from ...resilience.store.codec import dumps, loads
from ...resilience.store.seat import Seat
from ..buddy.buddy_client import address
from ..node import Node
from ..output.event_log import Telling
from ..peers.fencing import Fence
from ..peers.lease import Heartbeat
from ..peers.liveness_link import Neighbour

_MODULES_BYTES = 16 << 20
"""The most bytes of a rank's list of imported modules. 5,000 modules take 1 MiB."""
ROOM_S = 2.0
"""Seconds between two checks of how much memory a snapshot takes. The amount grows after the first step, because optimizers allocate their
moments then."""


class Company:
    def __init__(
        self,
        seat: Seat,
        heartbeat: Heartbeat,
        neighbour: Neighbour,
        node: Node,
        telling: Telling,
        spec: Spec,
    ) -> None:
        self._me, self._store, self._keys, self._heartbeat = seat.node, seat.store, seat.keys, heartbeat
        self._neighbour, self._node, self._telling = neighbour, node, telling
        self.fence = Fence(heartbeat, spec, node, node.board)
        self._ring = 0
        """Number of the generation for which the neighbour was chosen."""
        self._dead: tuple[NodeId, str, float] | None = None
        """Node and instance of a dead agent, and the wall-clock time of its death. None: no dead agent has still to be reported in etcd."""
        self._copied = 0
        """Number of the generation for which the holder of this node's copies was chosen."""
        self._shared = False
        """True: this node has published the ranks' imports, or as a spare has read them."""
        self._room = 0
        """Bytes of one rank's part of a snapshot, as this agent has last published or reserved them."""
        self._room_look_s = 0.0
        """When the agent checks these bytes next, in seconds of the monotonic clock."""

    def fds(self) -> list[int]:
        """Return the descriptors that become readable when the connections to other agents change."""
        return self._neighbour.fds()

    def look(self, now_s: float) -> bool:
        """End the ranks if other nodes may continue without them. Return whether the neighbour's agent was found dead. now_s: monotonic."""
        if why := self.fence.look(now_s, wall_s()):
            self._telling.say(why, "bad")
        found = self._neighbour.look(now_s)
        if found:
            self._dead = (*found, wall_s())
        return bool(found)

    def tell(self, record: GenerationRecord) -> None:
        """Report a dead agent, share data with spares, and choose this generation's neighbour: the next member. Raises StoreUnavailable."""
        if self._dead:
            node, instance, since_s = self._dead
            entry = self._store.get(self._keys.node(node))
            # An agent that exits normally deletes its record.
            if entry and loads(NodeRecord, entry.value).instance == instance:
                self._store.put(self._keys.death(instance), dumps(Death(at_s=since_s)), self._heartbeat.lease)
                self._store.revoke(entry.lease)  # if the dead agent led, another can lead immediately
                sentence = f"the agent of {node} is dead: the connection to it broke, and its host refuses a new one"
                self._telling.say(sentence, "warn")
            self._dead = None
        self._share(record)
        self._make_room(record)
        self._copy(record)
        members = list(record.members)
        if record.number == self._ring or self._me not in members or len(members) == 1:
            return
        following = members[(members.index(self._me) + 1) % len(members)]
        present = self._record(following)
        if present and present.instance == record.members[following]:
            self._neighbour.watch(following, present)
            self._ring = record.number

    def _copy(self, record: GenerationRecord) -> None:
        """Choose the node that holds copies of this node's snapshots in this generation."""
        if self._node.copies is None or record.phase not in (Phase.LAUNCH, Phase.RUN) or self._copied == record.number:
            return
        holder = buddy_sources.holder(record, self._me)
        where = address(self._store, self._keys, record, holder) if holder else ""
        self._node.drain.copy_to(where)
        if where or not holder:
            self._copied = record.number

    def _share(self, record: GenerationRecord) -> None:
        """Let spares import in advance the modules that the first node's ranks have imported. The first node publishes the list, and a
        spare reads it."""
        modules = self._node.directory.modules
        if self._shared or not record.members:
            return
        if next(iter(record.members)) == self._me and modules.is_file():
            if modules.stat().st_size <= _MODULES_BYTES:  # a larger file is not such a list
                self._store.put(self._keys.modules, zlib.compress(modules.read_bytes()))
            self._shared = True
        elif self._me not in record.members and not modules.exists():
            entry = self._store.get(self._keys.modules)
            if entry:
                self._shared = True
                with suppress(zlib.error):
                    modules.write_bytes(zlib.decompress(entry.value))

    def _make_room(self, record: GenerationRecord) -> None:
        """Let spares allocate in advance as much memory as the first node's ranks use for a snapshot. With memory allocated in advance,
        only the network limits how fast a spare receives a lost node's part."""
        if self._node.copies is None or monotonic_s() < self._room_look_s or not record.members:
            return
        self._room_look_s = monotonic_s() + ROOM_S
        if next(iter(record.members)) == self._me:
            found = self._node.held.room()
            if found > self._room:
                self._store.put(self._keys.room, str(found).encode())
        elif self._me not in record.members:
            entry = self._store.get(self._keys.room)
            found = int(entry.value) if entry and entry.value.isdigit() else 0
            if found > self._room:
                self._node.drain.reserve(found)
        else:
            return
        self._room = max(self._room, found)

    def _record(self, node: NodeId) -> NodeRecord | None:
        entry = self._store.get(self._keys.node(node))
        return loads(NodeRecord, entry.value) if entry else None
