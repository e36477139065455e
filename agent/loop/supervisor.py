"""The agent's loop: observe, publish, decide (if this agent leads), obey. Rounds act on the present state, and may be lost or repeated.

    ended processes, pages ──▶ status ──▶ etcd ──▶ controller ──▶ generation record ──▶ step ──▶ Performer ──▶ Node

When etcd does not answer, the round ends there: ranks keep training, and the next round tries again.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass

from ...resilience.clock import monotonic_s, wall_s
from ...resilience.controller import Controller
from ...resilience.errors import InternalError, ResilientError, SiteError, StoreUnavailable
from ...resilience.model.generation import GenerationRecord
from ...resilience.model.state_machine import Phase
from ...resilience.model.types import Generation
from ...resilience.store.poll import readable
from ...resilience.store.protocol import LeaseGone
from ...resilience.store.seat import Seat
from ..config import AgentPolicy
from ..join.exit_report import through
from ..node import Node
from ..output.event_log import Telling
from ..peers.lease import Heartbeat
from . import loop_pacing
from .decision_failures import Lapse
from .executor import Performer
from .peer_duties import Company
from .round import Round
from .shutdown import Leaving
from .status_publisher import QUICK_S, Publisher
from .store_outage import Outage
from .waiting_notice import Awaiting

ORDERED_S, CALM_S = 0.1, 1.0
"""Longest sleeps of the loop in seconds: while an order is open, and while ranks only train. While an action is under way, the longest
sleep is `QUICK_S`. Ended processes wake the loop immediately."""
RESTS, REST_S, BUSY_REST_S = 4.0, 0.5, 0.1
"""After evaluating the job, the loop reads other nodes' writes, but rests before the next evaluation: `RESTS` times as long as the last one
took, at most `REST_S` seconds (`BUSY_REST_S` while an action is under way). With thousands of nodes there is always news, and an evaluation
delays other work."""

BLIND_S = 60.0
"""Seconds that observing the ranks may fail until the agent exits. An agent that cannot notice a rank's death is worse than no agent."""


@dataclass(frozen=True, kw_only=True)
class Duties:
    """The parts of a round, apart from observing the ranks."""

    publisher: Publisher
    performer: Performer
    leaving: Leaving
    outage: Outage
    company: Company | None
    """None for a job of one node."""


