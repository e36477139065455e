"""The agent's loop: observe, publish, decide (where this agent leads), obey. Level-triggered; any round may be lost or repeated.

    ended processes, board ──▶ status ──▶ store ──▶ controller ──▶ generation record ──▶ duty ──▶ Performer ──▶ Node

When the store does not answer, the round ends there: ranks keep training, and the next round tries again.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable
from typing import Any

from ..resilience import phrases
from ..resilience.clock import monotonic_s, wall_s
from ..resilience.controller import Controller
from ..resilience.errors import MachineError, ResilientError, StoreUnavailable
from ..resilience.keys import Keys
from ..resilience.machine import Phase
from ..resilience.orders import GenerationRecord
from ..resilience.store import LeaseGone, Store
from ..resilience.terms import NodeId
from ..resilience.wire import dumps
from ..resilience.wishes import Request, Wish
from . import attention
from .company import Company
from .heartbeat import Heartbeat
from .node import Node
from .performer import Performer
from .policy import AgentPolicy, PreemptionPolicy
from .publisher import QUICK_S, Publisher
from .telling import Telling

ORDERED_S, CALM_S = 0.1, 1.0
"""Longest sleep of the loop while ranks are on their way to a boundary at which they obey, and while they just train; `QUICK_S` while
something is under way. Ended processes wake it at once."""
RESTS = 4.0
"""So many times as long as a look at the whole job takes, what others write is left to gather: with thousands of nodes there is always
something."""
ECHO_S = 1.0
"""A scheduler's signal may come twice, to the agent and to all processes of its job: within so long it is the same."""
AWAITS_S = 3.0
"""How long nodes that start together may take until it is told that they are waited for."""
EMPTIED_S = 30.0
"""How long those that train may take to tell an etcd that has lost its data what the job is."""
STORE_GRACE_S = 5.0
"""How long somebody who wants to leave waits for etcd: the agent's own one is back within a second or two."""


