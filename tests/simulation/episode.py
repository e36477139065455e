"""Seed → episode → what came of it. An episode is plain data: a world, and the faults that strike it, one after the other or together."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace

from mt_resilient.chaos.judgement.draw import shrunk as fewest
from mt_resilient.resilience.errors import BudgetSpent, MachineError, ScriptError, SilentCorruption, SnapshotError
from mt_resilient.resilience.inprocess.loss_spike import SpikePolicy
from mt_resilient.resilience.inprocess.rewind_ladder import LadderPolicy
from mt_resilient.resilience.inprocess.tally import RankPolicy
from mt_resilient.resilience.model.state_machine import Phase
from mt_resilient.resilience.model.types import RankPhase
from mt_resilient.resilience.plan.escalation import RecoveryPolicy

from ..scenarios.cluster import Job
from ..scenarios.invariants import Violated, samples
from . import faults
from .faults import End

PATIENT = RecoveryPolicy(max_without_progress=999, same_failure_at_start=999, failed_starts=999, max_mismatches=99)
LADDER = LadderPolicy(distance_steps=4, skip_steps=4, same_fault_steps=12)
PATIENCE_S = 700
"""A job that is not over so long after everything was mended hangs."""
_STARTS = 4
"""How often somebody gives the same command again."""
_PLACES: tuple[str, ...] = (
    *(f"phase {phase}" for phase in Phase if phase is not Phase.ENDED),
    *(f"ranks {phase.name.lower()}" for phase in RankPhase),
    "rewind",
)
_PLACES_OF_NODES = tuple(f"newcomer {phase}" for phase in (Phase.GATHER, Phase.LAUNCH, Phase.RUN))
_NODES = (
    ("2", 0),
    ("2", 1),
    ("2", 1),
    ("2", 2),
    ("1", 1),
    ("1:2", 0),
    ("1:2", 1),
    ("3", 1),
    ("2:3", 1),
    ("1,2,4", 0),
    ("4", 2),
)
"""Numbers of nodes and spares that are drawn."""
_MORE = (0, 0, 0, 1, 2, 4)
"""How many have come beyond those."""
SEVERAL = 0.2
"""How many episodes have several nodes."""
FORGOTTEN = 0.1
"""In how many etcd loses its data,"""
AWAY = 0.1
"""and in how many the script's is away for a while."""
LATE = 0.2
"""In how many of those with several nodes one host lists storage late."""


@dataclass(frozen=True)
class Moment:
    """One fault: so many seconds after the one before, or, where a place is named, as soon as the job has come there."""

    wait_s: int
    place: str
    fault: str
    number: int

    def __str__(self) -> str:
        return f"{f'in {self.place}' if self.place else f'{self.wait_s} s later'}: {self.fault}({self.number})"


@dataclass(frozen=True)
class Episode:
    seed: int
    total: int
    durable_every: int
    ranks: int
    patient: bool
    """Whether budgets are such that no number of faults spends them."""
    moments: tuple[Moment, ...]
    nodes: str = "1"
    spares: int = 0
    more: int = 0

    @property
    def alone(self) -> bool:
        return (self.nodes, self.spares) == ("1", 0)

    def __str__(self) -> str:
        budgets = "no budget ends" if self.patient else "budgets as ever"
        nodes = "" if self.alone else f" on each of {self.nodes} nodes, {self.spares} spares and {self.more} more"
        world = f"{self.total} steps, {self.ranks} ranks{nodes}, each {self.durable_every}th step to disk, {budgets}"
        return "\n  ".join([f"seed {self.seed}: {world}", *map(str, self.moments)])