class Supervisor:
    def __init__(
        self,
        *,
        seat: Seat,
        node: Node,
        heartbeat: Heartbeat,
        controller: Controller,
        policy: AgentPolicy,
        telling: Telling,
        duties: Duties,
        over: int = 0,
    ) -> None:
        """over: the generation with which the job had ended before this agent joined; 0: it had not ended."""
        self.id, self.node = seat.node, node
        self.heartbeat, self.controller, self.performer = heartbeat, controller, duties.performer
        self.policy, self.telling = policy, telling
        self._leaving, self._outage = duties.leaving, duties.outage
        self._company, self._publisher = duties.company, duties.publisher
        self._round = Round(
            heartbeat=heartbeat,
            controller=controller,
            outage=duties.outage,
            fence=self._company.fence if self._company else None,
            over=over,
            say_again=self._publisher.forget,
            publish=lambda record: self._publisher.round(record, self._busy()),
            obey=self.performer.obey,
        )
        self._lapse = Lapse(node, telling)
        self._next_round_s, self._last_stumble = 0.0, ""
        self._rest_until_s = 0.0
        """Monotonic time before which other nodes' writes do not wake the loop."""
        self._took_s = 0.0
        """Seconds that evaluating the whole job has taken in this round."""
        self._looked_s = monotonic_s()
        """When the agent last observed the ranks, in seconds of the monotonic clock."""
        self._awaiting = Awaiting(seat.node, telling)

    @property
    def record(self) -> GenerationRecord | None:
        """Return the newest record."""
        return self._round.record

    def run(self) -> int:
        """Run until the job is over, and return the exit code."""
        with self._leaving.hearing() as wake:
            self._warm_up()
            while True:
                self._wait(wake)
                code = self.round()
                if code is not None:
                    return code

    def _wait(self, wake: int) -> None:
        """Wait until there may be something to do."""
        record, told = self.record, self._publisher.told
        running = record is not None and record.phase is Phase.RUN and not loop_pacing.starting(record, told, wall_s())
        patience_s = min(CALM_S, self._patience_s()) if running and not self._busy() else QUICK_S
        patience_s = min(patience_s, self._company.fence.left_s(monotonic_s())) if self._company else patience_s
        fds = (wake, *self.node.fds(), *(self._company.fds() if self._company else ()))
        ends_s, heard = monotonic_s() + patience_s, False
        ready: list[int] = []
        while not ready and (left_s := self._rest_until_s - monotonic_s()) > 0:
            ready = readable(fds, min(left_s, QUICK_S))
            heard = self._hear() or heard
        changes = () if heard else self.controller.fds()
        if not ready and not heard:
            ready = readable((*fds, *changes), max(0.0, ends_s - monotonic_s()))
        if wake in ready:
            os.read(wake, 4096)
        if heard or not {wake, *changes}.isdisjoint(ready):
            self._next_round_s = 0.0

    def _hear(self) -> bool:
        """Return whether other nodes have written something. Also return True if reading etcd fails: the next round reports why."""
        try:
            return self.controller.hear(wall_s())
        except StoreUnavailable:
            return True
        except Exception:  # the next round meets the same error, and reports it
            self.controller.forget()
            return True

    def round(self) -> int | None:
        """Run one round of the loop. Return the exit code when the job is over; otherwise None."""
        if self._leaving.at_once:
            self.telling.say("a second signal: the agent exits at once", "warn")
            return self._leaving.code
        changed = self._company is not None and self._company.look(monotonic_s())
        self.node.pace_saving()
        looked = True
        for act in (self.node.observe, self._hear_helpers):
            try:
                changed = act() or changed
            except ResilientError:
                raise
            except Exception as error:  # a bug, or a rank's bad data: one failure must not end the agent
                self._stumbled(error)
                looked, changed = False, True
                if monotonic_s() - self._looked_s > BLIND_S:
                    what = f"the agent could not observe its ranks for {BLIND_S:.0f} s ({error!r})"
                    raise InternalError(what) from error
        if looked:
            self._looked_s = monotonic_s()
        try:
            self._consult(changed)
        except OSError as error:  # no descriptor, no memory, a full disk: this round is lost, but the ranks continue
            self._stumbled(error)
        except LeaseGone:
            self.heartbeat.lost()
        except StoreUnavailable as error:
            self._store_is_down(error)
        if self.node.group:
            return None
        if self.record and self.record.phase is Phase.ENDED:
            return self.record.exit_code
        code = self._leaving.dismissed(self.record, self.heartbeat.instance)
        if code is not None and self.record and self.heartbeat.instance in self.record.dismissed:
            with suppress(StoreUnavailable):
                self._publisher.farewell(self.record)
        return code

    def _stumbled(self, error: Exception) -> None:
        bug = f"the agent could not observe its ranks ({error!r}; report this)"
        what = str(error) if isinstance(error, OSError) else bug
        if what != self._last_stumble:
            self._last_stumble = what
            self.telling.say(f"{what}; training continues, and the agent tries again", "bad")

    def _consult(self, changed: bool) -> None:
        """Publish, decide and obey. Repeat this while each turn leads to more to do. Raises StoreUnavailable."""
        now = monotonic_s()
        news = self._publisher.news(self.record)
        if not (changed or news or now >= self._next_round_s or self._leaving.to_ask or self._busy()):
            return
        self._rest_until_s = 0.0
        self._next_round_s = now + (QUICK_S if self._busy() else self._patience_s())
        self._round.begin(now)
        if self._company and self.record:
            with suppress(InternalError):  # an unreadable record: the leader fails on it too, and reports it
                self._company.tell(self.record)
        self.performer.hurry = self._leaving.ask(self.record) or self.performer.hurry
        self._took_s = 0.0
        for _ in range(20):
            if not self._round.turn(self._decide):
                break
        if not self._lapse.rests(monotonic_s()):
            self._round.end()
        self._rest_until_s = monotonic_s() + min(BUSY_REST_S if self._busy() else REST_S, RESTS * self._took_s)
        self._outage.over(monotonic_s())
        self._awaiting.look(self.controller.awaits, self.record, monotonic_s())
        self._warm_up()
        strides, pages = self.node.vitals.strides, self.node.board.trained(self.record, self.id)
        self.telling.count(pages, self._publisher.told, self.controller.world)
        own_s = {page.rank: spent.own_s for page, spent in zip(pages, strides.newest, strict=False)}
        self.telling.strides(len(strides.stragglers), own_s)

    def _decide(self) -> bool:
        """Call `Round.decide`, unless it has just failed. Return whether the controller has written to etcd."""
        if self._lapse.rests(monotonic_s()):
            return False
        began_s = monotonic_s()
        try:
            wrote = self._round.decide(began_s, wall_s())
        except (OSError, SiteError):
            raise
        except Exception as error:
            self._failed(error)
            return False
        finally:
            self._took_s += monotonic_s() - began_s
        self._lapse.over()
        self._leaving.decided()
        return wrote

    def _failed(self, error: Exception) -> None:
        """Handle a failed decision. Raises `error` if ranks have waited too long for a decision."""
        self.controller.forget()
        self._lapse.met(error, self.record, monotonic_s())
        if self._leaving.in_vain(monotonic_s()):
            self._end_at_once("the agent cannot judge faults")
        elif self.record and self.id not in self.record.members:  # a member should lead: it sees whether ranks wait
            self.heartbeat.end()
            self.heartbeat.lost()

    def _busy(self) -> bool:
        return loop_pacing.busy(self.record, self._publisher.told, wall_s())

    def _patience_s(self) -> float:
        """Return the longest sleep in seconds while no action is under way."""
        if loop_pacing.ordered(self.record, self._publisher.told):
            return ORDERED_S
        return self._publisher.pace_s

    def _hear_helpers(self) -> bool:
        """Report events of helpers and monitors. Return whether the warm process or a fetch has changed: a start may wait for either."""
        changed = False
        if self.node.warm.fds:
            changed, news = self.node.warm.observe()
            if news:
                self.telling.say(news, "info" if self.node.warm.forks_ranks else "warn")
        fetching = self.node.fetching
        for event in self.node.saving.events():
            self.telling.drained(event, through(self.node.board.pages))
        changed = changed or self.node.fetching != fetching
        for mood, sentence in self.node.lookout.words():
            self.telling.silent(sentence, mood)
        while self.node.sentences:
            self.telling.say(*self.node.sentences.pop(0))
        while self.node.held.sound.sentences:
            self.telling.say(*self.node.held.sound.sentences.pop(0))
        return changed

    def _warm_up(self) -> None:
        """Keep a process from which launchers are forked, and one from which ranks are forked. The latter starts only after ranks have
        finished a step, because starting ranks need the cores."""
        told, warm = self._publisher.told, self.node.warm
        if self.policy.observe:
            warm.why = "nothing is started again while observing"
        elif told is None or told.stepped_s or (self.record and self.id not in self.record.members):
            if not self.policy.warm:
                warm.why = "warm starts are switched off"
            warm.keep(told.generation if told else 0, ranks=self.policy.warm)

    def _store_is_down(self, error: ResilientError) -> None:
        fenced_soon = self.node.group is not None and self._company is not None and not self._company.fence.proof
        self.telling.count(self.node.board.trained(self.record, self.id), self._publisher.told, self.controller.world)
        self._outage.lasts(error, monotonic_s(), fenced_soon=fenced_soon)
        if self._leaving.in_vain(monotonic_s()):
            self._end_at_once("etcd does not answer")

    def _end_at_once(self, why: str) -> None:
        self.telling.say(f"{why}: the agent ends its ranks at once, without a last snapshot", "warn")
        self.node.stop_group()
        number = self.record.number if self.record else Generation(0)
        self._round.record = GenerationRecord(
            number=number, phase=Phase.ENDED, members={}, exit_code=self._leaving.code, reason=f"because {why}"
        )
