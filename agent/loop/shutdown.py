"""Handles signals that ask this agent to exit: from a terminal or a scheduler ──▶ a request that the controller answers."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from ...resilience.clock import monotonic_s, wall_s
from ...resilience.model.generation import PASSED_ON, GenerationRecord
from ...resilience.model.request import Request, Wish
from ...resilience.store.codec import dumps
from ...resilience.store.seat import Seat
from ...resilience.text import formatting
from ..config import AgentPolicy, PreemptionPolicy
from ..launch.ending_options import passed_on, shutdown_s
from ..node import Node
from ..output.event_log import Telling

ECHO_S = 1.0
"""Seconds within which two signals from a scheduler count as one. A scheduler may send a signal twice: to the agent, and to all processes
of its job."""
WAIT_S = 5.0
"""Seconds that an agent that was asked to exit waits for a decision while etcd does not answer, or decisions fail. The agent's own etcd
restarts within one or two seconds."""


def hear_early(policy: PreemptionPolicy) -> None:
    """Make a scheduler's signal end this agent before it has joined. Without a handler, an agent that is a container's first process would
    ignore the signal."""
    for number in heard({signal.SIGTERM, *policy.numbers}):
        signal.signal(number, _leave_at_once)


def heard(numbers: Collection[int]) -> set[int]:
    """Return the signals in `numbers` that are not ignored. A signal that was ignored at this program's start (`nohup`, `&` in a script)
    stays ignored."""
    return {number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN}


def unheard(policy: PreemptionPolicy) -> str:
    """Return a warning about a scheduler's signals that this process ignores; empty: it ignores none."""
    names = [signal.Signals(number).name for number in sorted({*policy.numbers} - heard(policy.numbers))]
    if not names:
        return ""
    are = "are" if len(names) > 1 else "is"
    return (
        f"{formatting.listed(names)} {are} ignored, because this program was started that way. At such a signal the agent takes no last "
        "snapshot. To get one, start the program without `trap ''` or the like"
    )


def budget_s(policy: AgentPolicy, preemption: PreemptionPolicy, script_s: float, *, preempted: bool) -> float:
    """Return the seconds within which the ranks must end; 0: `agent.stop_grace_s`. script_s: the time that torchrun's options give ranks
    that save by themselves. It counts if it is longer, unless the user has set the agent's own limit."""
    if preempted:
        given_s, default_s = preemption.budget_s, PreemptionPolicy.budget_s
    else:
        given_s, default_s = policy.stop_grace_s, AgentPolicy.stop_grace_s
    if given_s == default_s < script_s:
        return script_s
    return given_s if preempted else 0.0


def _leave_at_once(number: int, _: object) -> None:
    name = signal.Signals(number).name
    print(f"mt-resilient: {name} before this node has joined. The agent exits; it had started nothing", file=sys.stderr)
    raise SystemExit(128 + number)


