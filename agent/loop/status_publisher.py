"""Publishes this node's status in etcd: news immediately, routine changes at a fixed interval, and each acknowledgement together with the
status.

Node.status ──▶ Publisher ──▶ etcd: the status, and in the same transaction what this node has done
"""

from __future__ import annotations

from dataclasses import replace

from ...checkpoint.backend.paths import Attempt
from ...resilience.clock import monotonic_s, wall_s
from ...resilience.errors import ResilientError
from ...resilience.model.generation import GenerationRecord
from ...resilience.model.node import Ack, AckKind, NodeStatus
from ...resilience.store.codec import dumps
from ...resilience.store.protocol import Put
from ...resilience.store.seat import Seat
from ..node import Node
from ..output.event_log import Telling
from .peer_duties import Company

QUICK_S = 0.02
"""Seconds between two statuses while an action is under way."""
PACE_S = 2.0
"""Seconds between two statuses while ranks only train. Agent and etcd together then use about 1 % of a core."""


class Publisher:
    """Writes the node's status and acknowledgements. All its methods that write may raise StoreUnavailable."""

    def __init__(
        self,
        seat: Seat,
        instance: str,
        node: Node,
        company: Company | None,
        telling: Telling,
        pace_s: float,
    ) -> None:
        """company: None for a job of one node. pace_s: seconds between two statuses while ranks only train."""
        self._id, self._instance, self._node, self._company = seat.node, instance, node, company
        self._store, self._keys, self._telling, self.pace_s = seat.store, seat.keys, telling, pace_s
        self.told: NodeStatus | None = None
        """The last status that was written to etcd."""
        self._told_s = 0.0
        """When this agent last wrote its status, in seconds of the monotonic clock, because the wall clock may be set back."""
        self.acked: tuple[int, AckKind | None] = (0, None)
        """Newest acknowledgement: generation and kind."""

    def news(self, record: GenerationRecord | None) -> bool:
        """Return whether the status has changed in a way that must be published immediately."""
        return _is_news(self._status(record), self.told)

    def round(self, record: GenerationRecord | None, busy: bool) -> None:
        """Publish this node's status if that is due. busy: an action is under way, so that every change is published."""
        status, told, since_s = self._status(record), self.told, monotonic_s() - self._told_s
        changed = busy and since_s >= QUICK_S and told is not None and replace(told, at_s=status.at_s) != status
        if changed or _is_news(status, told) or since_s >= self.pace_s:
            self._publish(record)

    def acknowledge(self, record: GenerationRecord, kind: AckKind, port: int = 0) -> None:
        """Write an acknowledgement together with the status that it relies on. So a node that is READY has also published which snapshots
        its ranks can restore. port: a free port on this node, for READY."""
        ack = Ack(kind=kind, generation=record.number, instance=self._instance, at_s=wall_s(), port=port)
        self._publish(record, Put(self._keys.ack(record.number, self._id), dumps(ack)))
        self.acked = (record.number, kind)

    def forget(self) -> None:
        """Forget the acknowledgement, so that it is written again. etcd may have lost it."""
        self.acked = (0, None)

    def farewell(self, record: GenerationRecord) -> None:
        """Publish that this agent exits and the job continues without it."""
        status = replace(self._status(record), drained=True)
        self._store.put(self._keys.status(self._id), dumps(status))

    def _publish(self, record: GenerationRecord | None, *further: Put) -> None:
        self._reject_unusable()
        status, asked_s = self._status(record), monotonic_s()
        self._store.transact([], [Put(self._keys.status(self._id), dumps(status)), *further])
        self.told, self._told_s = status, monotonic_s()
        self._telling.progress.stored(self._told_s - asked_s)

    def _status(self, record: GenerationRecord | None) -> NodeStatus:
        group = self._node.group
        status = self._node.status(group.generation if group else record.number if record else 0)
        if record and record.snapshot and record.snapshot == status.snapshot and status.seat[:1] == (0,):
            self._node.held.sound.ordered(record.snapshot, status.snapshot_step)
        if record and record.rewind and self._node.held.sees(record.rewind.left):
            status = replace(status, left=record.rewind.left)
        return self._company.fence.pulse(replace(status, often_s=self.pace_s)) if self._company else status

    def _reject_unusable(self) -> None:
        """Reject snapshots on disk that a rank could not restore, before the leader can choose them again."""
        for page in self._node.board.pages:
            words = page.farewell()
            name = str(words.get("snapshot", ""))
            if words.get("kind") != "snapshot" or not Attempt.parse(name) or name in self._node.held.unfit:
                continue
            self._telling.say(
                f"the snapshot {name} cannot be restored and is set aside: {words.get('error', '')}", "bad"
            )
            try:
                self._node.held.reject(name, str(words.get("error", "")))
            except ResilientError as error:
                self._telling.say(
                    f"{error}: the snapshot is not marked as rejected, but this agent does not use it", "bad"
                )


_FIGURES = ("at_s", "min_step", "max_step", "alive", "pulse_s", "stride_s", "courses", "copies")
_STEPS = ("memory_steps", "durable_steps", "durable_courses", "agreed_steps", "certified_steps", "held")
"""Fields that change at each step while ranks only train."""


def _is_news(status: NodeStatus, told: NodeStatus | None) -> bool:
    same = {name: getattr(status, name) for name in (*_FIGURES, *_STEPS)}
    return told is None or replace(told, **same) != status
