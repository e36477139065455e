"""Carries out the actions that `next_action.step` returns, and acknowledges them."""

from __future__ import annotations

import os
import signal

from ...resilience.clock import monotonic_s
from ...resilience.model.generation import GenerationRecord
from ...resilience.model.node import AckKind
from ...resilience.model.types import Doing, Order
from ...resilience.report import explain
from ...resilience.store.seat import Seat
from ..buddy.buddy_client import address
from ..config import AgentPolicy
from ..launch.ending_options import passed_on
from ..launch.ports import free_port
from ..node import Node
from ..output.event_log import Telling
from .next_action import Action, Begun, LocalState, Patience, step
from .status_publisher import Publisher


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
        self._seat, self._instance, self._node = seat, instance, node
        self._patience = Patience(warm_s=policy.warm_wait_s, leave_s=policy.stop_grace_s)
        self._telling, self._publisher = telling, publisher
        self._begun = Begun()
        self.hurry = False
        """True: this agent was asked to exit, and waits for the job's end for a limited time only."""

    def obey(self, record: GenerationRecord) -> bool:
        """Do what `record` requires of this node now. Return whether there may be more to do immediately. Raises StoreUnavailable; then the
        next call repeats the actions."""
        begun, actions = step(record, self._local(), self._begun, monotonic_s(), self._patience)
        for action in actions:
            self._do(action, record)
        self._begun = begun
        return bool(actions)

    def _local(self) -> LocalState:
        node, group = self._node, self._node.group
        return LocalState(
            instance=self._instance,
            group=group.generation if group else 0,
            group_over=group is not None and group.launcher.ended_s > 0,
            attached=group is not None and node.all_attached(),
            training=group is not None and node.board.all_training(),
            acked=self._publisher.acked,
            rewind=node.board.orders.ordered,
            paused=bool(node.board.orders.paused),
            waiting=all(page.doing == Doing.PAUSED for page in node.board.pages),
            snapshot=node.saving.asked,
            importing=node.warm.importing,
            written=node.drain.finished,
            hurry=self.hurry,
        )

    def _do(self, action: Action, record: GenerationRecord) -> None:
        node = self._node
        match action:
            case Action.CLEAR:
                node.clear(record.number, record.joined.get(self._seat.node, 0))
            case Action.SAY_READY:
                port = free_port(wished=node.launch.port)
                self._publisher.acknowledge(record, AckKind.READY, port)
            case Action.FETCH:
                self._fetch(record)
            case Action.START_COLD:
                node.warm.give_up(f"the warm process was still importing after {self._patience.warm_s:.0f} s")
            case Action.LAUNCH:
                self._launch(record)
            case Action.SAY_RUNNING:
                self._publisher.acknowledge(record, AckKind.RUNNING)
            case Action.ORDER_REWIND:
                assert record.rewind
                node.board.turn_back(record.rewind)
            case Action.ORDER_PAUSE:
                node.board.pause(record.waits)
            case Action.ORDER_SNAPSHOT:
                node.saving.ask(record.saves)
            case Action.ORDER_LEAVE:
                node.board.order(Order.SNAPSHOT_AND_STOP)
            case Action.PASS_SIGNAL:
                assert node.group
                passed = passed_on(node.launch.options, os.environ)
                node.group.stop(record.signal if record.signal in passed else signal.SIGTERM)
            case Action.STAND_DOWN:
                node.stop_group()
            case _:
                self._end(action, record)

    def _end(self, action: Action, record: GenerationRecord) -> None:
        node, drain = self._node, self._node.drain
        match action:
            case Action.END_GROUP:
                node.clear(record.number, last=True)
            case Action.LET_GO:
                node.held.end(record)
            case Action.FINISH_WRITING:
                if record.last_snapshot:
                    node.held.want_newest_on_disk()
                drain.finish()
            case Action.TELL_WAITING:
                self._telling.say(
                    f"the ranks {'have finished' if record.complete else 'have ended'}, but their last snapshot is not on disk yet, here "
                    "or on another node. The agent waits for it. After Ctrl-C it waits only a limited time",
                    "warn",
                )
            case Action.GIVE_UP_WRITING:
                waited_s = monotonic_s() - self._begun.finishing_s
                self._telling.say(
                    f"the last snapshot was not on disk after {waited_s:.0f} s; the agent waits no longer", "warn"
                )
                drain.give_up()
            case Action.WRITE_AGAIN:
                drain.begin_again()
            case Action.SAY_ENDED:
                node.held.finish_marks()
                self._publisher.acknowledge(record, AckKind.ENDED)

    def _fetch(self, record: GenerationRecord) -> None:
        """Request this node's part of the state from another node. If the part does not arrive, the ranks notice, and read it from disk if
        possible."""
        source = record.sources[self._seat.node]
        where = address(self._seat.store, self._seat.keys, record, source.holder)
        self._node.fetch(record, record.node_rank(self._seat.node), source, where)

    def _launch(self, record: GenerationRecord) -> None:
        self._node.start_group(record, record.node_rank(self._seat.node))
        assert self._node.group
        how = f", {self._node.group.how}" if record.resume_step >= 0 or record.number > 1 else ""
        ranks = "1 rank starts" if self._node.launch.ranks == 1 else f"{self._node.launch.ranks} ranks start"
        beginning = str(self._node.origin or "the script's own start")
        # Agents that do not lead have not printed the reason yet.
        why = f" ({record.reason})" if len(record.members) > 1 and record.number > 1 else ""
        layout = self._node.launch.layouts.get(len(record.members), ())
        other = f", with {' '.join(layout)}" if layout else ""
        self._telling.say(
            f"generation {record.number}: {ranks} {explain.resumed(record.resume_step, beginning)}{other}{how}{why}"
        )
