"""The life of a simulated job: time jumps from one thing that happens to the next, the real judgement decides, and agents obey by the real
`duty`.

    fault (strikes.py) → what the agents tell (cluster.py) → decide → record → duty → the next phase, after what it costs (costs.py)

Nothing is computed between two events: of a training that goes well only its speed is known (progress.py).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from random import Random

from ..agent.duty import Action, LocalState, duty
from ..resilience.decision import decide
from ..resilience.errors import InternalError
from ..resilience.machine import Phase
from ..resilience.orders import GenerationRecord
from ..resilience.scale import pace
from ..resilience.signals import AckKind, Generation, InPlaceRewind, NodeId, Step
from . import strikes
from .books import TRAINING, Books
from .cluster import Cluster, Gang
from .faults import Fault, Model, draw
from .outcome import Ending, Outcome
from .progress import Rhythm, rhythm
from .setting import Setting
from .training import Training

START_S = 1000.0
"""Wall-clock time at which the simulated job begins: not 0, which means *not yet* in statuses and records."""
_BEFORE_S = 1e-3
"""At a boundary ranks obey before they take a snapshot, which may overwrite the one that they are to go back to."""
_ROUNDS = 20
"""So often may a decision lead to the next at once."""


def played(setting: Setting, model: Model, told: Callable[[float], None] = lambda share: None) -> Outcome:
    """A whole run with the faults that its seed draws. told: hears now and then what share of the time is over. Raises UsageError."""
    machines = setting.nodes + setting.spares
    return Play(setting, draw(model, machines, setting.lasts_s, setting.rate, setting.seed)).run(told)


class Play:
    """`run` plays a job once."""

    def __init__(self, setting: Setting, faults: Sequence[Fault]) -> None:
        self.setting, self.costs = setting, setting.costs
        self.now_s = START_S
        self.books = Books(setting.costs.step_s, START_S)
        self.training = Training(self._rhythm(0), self.books, START_S)
        self.cluster = Cluster(
            setting.nodes, setting.per_node, setting.spares, setting.sizes or (setting.nodes,), self.training
        )
        self.chance = Random(f"phases, seed {setting.seed}")
        self.outcome = Outcome(setting=setting)
        self.spike: strikes.Spike | None = None
        self.slow: dict[int, float] = {}
        """Machine to the factor by which it is slow."""
        self.sick: set[int] = set()
        """Machines that a check will find broken,"""
        self.repairs_s: dict[int, float] = {}
        """and what the repair of each machine that is broken will take."""
        self.lease_s = float(pace(setting.nodes + setting.spares).lease_ttl_s)
        """From a node's end until its agent is missed, at most."""
        self._end_s = START_S + setting.lasts_s
        self._faults = faults
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._failures = 0

    # -- time -------------------------------------------------------------------------------------------------------------

    def later(self, in_s: float, what: Callable[..., None], *words: object) -> None:
        """`what` happens in so many seconds."""
        self._count += 1
        happens: Callable[[], None] = partial(what, *words)
        heapq.heappush(self._heap, (self.now_s + max(0.0, in_s), self._count, happens))

    def run(self, told: Callable[[float], None] = lambda share: None) -> Outcome:
        """Play to the end. told: hears now and then what share of the time is over."""
        for name in self.cluster.names:
            self.cluster.register(name, START_S)
        for fault in self._faults:
            self.later(fault.at_s, strikes.strike, self, fault)
        self.tick()
        while self._heap and self._heap[0][0] <= self._end_s:
            self.now_s, count, happens = heapq.heappop(self._heap)
            happens()
            if count % 64 == 0:
                told(self.since_s / self.setting.lasts_s)
        self.now_s = self._end_s
        self.training.account(self._end_s)
        self.books.enter(self._end_s, TRAINING)
        self.outcome.look(self.setting.lasts_s, self.books)
        self.outcome.finish(self.books, self.cluster, len(self._faults))
        return self.outcome

    @property
    def since_s(self) -> float:
        """Of the job's life."""
        return self.now_s - START_S

    # -- the controller ---------------------------------------------------------------------------------------------------

    def news(self, after_s: float = 0.0) -> None:
        """Agents have something to tell: the controller looks once it has heard."""
        self.later(after_s + self.costs.news_s, self.tick)

    def tick(self) -> None:
        """Decide, as long as there is something to decide."""
        cluster = self.cluster
        for _ in range(_ROUNDS):
            before = cluster.record
            decision = decide(cluster.world(self.now_s), self.now_s, self.setting.policy)
            self.outcome.decided()
            if not decision.record and not decision.incidents and not decision.quarantine:
                return
            cluster.write(decision, self.now_s)
            self.outcome.wrote(1 + len(decision.incidents) + len(decision.quarantine))
            for shut_out in decision.quarantine.values():
                self.outcome.shut_out += 1
                self.later(shut_out.until_s - self.now_s, self.tick)
            if decision.record:
                self._opened(before, decision.record)
        raise InternalError("the simulated controller decides without end; this is a defect of ours, please report it")

    def _opened(self, before: GenerationRecord | None, record: GenerationRecord) -> None:
        """The record has changed: all nodes hear of it."""
        if before is None or before.number != record.number:
            if self.training.track is None:  # ranks that nothing is wrong with train on until they are stopped
                self.books.enter(self.now_s, "stop" if self.cluster.gang else "nodes" if before else "start")
            self._failures += before is not None
            self.outcome.look(self.since_s, self.books)
        elif record.phase is Phase.LAUNCH:
            self.books.enter(self.now_s, "start")
        if record.phase is Phase.ENDING:
            self._gave_up(record)
            return
        heard_s = self.costs.news_s + self.costs.told_s(self.setting.nodes)
        self.later(heard_s, self._heard, record.number)

    def _gave_up(self, record: GenerationRecord) -> None:
        """The job has ended itself; somebody starts it again, with budgets as new, from disk."""
        self.outcome.endings.append(Ending(at_s=self.since_s, code=record.exit_code, reason=record.reason))
        self.outcome.archive(self.cluster)
        if self.cluster.gang:
            strikes.broken(self)
        self.books.enter(self.now_s, "operator")
        self.later(self.costs.operator_s, self._again, record)

    def _again(self, last: GenerationRecord) -> None:
        """The same command, on all nodes."""
        cluster = self.cluster
        self.training.forget()
        cluster.gang, cluster.incidents, cluster.bad_from, cluster.newcomers = None, {}, -1, {}
        cluster.record = replace(last, phase=Phase.ENDED)
        cluster.spec = replace(cluster.spec, first_generation=Generation(last.number + 1))
        self.tick()

    # -- the agents -------------------------------------------------------------------------------------------------------

    def _heard(self, number: Generation) -> None:
        """All agents have read the record of that generation, and each does what it owes to it; they are asked in groups of those
        that are in the same state."""
        cluster = self.cluster
        record = cluster.record
        if record is None or record.number != number:
            return
        groups: dict[tuple[AckKind | None, bool], list[NodeId]] = {}
        for name in cluster.present():
            acked = cluster.acks[name].kind if name in cluster.acks else None
            groups.setdefault((acked, name in cluster.newcomers), []).append(name)
        for (acked, _), names in groups.items():
            match duty(record, self._local(names[0], acked)):
                case Action.CLEAR:
                    self._clear(number, names)
                case Action.LAUNCH:
                    self._launch(record)
                case Action.SAY_RUNNING:
                    cluster.acknowledge(names, AckKind.RUNNING, self.now_s)
                    self._answered(len(names))
                case Action.ORDER_REWIND:
                    self._turn_back(record)

    def _local(self, name: NodeId, acked: AckKind | None) -> LocalState:
        gang, record = self.cluster.gang, self.cluster.record
        assert record
        return LocalState(
            instance=self.cluster.nodes[name].instance,
            gang=gang.generation if gang else 0,
            gang_over=False,
            attached=gang is not None and gang.attached_s <= self.now_s < gang.broken_s,
            training=gang is not None and gang.training(self.now_s),
            acked=(record.number if acked else 0, acked),
            rewind=gang.rewind if gang else 0,
            paused=False,
            snapshot=record.snapshot,
            leave_ordered=False,
            grace_over=False,
        )

    def _answered(self, names: int) -> None:
        """So many agents have said a word each, and then the controller looks."""
        self.outcome.wave(names)
        self.news(self.costs.answered_s(names))

    def _clear(self, number: Generation, names: list[NodeId]) -> None:
        """Agents end what is left of their ranks; one that is new has none, and fetches what it is to go on from."""
        gang, takes_s = self.cluster.gang, 0.0
        newcomer = names[0] in self.cluster.newcomers
        if newcomer and any(self.cluster.newcomers[name] for name in names):
            takes_s = self.costs.fetch_s
        if gang and not newcomer:
            if self.training.track:
                strikes.broken(self)
                self.books.enter(self.now_s, "stop")
            if gang.gone_s > self._end_s:
                stop_s = self.costs.slowest_s(self.costs.stop_s, len(names), self.chance)
                gang.gone_s = self.now_s + stop_s
            takes_s = gang.gone_s - self.now_s
        self.later(takes_s, self._cleared, number, tuple(names))

    def _cleared(self, number: Generation, names: Sequence[NodeId]) -> None:
        cluster = self.cluster
        if cluster.gang and cluster.gang.gone_s <= self.now_s:
            cluster.gang = None
        record = cluster.record
        if record is None or record.number != number or record.phase is not Phase.GATHER:
            return
        present = set(cluster.present())
        ready = [name for name in names if name in present and cluster.machine[name] not in self.sick]
        for name in names:
            if name in present and cluster.machine[name] in self.sick:
                self.later(self.costs.check_s, strikes.found_sick, self, name)
        cluster.acknowledge(ready, AckKind.READY, self.now_s)
        self.books.enter(self.now_s, "nodes" if len(cluster.acks) < len(record.members) else "start")
        self._answered(len(ready))

    # -- the ranks --------------------------------------------------------------------------------------------------------

    def _launch(self, record: GenerationRecord) -> None:
        """The ranks start; the slowest node of each phase is waited for."""
        costs, resume = self.costs, int(record.resume_step)
        from_memory = resume in self.training.memory(self.now_s)
        newcomers = [kept for kept in self.cluster.newcomers.values() if resume not in kept]
        restore_s = costs.restore_s if from_memory and not newcomers else costs.read_s if resume >= 0 else 0.0
        marks, at_s = [], self.now_s
        for takes_s in (costs.start_s, costs.build_all_s(self.setting.ranks), restore_s):
            at_s += costs.slowest_s(takes_s, self.setting.nodes, self.chance)
            marks.append(at_s)
        self.cluster.gang = Gang(
            generation=record.number,
            resume=resume,
            attached_s=marks[0],
            built_s=marks[1],
            restored_s=marks[2],
            begins_s=at_s + costs.first_step_s,
        )
        self.later(marks[0] - self.now_s, self._reached, record.number, "build")
        self.later(marks[1] - self.now_s, self._reached, record.number, "restore")
        self.later(marks[2] - self.now_s, self._reached, record.number, "step")
        self.later(self.cluster.gang.begins_s - self.now_s, self._begins, record.number)

    def _reached(self, number: Generation, account: str) -> None:
        gang = self.cluster.gang
        if gang is None or gang.generation != number or gang.broken_s <= self.now_s:
            return
        self.books.enter(self.now_s, account)
        self.outcome.wave(self.setting.nodes)  # statuses: a mark is news
        if account == "build":
            self._heard(number)
            strikes.start_of_the_sick(self)

    def _begins(self, number: Generation) -> None:
        """The ranks compute their first step."""
        cluster, gang = self.cluster, self.cluster.gang
        if gang is None or gang.generation != number or gang.broken_s <= self.now_s:
            return
        assert cluster.record
        self.books.enter(self.now_s, TRAINING)
        self.training.begin(self.now_s, gang.resume, self._rhythm(self._failures, self._slowest()))
        cluster.bad_from = -1
        track = self.training.track
        assert track
        gang.stepped_s = track.when(track.begun + 1)
        back = max(track.begun + 1, int(cluster.record.replay_until))
        self.later(track.when(back) - self.now_s, self.back_at, number, back)
        strikes.resumed(self)

    def back_at(self, number: Generation, step: int) -> None:
        """The ranks are where the fault struck, or behind it: the controller can close what is open."""
        gang, track = self.cluster.gang, self.training.track
        if gang is None or gang.generation != number or track is None:
            return
        if track.finished(self.now_s) < step:  # it has become slower, or has gone back
            self.later(max(0.0, track.when(step) - self.now_s) + 1e-3, self.back_at, number, step)
            return
        if self.training.all_copied(self.now_s):
            self.cluster.newcomers = {}
        self.outcome.wave(self.setting.nodes)
        self.tick()

    def _turn_back(self, record: GenerationRecord) -> None:
        """All ranks go back as ordered, at their next boundary."""
        gang, track = self.cluster.gang, self.training.track
        assert gang
        assert record.rewind
        gang.rewind = record.rewind.number
        if track is None:  # they go back just now, and are told again when the controller looks
            return
        boundary_s = track.when(track.finished(self.now_s) + 1) - self.now_s
        self.later(boundary_s, self._turn, record.number, record.rewind.number, int(record.rewind.to))

    def _turn(self, number: Generation, order: int, to: int) -> None:
        gang, cluster = self.cluster.gang, self.cluster
        if gang is None or gang.generation != number or self.training.track is None or gang.broken_s <= self.now_s:
            return
        if to not in self.training.held(self.now_s - _BEFORE_S):
            gang.declined = order
            self.news()
            return
        told = InPlaceRewind(
            ordinal=len(gang.rewinds) + 1,
            generation=number,
            cause="fingerprint_mismatch",
            onset=Step(cluster.bad_from),
            to=Step(to),
            reached=Step(self.training.track.finished(self.now_s)),
            remedy="replay",
            order=order,
            at_s=self.now_s,
            restore_s=self.costs.rewind_s,
        )
        self.training.shelf.without(max(0, cluster.bad_from))
        cluster.bad_from = -1
        self.go_back(told)

    def go_back(self, told: InPlaceRewind) -> None:
        """In place, from memory or from disk."""
        gang = self.cluster.gang
        assert gang
        in_memory = told.to in self.training.memory(self.now_s - _BEFORE_S)
        takes_s = self.costs.rewind_s if in_memory else self.costs.read_s
        gang.reached = self.training.halt(self.now_s)
        self.books.enter(self.now_s, "restore")
        gang.rewinds.append(told)
        self.later(takes_s, self._on_again, gang.generation, told)

    def _on_again(self, number: Generation, told: InPlaceRewind) -> None:
        gang = self.cluster.gang
        if gang is None or gang.generation != number or gang.broken_s <= self.now_s:
            return
        self.books.enter(self.now_s, TRAINING)
        self.training.go_back(self.now_s, int(told.to))
        settled = int(told.reached) + self.setting.policy.ladder.settled_steps
        track = self.training.track
        assert track
        self.later(track.when(settled) - self.now_s, self.back_at, number, settled)
        self.news()
        strikes.resumed(self)

    def repace(self) -> None:
        """The slowest node says how fast the others are."""
        self.training.pace(self.now_s, self._slowest())

    def _slowest(self) -> float:
        return max(
            (factor for machine, factor in self.slow.items() if self.cluster.names[machine] in self.cluster.place),
            default=1.0,
        )

    def _rhythm(self, failures: int, slow: float = 1.0) -> Rhythm:
        setting = self.setting
        every, durable_every = setting.snapshots.every_steps, setting.snapshots.durable_every_steps
        uptime_s = self.since_s
        found = rhythm(setting.costs, setting.ranks, failures, uptime_s, every, durable_every)
        return replace(found, slow=slow, buddies=setting.buddies)