def draw(seed: int) -> Episode:
    """The episode that this seed stands for."""
    dice = random.Random(seed)
    patient = dice.random() < 0.7
    long = dice.random() < 0.1
    kinds = faults.ALWAYS + (faults.AWAKE if dice.random() < 0.5 else faults.ASLEEP)
    several = random.Random(f"nodes {seed}")  # of their own: an episode of one node is what it always was
    nodes, spares = several.choice(_NODES) if several.random() < SEVERAL else ("1", 0)
    more = several.choice(_MORE) if (nodes, spares) != ("1", 0) else 0
    places = _PLACES if (nodes, spares) == ("1", 0) else (*_PLACES, *_PLACES_OF_NODES * 2)
    kinds += () if (nodes, spares) == ("1", 0) else faults.OF_NODES * 2
    kinds += () if patient else faults.PERSISTENT
    kinds += faults.LONG if long else ()
    few = dice.sample(kinds, k=min(len(kinds), dice.choice((3, 6, len(kinds)))))
    moments = []
    for _ in range(dice.randrange(1, 9)):
        place = dice.choice(places) if dice.random() < 0.3 else ""
        wait_s = dice.choice((0, 0, 1, 2, 3, 5, 8, 12)) + (20 if long and not moments else 0)
        moments.append(Moment(wait_s, place, dice.choice(few).__name__, dice.randrange(1 << 16)))
    data = random.Random(f"data {seed}")  # of its own too
    if data.random() < FORGOTTEN and not {m.fault for m in moments} & {fault.__name__ for fault in faults.DEAF}:
        place = data.choice(places) if data.random() < 0.5 else ""
        lost = Moment(data.choice((0, 1, 3, 8)), place, data.choice(faults.OF_DATA).__name__, data.randrange(1 << 16))
        moments.insert(data.randrange(len(moments) + 1), lost)
    starts = random.Random(f"starts {seed}")
    if starts.random() < AWAY:
        place = starts.choice(places) if starts.random() < 0.5 else ""
        away = Moment(
            starts.choice((0, 1, 3, 8)), place, starts.choice(faults.OF_STARTS).__name__, starts.randrange(1 << 16)
        )
        at = starts.randrange(len(moments) + 1)
        if at < len(moments):  # and what comes next, while starts wait for long, or after it
            moments[at] = replace(moments[at], wait_s=moments[at].wait_s + starts.choice((0, 0, 60, 600)))
        moments.insert(at, away)
    late = random.Random(f"storage {seed}")
    if (nodes, spares) != ("1", 0) and late.random() < LATE:  # first of all, once a few snapshots are on disk
        moments.insert(
            0, Moment(late.randrange(10, 18), "", late.choice(faults.OF_STORAGE).__name__, late.randrange(1 << 16))
        )
    return Episode(
        seed=seed,
        total=32 if long else 12,
        durable_every=dice.choice((1, 2, 3, 4, 5)),
        ranks=dice.choice((2, 2, 3)),
        patient=patient,
        moments=tuple(moments),
        nodes=nodes,
        spares=spares,
        more=more,
    )


@dataclass(frozen=True)
class Outcome:
    episode: Episode
    transcript: str
    exit_codes: tuple[int, ...]
    """Of the agents that have left, in turn."""
    ticks: int
    violated: str = ""
    """What must never happen, and did."""
    invariant: int = 0
    """Its number; 0: the job did not end as it has to."""


def play(episode: Episode) -> Outcome:
    """The whole episode, to its end or until something is violated."""
    return Player(episode).play()