class Supervisor:
    def __init__(
        self,
        *,
        node_id: NodeId,
        node: Node,
        store: Store,
        keys: Keys,
        heartbeat: Heartbeat,
        controller: Controller,
        policy: AgentPolicy,
        preemption: PreemptionPolicy,
        telling: Telling,
        publisher: Publisher,
        performer: Performer,
        over: int = 0,
        company: Company | None = None,
    ) -> None:
        """over: the generation that the job had ended with before this agent came, 0 for none; company: where there are others."""
        self.id, self.node, self.store, self.keys = node_id, node, store, keys
        self.heartbeat, self.controller, self.performer = heartbeat, controller, performer
        self.policy, self.preemption, self.telling = policy, preemption, telling
        self.record: GenerationRecord | None = None
        self._over, self._company, self._publisher = over, company, publisher
        self._next_round_s = 0.0
        self._rest_until_s = 0.0
        """What others write does not wake the loop before."""
        self._signals: list[int] = []
        self._heard_s = 0.0
        self._request: Request | None = None
        self._store_down_s = 0.0
        self._signalled_s = 0.0
        self._last_stumble = ""
        self._on_store_down = lambda: None
        self._on_store_emptied: Callable[[GenerationRecord], object] = lambda record: None
        self._awaits, self._awaited = ("", 0.0), ""
        """For which nodes the job waits, since when, and what was told of it."""
        self._emptied_s = 0.0
        """On the monotonic clock: since when etcd knows nothing of the job any more; 0: it does."""

    def on_store_down(self, mend: Any) -> None:
        """`mend` is called in each round in which the store does not answer (embedded etcd: start it again)."""
        self._on_store_down = mend

    def on_store_emptied(self, remind: Callable[[GenerationRecord], object]) -> None:
        """`remind` is called where etcd has lost what it knew of the job, and this record still holds."""
        self._on_store_emptied = remind

    # -- the loop -----------------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Until the job is over; the exit code."""
        wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        before = {
            number: signal.signal(number, self._on_signal)
            for number in {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *self.preemption.numbers}
        }
        previous_wakeup = signal.set_wakeup_fd(woken)
        try:
            self._warm_up()
            while True:
                ready = self._wait(wake)
                code = self.round(ready)
                if code is not None:
                    return code
        finally:
            signal.set_wakeup_fd(previous_wakeup)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(wake)
            os.close(woken)

    def _wait(self, wake: int) -> list[int]:
        record, told = self.record, self._publisher.told
        running = record is not None and record.phase is Phase.RUN and not attention.starting(record, told, wall_s())
        poller = select.poll()
        resting_s = max(0.0, self._rest_until_s - monotonic_s())
        changes = () if resting_s else self.controller.fds()
        for fd in (wake, *changes, *self.node.fds(), *(self._company.fds() if self._company else ())):
            poller.register(fd, select.POLLIN)
        patience_s = min(CALM_S, self._patience_s()) if running and not self._busy() else QUICK_S
        ready = [fd for fd, _ in poller.poll(1000 * (min(patience_s, resting_s) if resting_s else patience_s))]
        if wake in ready:
            os.read(wake, 4096)
        if not {wake, *changes}.isdisjoint(ready):
            self._next_round_s = 0.0
        return ready

    def round(self, ready: list[int]) -> int | None:
        """One round; the exit code when the job is over. ready: descriptors of the node that are readable."""
        if len(self._signals) > 1:
            self.telling.say("asked a second time: leaving at once", "warn")
            return 128 + self._signals[0]
        changed = self._company is not None and self._company.look(monotonic_s())
        self.node.pace_durable()
        for act in (lambda: self.node.observe(ready), self._hear_helpers):
            try:
                changed = act() or changed
            except OSError as error:
                self._stumbled(error)
        try:
            self._consult(changed)
        except OSError as error:  # no descriptor, no memory, a full disk: this round is lost, the ranks are not
            self._stumbled(error)
        except LeaseGone:
            self.heartbeat.lost()
        except StoreUnavailable as error:
            self._store_is_down(error)
        if self.node.gang:
            return None
        if self.record and self.record.phase is Phase.ENDED:
            return self.record.exit_code
        return self._dismissed(self.record)

    def _dismissed(self, record: GenerationRecord | None) -> int | None:
        """The exit code where the job goes on without this agent, or has not begun: it was drained, or somebody wants it to end that stands
        by or waits for the others."""
        instance = self.heartbeat.instance
        if self._company is None or (record and instance in record.members.values()):
            return None
        if record and instance in record.dismissed:
            return self._request.exit_code if self._request else 0
        return 128 + self._signals[0] if self._signals else None

    def _stumbled(self, error: OSError) -> None:
        if str(error) != self._last_stumble:
            self._last_stumble = str(error)
            self.telling.say(f"{error}; training goes on, it is tried again", "bad")

    def _consult(self, changed: bool) -> None:
        """Publish, decide, obey, as long as one leads to the other. Raises StoreUnavailable."""
        now = monotonic_s()
        news = self._publisher.news(self.record)
        if not (changed or news or now >= self._next_round_s or (self._signals and not self._request) or self._busy()):
            return
        self._rest_until_s = 0.0
        self._next_round_s = now + (QUICK_S if self._busy() else self._patience_s())
        self.heartbeat.beat(now)
        if self._company and self.record:
            self._company.tell(self.record)
        self._ask_to_stop()
        for _ in range(20):
            if self.record is not None:  # not before the controller has seen what a predecessor of this agent said last
                self._publisher.round(self.record, self._busy())
            wrote = self.controller.tick(self.heartbeat.lease, wall_s())
            self.record = self._read_record()
            if self.record and self.heartbeat.instance not in self.record.members.values():
                self.heartbeat.confirm()
            more = self.record is not None and self.performer.obey(self.record)
            if not wrote and not more:
                break
        self._rest_until_s = monotonic_s() + RESTS * (monotonic_s() - now)
        self._store_is_back()
        self._tell_whom_it_awaits()
        self._warm_up()
        self.telling.count(self.node.board.pages, self._publisher.told)
        strides, pages = self.node.vitals.strides, self.node.board.pages
        own_s = {page.rank: spent.own_s for page, spent in zip(pages, strides.newest, strict=False)}
        self.telling.strides(len(strides.stragglers), own_s)

    def _tell_whom_it_awaits(self) -> None:
        """Once it has lasted, and again when it is for others."""
        awaits = self.controller.awaits if self._company else ""
        if awaits != self._awaits[0]:
            self._awaits = (awaits, monotonic_s())
        elif awaits and awaits != self._awaited and monotonic_s() - self._awaits[1] > AWAITS_S:
            self._awaited = awaits
            self.telling.say(awaits)

    def _read_record(self) -> GenerationRecord | None:
        """Raises StoreUnavailable, and MachineError where etcd has lost what it knew of the job and nobody can tell it."""
        record = self.controller.record()
        if record is None and self.record is not None:
            return self._remind(self.record)
        self._emptied_s = 0.0
        return None if record and record.phase is Phase.ENDED and record.number <= self._over else record

    def _remind(self, record: GenerationRecord) -> GenerationRecord:
        """`record`, which etcd does not know any more: it has begun anew, without its data. Who has ranks of this generation tells it:
        while they are not fenced, no later one can have begun."""
        now_s, gang = monotonic_s(), self.node.gang
        if not self._emptied_s:
            self._emptied_s = now_s
            self.telling.say(
                "etcd has lost its data, and with it what it knew of this job: those that train tell it again", "bad"
            )
        if gang and gang.generation == record.number and not gang.fenced:
            self._on_store_emptied(record)
        elif now_s - self._emptied_s > EMPTIED_S:
            raise MachineError(
                "etcd has lost its data, and nobody trains who could tell it what it knew of this job; nothing runs here any more. Look "
                "after it, then give the same command again: it goes on from the newest snapshot"
            )
        return record

    def _busy(self) -> bool:
        return attention.busy(self.record, self._publisher.told, wall_s())

    def _patience_s(self) -> float:
        """Longest sleep while nothing is under way."""
        if attention.ordered(self.record, self._publisher.told):
            return ORDERED_S
        return self._publisher.pace_s

    # -- what comes from outside ------------------------------------------------------------------------------------------------

    def _on_signal(self, number: int, _: object) -> None:
        echo = bool(self._signals) and number in self.preemption.numbers and monotonic_s() - self._heard_s < ECHO_S
        self._heard_s = monotonic_s()
        if not echo:
            self._signals.append(number)

    def _ask_to_stop(self) -> None:
        """Turn a signal into a request that the controller answers. Raises StoreUnavailable."""
        if not self._signals or self._request:
            return
        if self._company and (self.record is None or self.id not in self.record.members):
            return  # a node that stands by, or waits for the others, ends without a word
        self.performer.hurry = True
        name = signal.Signals(self._signals[0]).name
        preempted = self._signals[0] in self.preemption.numbers
        drains = preempted and self._company is not None  # the others go on, if they can
        request = Request(
            kind=Wish.DRAIN if drains else Wish.STOP,
            node=self.id if drains else "",
            snapshot=preempted or self.policy.last_snapshot,
            budget_s=self.preemption.budget_s if preempted else 0.0,
            exit_code=128 + self._signals[0],
            at_s=wall_s(),
            by=name,
        )
        self.store.put(self.keys.request(f"stop-{self.id}"), dumps(request))
        self._request = request
        newest = self.node.held.durable_steps()[-1:]
        kept = f"the newest on disk is of step {newest[0]}" if newest else "none is on disk"
        within = f" within {phrases.seconds(request.budget_s)}" if preempted else ""
        how = f"taking a last snapshot{within}" if request.snapshot else f"without a further snapshot: {kept}"
        what = "draining this node" if drains else "ending the job"
        self.telling.say(f"{name}: {what}, {how}; once more ends it at once", "warn")

    def _hear_helpers(self) -> bool:
        """True when the warm process has changed: a start may wait for it."""
        warm = self.node.warm
        changed = warm.observe()
        if changed:
            if warm.ready and warm.knows:
                self.telling.say("the warm process is ready: the next start will be forked")
            elif not warm.ready:
                self.telling.say(f"the warm process cannot be used, the next start will be cold: {warm.why}", "warn")
        fetching = self.node.fetching
        for event in self.node.drain_events():
            self.telling.drained(event)
        changed = changed or self.node.fetching != fetching
        for mood, sentence in self.node.lookout.words():
            self.telling.silent(sentence, mood)
        while self.node.held.sound.sentences:
            self.telling.say(*self.node.held.sound.sentences.pop(0))
        return changed

    def _warm_up(self) -> None:
        """Start the warm process before the first ranks; where it has ended, once ranks have finished a step: not while they want the cores
        to start. Then it learns what these have imported."""
        told, warm = self._publisher.told, self.node.warm
        if self.policy.observe:
            warm.why = "nothing is started again while observing"
        elif not self.policy.warm:
            warm.why = "warm starts are switched off"
        elif told is None or told.stepped_s or (self.record and self.id not in self.record.members):
            generation = told.generation if told else 0
            if warm.wanted(generation):
                warm.start(self.node.environment(), generation)
            elif told and warm.ready and not warm.knows and self.node.directory.modules.exists():
                warm.learn()

    def _store_is_down(self, error: ResilientError) -> None:
        if not self._store_down_s:
            self._store_down_s = wall_s()
            self.telling.say(f"{error}; training goes on, no recovery is possible until it is back", "bad")
        self._signalled_s = self._signalled_s or (monotonic_s() if self._signals else 0.0)
        if self._signals and monotonic_s() - self._signalled_s > STORE_GRACE_S:
            self.telling.say("etcd is away: ending at once, without a last snapshot", "warn")
            self.node.stop_gang()
            self.record = GenerationRecord(
                number=self.record.number if self.record else 0,  # type: ignore[arg-type]
                phase=Phase.ENDED,
                members={},
                exit_code=128 + self._signals[0],
            )
        self._on_store_down()

    def _store_is_back(self) -> None:
        if self._store_down_s:
            self.telling.say(f"etcd answers again, after {phrases.seconds(wall_s() - self._store_down_s)}", "good")
            self._store_down_s = 0.0
