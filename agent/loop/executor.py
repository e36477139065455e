"""The hands of the supervisor: do the local action that `duty` names, and acknowledge it."""

from __future__ import annotations

import math

from ...resilience.clock import monotonic_s
from ...resilience.decide.planned_move import SAVE_S
from ...resilience.model.generation import GenerationRecord
from ...resilience.model.node import AckKind
from ...resilience.model.types import Doing, Order
from ...resilience.report import explain
from ...resilience.store.seat import Seat
from ..buddy.buddy_client import address
from ..config import AgentPolicy
from ..launch.ports import free_port
from ..node import Node
from ..output.event_log import Telling
from .next_action import Action, LocalState, duty
from .status_publisher import Publisher

LONG_S = 10.0
"""How long the last snapshot may take until it is told that it is waited for."""


class Performer:
    def __init__(
        self,
        *,
        seat: Seat,
        instance: str,
        node: Node,
        policy: AgentPolicy,
        telling: Telling,
        publisher: Publisher,
    ) -> None:
        self._id, self._instance, self._node = seat.node, instance, node
        self._store, self._keys, self._policy = seat.store, seat.keys, policy
        self._telling, self._publisher = telling, publisher
        self._waited = (0, 0.0)
        """The generation whose start waits for the warm process, and since when, on the monotonic clock: nodes' other clocks may differ."""
        self._leave_ordered_s = 0.0
        self._leave_until_s = 0.0
        self._leave_in_s, self._leave_at_s = 0.0, math.inf
        """What the record has said last of how long leaving may take, and when that is over."""
        self._drain_asked_s = 0.0
        self._waiting_told = False
        self._fetched = 0
        """Generation for which this node's part has been asked of another."""
        self.hurry = False
        """Somebody wants this agent to leave: the end does not wait for ever."""

    def obey(self, record: GenerationRecord) -> bool:
        """Do what `record` asks of this node now; whether there may be more to do at once. Raises StoreUnavailable."""
        action = duty(record, self._local())
        match action:
            case Action.WAIT | Action.LEAVE:
                return False
            case Action.CLEAR:
                if self._drain_asked_s:  # the job was ending, and goes on: a node has died over it
                    self._node.drain.begin_again()
                    self._drain_asked_s = 0.0
                    self._leave_in_s, self._leave_at_s = 0.0, math.inf
                self._node.clear(record.number, record.joined.get(self._id, 0))
                self._publisher.acknowledge(record, AckKind.READY, free_port(wished=self._node.launch.port))
            case Action.LAUNCH:
                self._begin_to_fetch(record)
                if self._node.warm.importing:
                    if self._waited[0] != record.number:
                        self._waited = (record.number, monotonic_s())
                    if monotonic_s() - self._waited[1] < self._policy.warm_wait_s:
                        return False  # about to be ready: quicker than a cold start
                    self._node.warm.give_up(
                        f"the warm process was still importing after {self._policy.warm_wait_s:.0f} s"
                    )
                self._launch(record)
            case Action.SAY_RUNNING:
                self._publisher.acknowledge(record, AckKind.RUNNING)
            case Action.ORDER_REWIND:
                assert record.rewind
                self._node.board.turn_back(record.rewind)
            case Action.ORDER_PAUSE:
                self._node.board.pause(record.waits)
            case Action.ORDER_SNAPSHOT:
                self._node.saving.ask(record.saves)
            case Action.PASS_SIGNAL:
                assert self._node.group
                self._node.group.stop(record.signal)
                self._leave_ordered_s = monotonic_s()
                left_s = self._leave_by_s(record) - monotonic_s() if record.leave_in_s else self._policy.stop_grace_s
                self._leave_until_s = monotonic_s() + left_s
            case Action.ORDER_LEAVE:
                self._node.board.order(Order.SNAPSHOT_AND_STOP)
                self._leave_ordered_s = monotonic_s()
                # Of a deadline for all of it, the half: what memory has can then still be written.
                left_s = self._leave_by_s(record) - monotonic_s()
                self._leave_until_s = monotonic_s() + (left_s / 2 if record.leave_in_s else self._policy.stop_grace_s)
            case Action.END_GROUP:
                return self._end(record)
            case Action.STAND_DOWN:
                self._node.stop_group()
        return True

    def _local(self) -> LocalState:
        group = self._node.group
        ordered_s = self._leave_ordered_s
        return LocalState(
            instance=self._instance,
            group=group.generation if group else 0,
            group_over=group is not None and group.launcher.ended_s > 0,
            attached=group is not None and self._node.all_attached(),
            training=group is not None and self._node.board.all_training(),
            acked=self._publisher.acked,
            rewind=self._node.board.orders.ordered,
            paused=bool(self._node.board.orders.paused),
            waiting=all(page.doing == Doing.PAUSED for page in self._node.board.pages),
            snapshot=self._node.saving.asked,
            leave_ordered=ordered_s > 0,
            grace_over=ordered_s > 0 and monotonic_s() > self._leave_until_s,
        )

    def _begin_to_fetch(self, record: GenerationRecord) -> None:
        """This node's part of the state, from another's memory, where it lacks it; once. Where it does not come, the ranks find out: they
        take it from the disk, if it is there too."""
        source = record.sources.get(self._id)
        if source is None or self._node.copies is None or self._fetched == record.number:
            return
        where = address(self._store, self._keys, record, source.holder)
        self._fetched = record.number
        self._node.fetch(record, record.node_rank(self._id), source, where)

    def _launch(self, record: GenerationRecord) -> None:
        self._node.start_group(record, record.node_rank(self._id))
        assert self._node.group
        how = f", {self._node.group.how}" if record.resume_step >= 0 or record.number > 1 else ""
        ranks = "1 rank starts" if self._node.launch.ranks == 1 else f"{self._node.launch.ranks} ranks start"
        beginning = str(self._node.origin or "the script's own start")
        # Who does not lead has not told it.
        why = f" ({record.reason})" if len(record.members) > 1 and record.number > 1 else ""
        self._telling.say(
            f"generation {record.number}: {ranks} {explain.resumed(record.resume_step, beginning)}{how}{why}"
        )

    def _leave_by_s(self, record: GenerationRecord) -> float:
        """When all has to be over, on the monotonic clock; infinite where nobody says."""
        if record.leave_in_s != self._leave_in_s:
            self._leave_in_s = record.leave_in_s
            self._leave_at_s = min(self._leave_at_s, monotonic_s() + record.leave_in_s)
        return self._leave_at_s

    def _end(self, record: GenerationRecord) -> bool:
        """End the ranks, let the drain process finish, say so. Called until it is done; True when it is."""
        drain = self._node.drain
        if not self._drain_asked_s:
            # What nobody is to go on from does not go to disk at the last moment.
            self._node.clear(record.number, last=True)
        self._node.held.end(record)
        if not self._drain_asked_s:
            self._drain_asked_s = monotonic_s()
            if record.last_snapshot:
                self._node.held.want_newest_on_disk()
            drain.finish()
        drained = record.last_snapshot and not record.complete and record.exit_code == 0
        grace_s = SAVE_S if drained else self._policy.stop_grace_s
        if record.leave_in_s:
            grace_s = max(0.0, self._leave_by_s(record) - self._drain_asked_s)
        hurry = self.hurry or drained or record.exit_code != 0 or record.leave_in_s > 0
        if hurry and not drain.finished and monotonic_s() - self._drain_asked_s > grace_s:
            self._telling.say(f"the last snapshot was not on disk after {grace_s:.0f} s; leaving without it", "warn")
            drain.stop()
            drain.finished = True
        if not drain.finished and not self._waiting_told and monotonic_s() - self._drain_asked_s > LONG_S:
            self._waiting_told = True
            self._telling.say(
                f"the ranks {'are through' if record.complete else 'have ended'}; what was to be written of their last steps is not on "
                "disk yet, here or on another node, and is waited for. Ctrl-C, and some time for it, leaves without",
                "warn",
            )
        if drain.finished:
            self._publisher.acknowledge(record, AckKind.ENDED)
        return drain.finished