class Player:
    def __init__(self, episode: Episode) -> None:
        self.episode = episode
        spikes = SpikePolicy(baseline_steps=16, patience_steps=4, enabled=episode.total > 20)
        self.job = Job(
            total=episode.total,
            durable_every=episode.durable_every,
            ranks=episode.ranks,
            nodes=episode.nodes,
            spares=episode.spares,
            more=episode.more,
            policy=PATIENT if episode.patient else RecoveryPolicy(),
            judged_by=RankPolicy(spikes=spikes, ladder=LADDER),
        )
        self.ends: list[tuple[float, End]] = []
        """What ends a fault that lasts, and when."""
        self.codes: list[int] = []
        self.ticks = 0

    def play(self) -> Outcome:
        violated, number = "", 0
        try:
            for moment in self.episode.moments:
                self._wait(moment)
                if self.job.exit_code is not None:
                    break
                lasting = faults.BY_NAME[moment.fault](self.job, moment.number)
                if lasting:
                    self.ends.append((self.job.now_s + lasting[0], lasting[1]))
            self._to_the_end()
        except Violated as error:
            violated, number = str(error), error.number
        except AssertionError as error:
            violated = str(error)
        except Exception as error:  # what the program itself raises is a finding too
            violated = f"{type(error).__name__}: {error}"
        return Outcome(self.episode, self.job.transcript(), tuple(self.codes), self.ticks, violated, number)

    def _wait(self, moment: Moment) -> None:
        for _ in range(40 if moment.place else moment.wait_s):
            if self.job.exit_code is not None or (moment.place and self._is_at(moment.place)):
                return
            self._tick()

    def _is_at(self, place: str) -> bool:
        kind, _, name = place.partition(" ")
        node, record = self.job.node, self.job.watch.record
        if kind == "phase":
            return record is not None and record.phase == name
        if kind == "newcomer":
            return record is not None and record.phase == name and bool(self.job.watch.newcomers)
        if node is None or node.ranks is None:
            return False
        return node.ranks.rewinds > 0 if kind == "rewind" else node.ranks.life.name.lower() == name

    def _tick(self) -> None:
        for due in [due for due in self.ends if due[0] <= self.job.now_s]:
            self.ends.remove(due)
            due[1](self.job)
        self.job.tick()
        self.ticks += 1
        if self.job.exit_code is not None:
            self._left()

    def _left(self) -> None:
        """The agent has left. Whoever reads its last word mends what it says, and gives the same command again."""
        code = self.job.exit_code
        assert code is not None
        self.codes.append(code)
        assert code in self._fair(), f"the job has ended with exit code {code}"
        if (code or not self._complete) and len(self.codes) < _STARTS and code != SnapshotError.exit_code:
            if code != 130:
                self._mend()
            self.job.nodes.clear()
            self.job.start_agents()

    @property
    def _complete(self) -> bool:
        """Whether the training has come to its end; where a node was drained that the job could not do without, it has not."""
        record = self.job.watch.record
        return record is not None and record.complete

    def _fair(self) -> set[int]:
        """Exit codes that the faults of this episode may end in."""
        drawn = {moment.fault for moment in self.episode.moments}
        codes = {0}
        if "stop_asked" in drawn:
            codes.add(130)
        if "nodes_preempted" in drawn:
            codes.add(143)
        if drawn & {"nan", "nan_again", "nan_in_the_data", "state_hurt"}:
            codes.add(BudgetSpent.exit_code)
        if not self.episode.patient:
            codes |= {BudgetSpent.exit_code, ScriptError.exit_code, SilentCorruption.exit_code}
        if drawn & {"disk_full", "drain_dies"} and "stop_asked" in drawn:
            codes.add(MachineError.exit_code)
        if drawn & {fault.__name__ for fault in faults.OF_NODES} or (
            not self.episode.alone and "agent_killed" in drawn
        ):
            codes.add(MachineError.exit_code)  # whose part of the last snapshot is lost when it dies while the job ends
        if drawn & {fault.__name__ for fault in faults.OF_DATA}:
            codes.add(MachineError.exit_code)  # an agent that finds a job there which is not its own leaves
        if drawn & {"disk_rots", "storage_unreadable", "bit_flips"}:
            codes |= {SnapshotError.exit_code, MachineError.exit_code}
        return codes

    def _mend(self) -> None:
        """Everything that is wrong with the world, but for what is lost."""
        job = self.job
        for _, end in self.ends:
            end(job)
        self.ends.clear()
        if job.store.down:
            job.start_store()
        job.store.unanswered.clear()
        job.faults.nan_at.clear()
        job.faults.kill_at.clear()
        job.faults.hang_at.clear()

    def _to_the_end(self) -> None:
        job = self.job
        if job.exit_code is None:
            self._mend()
        for _ in range(PATIENCE_S):
            if job.exit_code is not None:
                break
            self._over()
            self._back()
            self._tick()
        assert job.exit_code is not None, f"the job is not over {PATIENCE_S} s after everything was mended"
        if job.exit_code == 0 and self._complete:
            self._ended_well()

    def _over(self) -> None:
        """Who had died before it could leave with the others is not missed when the job is over; started again it would wait for them."""
        job, record = self.job, self.job.watch.record
        here = [node for node in job.nodes.values() if node.code is None]
        few = len(here) < min(job.sizes) and all(node.loop.over for node in here)
        if record and record.phase is Phase.ENDED and few:
            job.exit_code = record.exit_code

    def _back(self) -> None:
        """Who is dead comes back, as long as the job goes on; who has left in order stays away."""
        for name in self.job.names:
            node = self.job.nodes.get(name)
            if (node is None or node.code) and name not in self.job.late:
                self.job.start_agent(name)

    def _ended_well(self) -> None:
        job = self.job
        last = job.written[self.episode.total]
        left_out = list(last.course["windows"])
        known = {(window.start, window.stop) for window in job.watch.windows}
        batches = {batch for start, stop in known for batch in range(start, stop)}
        # Another leader may open a generation before an agent that is held up, or whose node trains alone and is cut off, could tell
        # what its ranks did: that is lost, or etcd's data are.
        drawn = {moment.fault for moment in self.episode.moments}
        unheard = job.standby or job.watch.forgotten or (1 in job.sizes and drawn & {"node_cut_off", "members_cut_off"})
        assert unheard or all({*range(*window)} <= batches for window in left_out), (
            f"{left_out} is left out, {known} was told"
        )
        assert self.episode.total in job.disk, "the last state is not on disk"
        if not _hurt(last.state):
            expected = samples(self.episode.total, job.node.ranks.course.windows if job.node and job.node.ranks else ())
            assert job.last_state == last.state, "the last state is not the one on disk"
            assert left_out or last.state == expected, "samples are missing"
        assert min(last.state) > 0, "the final state has been computed from replicas that were apart"
        still = [incident.id for incident in job.watch.incidents.values() if incident.open]
        assert not still, f"incidents {still} are open though the job is over"


def _hurt(state: Iterable[int]) -> bool:
    return any(sample > 1_000_000 for sample in state)


def shrunk(episode: Episode, invariant: int) -> Episode:
    """The episode with as few of its faults as violate the same invariant."""

    def violates(moments: tuple[Moment, ...]) -> bool:
        outcome = play(replace(episode, moments=moments))
        return bool(outcome.violated) and outcome.invariant == invariant

    return replace(episode, moments=fewest(episode.moments, violates))