class Leaving:
    def __init__(
        self,
        seat: Seat,
        instance: str,
        several: bool,
        node: Node,
        policy: AgentPolicy,
        preemption: PreemptionPolicy,
        telling: Telling,
    ) -> None:
        """several: the job has other nodes, which continue without this node if they can."""
        self._id, self._instance, self._several = seat.node, instance, several
        self._node, self._store, self._keys = node, seat.store, seat.keys
        self._policy, self._preemption, self._telling = policy, preemption, telling
        self._signals: list[int] = []
        self._heard_s = 0.0
        self._request: Request | None = None
        self._waits_s = 0.0
        """Monotonic time since when the agent has waited to exit while no decision was possible; 0: it does not wait."""

    @property
    def signals(self) -> set[int]:
        """Return the signals that this agent handles."""
        passed = passed_on(self._node.launch.options, os.environ)
        return heard({*PASSED_ON, *passed, *self._preemption.numbers})

    @contextmanager
    def hearing(self) -> Iterator[int]:
        """Handle signals within this block, and ignore them after it, because the remaining work is short and other nodes wait for it.
        Yields a descriptor that becomes readable when a signal arrives."""
        wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        for number in self.signals:
            signal.signal(number, self.on_signal)
        previous_wakeup = signal.set_wakeup_fd(woken)
        try:
            yield wake
        finally:
            signal.set_wakeup_fd(previous_wakeup)
            for number in self.signals:
                signal.signal(number, signal.SIG_IGN)
            os.close(wake)
            os.close(woken)

    def on_signal(self, number: int, _: object) -> None:
        now_s = monotonic_s()
        echo = bool(self._signals) and number in self._preemption.numbers and now_s - self._heard_s < ECHO_S
        self._heard_s = now_s
        if not echo:
            self._signals.append(number)

    @property
    def wanted(self) -> bool:
        return bool(self._signals)

    @property
    def at_once(self) -> bool:
        """Return whether a second signal has asked the agent to exit."""
        return len(self._signals) > 1

    @property
    def to_ask(self) -> bool:
        """Return whether a signal has asked the agent to exit, and it has not sent the controller a request yet."""
        return self.wanted and self._request is None

    @property
    def code(self) -> int:
        """Return the agent's exit code. Use `code` only after a signal has asked the agent to exit."""
        return 128 + self._signals[0]

    def in_vain(self, now_s: float) -> bool:
        """Record that no decision can be made now. Return whether the agent was asked to exit and has waited for longer than WAIT_S. now_s:
        monotonic."""
        self._waits_s = self._waits_s or (now_s if self.wanted else 0.0)
        return self.wanted and now_s - self._waits_s > WAIT_S

    def decided(self) -> None:
        """Record that a decision was made."""
        self._waits_s = 0.0

    def ask(self, record: GenerationRecord | None) -> bool:
        """Send the controller a request to exit, unless this was done before or is not needed. Return True if a request was sent now.
        Raises StoreUnavailable."""
        if not self.to_ask or (self._several and (record is None or self._id not in record.members)):
            return False  # a spare, or a node that waits for the others, exits without asking
        name = signal.Signals(self._signals[0]).name
        where = f" on {self._id}" if self._several else ""
        preempted = self._signals[0] in self._preemption.numbers
        drains = preempted and self._several
        untold = self._node.untold  # the ranks' state is in no snapshot
        script_s = shutdown_s(self._node.launch.options, os.environ) if untold else 0.0
        request = Request(
            kind=Wish.DRAIN if drains else Wish.STOP,
            node=self._id if drains else "",
            instance=self._instance if drains else "",
            snapshot=preempted or self._policy.last_snapshot,
            budget_s=budget_s(self._policy, self._preemption, script_s, preempted=preempted),
            exit_code=self.code,
            at_s=wall_s(),
            by=f"{name}{where}",
        )
        # A node can be preempted, return, and be preempted again in one run of the job. So the key contains the agent's instance.
        self._store.put(self._keys.request(f"stop-{self._id}-{self._instance}"), dumps(request))
        self._request = request
        newest = self._node.held.durable_steps()[-1:]
        kept = f"the newest on disk is that of step {newest[0]}" if newest else "none is on disk"
        within = f" within {formatting.seconds(request.budget_s)}" if preempted else ""
        passed = "passing the signal on to its ranks, as torchrun does"
        how = (
            f"taking a last snapshot{within}"
            if request.snapshot
            else f"without a further snapshot ({kept}), and {passed}"
        )
        if untold:
            how = f"and {passed}"
        what = "draining this node" if drains else "ending the job"
        self._telling.say(f"{name}: {what}, {how}. At a second signal the agent exits at once", "warn")
        return True

    def dismissed(self, record: GenerationRecord | None, instance: str) -> int | None:
        """Return the exit code if this agent may exit without the job's end; None: it stays. A drained agent may exit. An agent that was
        asked to exit may exit while it stands by or waits for the other nodes."""
        if not self._several or (record and instance in record.members.values()):
            return None
        if record and record.lets_go and instance in record.dismissed:
            return self._request.exit_code if self._request else 0
        return self.code if self.wanted else None
