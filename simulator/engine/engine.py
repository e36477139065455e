"""Discrete-event simulation of a job: time jumps from event to event, the real `decide` decides, and agents obey by the real
`next_action.step`.

    fault (fault_effects.py) → the agents' statuses (cluster.py) → decide → record → next_action.step → the next phase, after its cost
    (scenario/costs.py)

Nothing is computed between two events: an undisturbed training has only a speed (progress.py).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random

from ...resilience.decide.decide import decide
from ...resilience.errors import InternalError
from ...resilience.model.generation import GenerationRecord
from ...resilience.model.rewind import Turn
from ...resilience.model.state_machine import Phase
from ...resilience.model.types import Generation, NodeId
from ..scenario.config import Setting
from .accounting import TRAINING, Books
from .cluster import Cluster
from .outcome import Ending, Outcome
from .progress import Rhythm, rhythm
from .training import Training

START_S = 1000.0
"""Wall-clock time at which the simulated job begins: not 0, which means *not yet* in statuses and records."""
_ROUNDS = 20
"""Maximum number of decisions in one tick of the controller."""


@dataclass
class Spike:
    """A loss spike that is not over."""

    onset: int
    again: bool
    turns: list[Turn] = field(default_factory=list)


class Play:
    """A simulated job. `run` plays it once; `later` schedules its faults before that."""

    def __init__(
        self,
        setting: Setting,
        heard: Callable[[Play, Generation], None],
        taken_away: Callable[[Play, NodeId], None],
    ) -> None:
        """heard: called when agents have read the record of a generation; taken_away: called to repair a node, if it is broken."""
        self.setting, self.costs, self._heard, self._taken_away = setting, setting.costs, heard, taken_away
        self.now_s = START_S
        self.books = Books(setting.costs.step_s, START_S)
        self.training = Training(rhythm(setting.costs, setting.ranks, 0, 0.0, 0, 0), self.books, START_S)
        self.cluster = Cluster(
            setting.nodes, setting.per_node, setting.spares, setting.sizes or (setting.nodes,), self.training
        )
        self.chance = Random(f"phases, seed {setting.seed}")
        self.outcome = Outcome(setting=setting)
        self.spike: Spike | None = None
        self.slow: dict[int, float] = {}
        """By slow machine: the factor on its time for a step."""
        self.sick: set[int] = set()
        """Machines on which ranks end as soon as they start."""
        self.repairs_s: dict[int, float] = {}
        """By broken machine: how long its repair will take."""
        self.end_s = START_S + setting.lasts_s
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self.failures = 0

    # -- time -------------------------------------------------------------------------------------------------------------

    def later(self, in_s: float, what: Callable[..., None], *words: object) -> None:
        """Call `what` with the arguments `words` after `in_s` simulated seconds."""
        self._count += 1
        happens: Callable[[], None] = partial(what, *words)
        heapq.heappush(self._heap, (self.now_s + max(0.0, in_s), self._count, happens))

    def run(self, told: Callable[[float], None]) -> None:
        """Simulate the job to the end. told: called now and then with the share of the simulated time that has passed."""
        for name in self.cluster.names:
            self.cluster.register(name, START_S)
        self.tick()
        while self._heap and self._heap[0][0] <= self.end_s:
            self.now_s, count, happens = heapq.heappop(self._heap)
            happens()
            if count % 64 == 0:
                told(self.since_s / self.setting.lasts_s)
        self.now_s = self.end_s
        self.training.account(self.end_s)
        self.books.enter(self.end_s, TRAINING)
        self.outcome.look(self.setting.lasts_s, self.books)

    @property
    def since_s(self) -> float:
        """Seconds since the job began."""
        return self.now_s - START_S

    # -- the controller ---------------------------------------------------------------------------------------------------

    def news(self, after_s: float = 0.0) -> None:
        """Schedule a tick of the controller for the time when it has received the agents' news."""
        self.later(after_s + self.costs.news_s, self.tick)

    def tick(self) -> None:
        """Run one tick: call `decide` until it changes nothing any more."""
        cluster = self.cluster
        for _ in range(_ROUNDS):
            before = cluster.record
            decision = decide(cluster.world(self.now_s), self.now_s, self.setting.policy)
            self.outcome.decisions += 1
            if not decision.record and not decision.incidents and not decision.quarantine:
                return
            cluster.write(decision, self.now_s)
            self.outcome.etcd_writes += 1 + len(decision.incidents) + len(decision.quarantine)
            for name, shut_out in decision.quarantine.items():
                self.outcome.shut_out += 1
                self.later(shut_out.until_s - self.now_s, self.tick)
                self.later(self.costs.operator_s, self._taken_away, self, name)
            if decision.record:
                self._opened(before, decision.record)
        raise InternalError("the simulated controller decides without end; this is a defect of ours, please report it")

    def _opened(self, before: GenerationRecord | None, record: GenerationRecord) -> None:
        """Tell all nodes of a changed record."""
        if before is None or before.number != record.number:
            if self.training.track is None:  # healthy ranks train until they are stopped
                self.books.enter(self.now_s, "stop" if self.cluster.group else "nodes" if before else "start")
            self.failures += before is not None
            if record.pause_s:
                self.news(record.pause_s)
            self.outcome.look(self.since_s, self.books)
        elif record.phase is Phase.LAUNCH:
            self.books.enter(self.now_s, "start")
        if record.phase is Phase.ENDING:
            if before is None or before.phase is not Phase.ENDING:  # later, a node may be lost while no rank trains
                self._gave_up(record)
            return
        heard_s = self.costs.news_s + self.costs.told_s(self.setting.nodes)
        self.later(heard_s, self._heard, self, record.number)

    def _gave_up(self, record: GenerationRecord) -> None:
        """End a job that gave up. After `operator_s`, an operator starts it again from disk, with fresh budgets."""
        self.outcome.endings.append(Ending(at_s=self.since_s, code=record.exit_code, reason=record.reason))
        self.outcome.archive(self.cluster)
        if self.cluster.group:
            self.broken()
        self.books.enter(self.now_s, "operator")
        self.later(self.costs.operator_s, self._again)

    def _again(self) -> None:
        """Give the same command again, on all nodes except those on which ranks cannot start. Quarantines are forgotten."""
        cluster = self.cluster
        for name in list(cluster.place):
            self._taken_away(self, name)
        last = cluster.record
        assert last
        assert last.phase is Phase.ENDING
        self.training.forget()
        cluster.group, cluster.incidents, cluster.bad_from, cluster.newcomers = None, {}, -1, {}
        cluster.quarantine = {}
        cluster.record = replace(last, phase=Phase.ENDED)
        cluster.spec = replace(cluster.spec, first_generation=Generation(last.number + 1))
        self.books.enter(self.now_s, "nodes")  # there may be too few nodes
        self.tick()

    def broken(self) -> None:
        """Stop the progress of all ranks, whether they know of the fault or not."""
        group = self.cluster.group
        if group is None or group.broken_s <= self.now_s:
            return
        if self.training.track:
            if self.training.all_sealed(self.now_s):
                self.cluster.newcomers = {}
            group.reached = self.training.halt(self.now_s)
        group.broken_s = self.now_s
        self.books.enter(self.now_s, "detect")

    def repace(self) -> None:
        """Set the training's speed to that of the slowest node."""
        self.training.pace(self.now_s, self._slowest())

    def _slowest(self) -> float:
        return max(
            (factor for machine, factor in self.slow.items() if self.cluster.names[machine] in self.cluster.place),
            default=1.0,
        )

    def rhythm(self) -> Rhythm:
        """Return how often snapshots are taken from now on, and how long steps are."""
        setting, failures, slow = self.setting, self.failures, self._slowest()
        every, durable_every = setting.snapshots.every_steps, setting.snapshots.durable_every_steps
        uptime_s = self.since_s
        found = rhythm(setting.costs, setting.ranks, failures, uptime_s, every, durable_every)
        fewer = setting.nodes / max(1, len(self.cluster.place))
        copies, copy_s = setting.copies, setting.costs.copy_s
        copies_s = copies.interval_s(copy_s) if copy_s <= copies.hold_s else 0.0  # a longer copy is given up
        return replace(found, slow=slow, fewer=fewer, copies_s=copies_s)
