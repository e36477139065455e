"""The invariants of the design, checked on the whole simulated world after every second of it.

    1  at most one controller's writes are accepted, at most one generation runs
    2  every step was computed from the state of the step before it, all that belongs to it included
    3  no sample is missing or repeated, windows that were left out on purpose aside
    4  what is on disk is whole: every rank's part of one and the same step
    5  ranks go on from sealed snapshots of one step, none newer than the verdict's onset
    6  a fault costs no more than the newest state that there is to go back to
    7  no recovery goes on for ever without progress
    8  training goes on without etcd and without the drain process
    9  members are of a number that is allowed, present and neither dismissed nor shut out; who stays keeps its place (`places`)

Each check is a pure function of the job as it is now and of what was noted before; it gives a sentence where something is wrong. They know
the truth of the simulated world (which bit has flipped, which copy is missing), which the program under test does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from mt_resilient.checkpoint.arena.slot_header import Stamp
from mt_resilient.resilience.membership.rank_assignment import proves
from mt_resilient.resilience.model.cause import Cause
from mt_resilient.resilience.model.data_windows import Window, batch
from mt_resilient.resilience.model.generation import GenerationRecord
from mt_resilient.resilience.model.incident import Incident
from mt_resilient.resilience.model.state_machine import TABLE, Move, Phase
from mt_resilient.resilience.model.types import NodeId, RankPhase
from mt_resilient.resilience.plan.escalation import RESTARTS
from mt_resilient.resilience.store.codec import loads
from mt_resilient.resilience.store.keys import Keys

from . import places
from .etcd import Accepted
from .kept import HURT, Inner, Kept, State
from .lending import lent
from .ranks import Ranks

if TYPE_CHECKING:
    from .cluster import Job
    from .node import Node

_MOVES = {(phase, target) for (phase, _), (move, target) in TABLE.items() if move is not Move.IGNORE}
_NOT_COUNTED = (Cause.SNAPSHOT_UNUSABLE, Cause.SNAPSHOT_UNREADABLE, Cause.FINGERPRINT_MISMATCH)
"""Causes whose restarts have budgets of their own; so have, where the job has trained, starts that end like this:"""
_RANKS_ENDED = (Cause.RANK_KILLED, Cause.RANK_HUNG, Cause.SCRIPT_RAISED)
_ORDERS = ("paused", "rewind", "snapshot", "moving", "moving_s", "moving_after", "dismissed", "leave_in_s")
"""What may change of a record while its generation stays in its phase."""
_UNLAUNCHED = 20
"""More than there are faults in an episode."""
_LAG = 2
"""Steps that the newest sealed snapshot may be behind: it is sealed by the word of the next boundary, and a step is under way."""


class Violated(AssertionError):
    def __init__(self, number: int, sentence: str) -> None:
        super().__init__(f"invariant {number}: {sentence}")
        self.number = number


@dataclass
class Watch:
    """What was noted so far."""

    record: GenerationRecord | None = None
    incidents: dict[str, Incident] = field(default_factory=dict)
    """Of this life of the job, by number, as they were accepted."""
    windows: set[Window] = field(default_factory=set)
    """All that were ever written down as left out."""
    without_progress: int = 0
    unlaunched: int = 0
    """Generations in a row that were opened and not launched."""
    launches: list[int] = field(default_factory=list)
    """Steps that the generations of this life of the job went on from."""
    restored: int = 0
    """How many restores have been looked at."""
    turns: list[int] = field(default_factory=list)
    """Onsets of the last rewinds in place that were about one and the same fault."""
    ranks: Ranks | None = None
    owners: tuple[Node, ...] = ()
    """The nodes that had them."""
    moved: tuple[int, ...] = ()
    newcomers: set[str] = field(default_factory=set)
    """Agents that have a place in this generation, and had none in the one before."""
    newest: int = 0
    """Generation whose ranks did a step last."""
    idle: bool = True
    """Whether the ranks had reason to stand still."""
    forgotten: bool = False
    """Whether etcd has lost its data: then a record need not follow from the one before, nor be judged by all that has happened."""

    def accepted(self, job: Job, write: Accepted, keys: Keys) -> None:
        """A controller's write, or a registration's, as it is made."""
        self._hold(1, _by_its_leader(write))
        for put in write.puts:
            if put.key == keys.generation:
                record = loads(GenerationRecord, put.value)
                if not write.guarded and self.forgotten:  # an etcd that has lost its data is told again
                    self.record = record
                    continue
                if not self.forgotten:
                    self._hold(1, _follows(self.record, record, write))
                if not _within_its_phase(self.record, record):
                    self._hold(1, _cleared(job, record))
                    if not self.forgotten:
                        self._hold(9, places.wrong(job, self.record, record, self._lost(record)))
                        self._hold(6, _newest_there_is(job, self, record))
                        self._hold(7, _within_budget(job, self, record))
                    self._note(record, write)
                    if record.phase is Phase.GATHER:
                        known = {*self.record.members.values()} if self.record else {*record.members.values()}
                        self.newcomers = {*record.members.values()} - known
                self.record = record
            else:
                incident = loads(Incident, put.value)
                if not self.forgotten:
                    self._hold(1, _one_story(self.incidents.get(incident.id), incident))
                self.incidents[incident.id] = incident
                if incident.window:
                    self.windows.add(incident.window)

    def data_lost(self) -> None:
        """What etcd tells from now on is new."""
        self.incidents, self.forgotten = {}, True

    def counted_anew(self, job: Job, record: GenerationRecord) -> None:
        """A generation begins whose number there was before."""
        alive = any(node.group and node.group.generation >= record.number for node in job.nodes.values())
        self._hold(1, f"generation {record.number} begins once more while ranks are at work" if alive else "")
        self.newest = record.number

    def _lost(self, record: GenerationRecord) -> tuple[NodeId, ...]:
        newest = max(self.incidents.values(), key=lambda incident: int(incident.id), default=None)
        told = newest and newest.open and newest.generation == record.number - 1 and newest.cause == Cause.AGENT_LOST
        return newest.nodes if newest and told else ()

    def _note(self, record: GenerationRecord, write: Accepted) -> None:
        if record.reason == "started again":  # with budgets as new
            self.incidents, self.launches, self.without_progress, self.turns = {}, [], 0, []
        if record.phase is Phase.GATHER:
            self.unlaunched += 1
        elif record.phase is Phase.LAUNCH:
            self.unlaunched = 0
            newest = max(self.incidents.values(), key=lambda i: (i.rung in RESTARTS, int(i.id)), default=None)
            ended = newest and (newest.cause in _RANKS_ENDED or newest.pause_s > 0)
            failed = newest and record.trained and not newest.started and ended
            counted = self.launches and newest and newest.cause not in _NOT_COUNTED and not failed
            again = counted and not record.begins and record.resume_step <= self.launches[-1]
            self.without_progress = self.without_progress + 1 if again else self.without_progress * (not counted)
            if newest and newest.unfit:
                self.without_progress = 0
            self.launches.append(record.resume_step)
            known = {
                i.onset for i in self.incidents.values() if i.remedy
            }  # others nobody could tell: their agent was cut off
            self.turns = [onset for onset in self.turns if onset in known]

    def look(self, job: Job) -> None:
        """After a second."""
        for number, check in CHECKS:
            for sentence in check(job, self):
                raise Violated(number, sentence)
        for restored in job.restored[self.restored :]:
            if restored.in_place:
                same = self.turns and abs(self.turns[-1] - restored.before) <= job.judged_by.ladder.same_fault_steps
                self.turns = [*(self.turns if same else []), restored.before]
        self.restored = len(job.restored)
        self.ranks, self.moved, self.idle = _motion(job)
        self.owners = tuple(self.ranks.nodes.values()) if self.ranks else ()

    @staticmethod
    def _hold(number: int, sentence: str) -> None:
        if sentence:
            raise Violated(number, sentence)


def _by_its_leader(write: Accepted) -> str:
    leader = write.leader.value.decode() if write.leader else "nobody"
    return f"a write of {write.by} was accepted while {leader} led" if write.guarded and leader != write.by else ""


def _follows(before: GenerationRecord | None, after: GenerationRecord, write: Accepted) -> str:
    """Whether the record goes on as the table of the state machine has it."""
    stopped = after.phase is Phase.ENDED and not after.members  # before it had begun
    if before is None:
        return "" if after.phase is Phase.GATHER or stopped else f"the first record is in phase {after.phase}"
    told = f"generation {after.number} {after.phase} was written over {before.number} {before.phase}"
    if _within_its_phase(before, after):
        found = ("onset",) if after.phase is Phase.ENDING else ()
        orders = replace(before, **{name: getattr(after, name) for name in (*_ORDERS, *found)})
        return "" if write.guarded and orders == after else told
    if after.number == before.number:
        return "" if write.guarded and (before.phase, after.phase) in _MOVES else told
    begun = after.phase is Phase.GATHER or (stopped and before.phase is Phase.ENDED)
    opened = after.number == before.number + 1 and begun
    return "" if opened and write.guarded and (before.phase is not Phase.ENDING or before.complete) else told


def _within_its_phase(before: GenerationRecord | None, after: GenerationRecord) -> bool:
    """An order of somebody changes nothing else."""
    return before is not None and (before.number, before.phase) == (after.number, after.phase)


def _cleared(job: Job, record: GenerationRecord) -> str:
    """Nothing is launched while a member still has ranks of an older generation."""
    if record.phase is not Phase.LAUNCH:
        return ""
    for node in _members(job, record):
        again = (
            node.group and job.watch.forgotten and node.group.generation == record.number
        )  # told as of an older backup
        if node.group and not again:
            return f"generation {record.number} was launched before the ranks of {node.group.generation} were ended"
    return ""


def _members(job: Job, record: GenerationRecord) -> list[Node]:
    """Those whose agent is there, in the order of node ranks."""
    there = [(job.nodes.get(name), instance) for name, instance in record.members.items()]
    return [node for node, instance in there if node and node.instance == instance]


def _one_story(before: Incident | None, after: Incident) -> str:
    if before is None:
        return ""
    felt = after.cause == Cause.AGENT_LOST  # peers that raised, or hung, were the first sign of it
    if before.at_s != after.at_s or not (felt or before.signature == after.signature):
        return f"incident {after.id} ({after.summary}) was written over another one ({before.summary})"
    return f"incident {after.id} was closed, and is open again" if after.open and not before.open else ""


def _newest_there_is(job: Job, watch: Watch, record: GenerationRecord) -> str:
    nodes = _members(job, record)
    if record.phase is not Phase.LAUNCH or len(nodes) < len(record.members):
        return ""
    if record.begins:
        wrong = f"the job goes on from step {record.resume_step}, and step {record.begins.to} was ordered"
        return wrong * (record.resume_step != record.begins.to)
    failed = [i.step_at_fault for i in watch.incidents.values() if i.cause == Cause.SNAPSHOT_UNREADABLE]
    memory = [
        borrowed
        | {
            kept.stamp: kept
            for kept in node.arena.values()
            if kept.sealed and kept.seat == (rank, len(nodes)) and node.replicas.fit(kept.stamp)
        }
        for rank, (node, borrowed) in enumerate(zip(nodes, lent(nodes), strict=True))
    ]
    # What has come to the disk since all members have looked counts for nothing yet.
    seen = set.intersection(
        *({*job.listed(node.name).values()} & ({*job.listed().values()} if job.alone else node.seen) for node in nodes)
    )
    disk = {stamp: job.attempts[stamp] for stamp in seen if failed.count(stamp.step) < 2}
    bound, chosen = _bound(watch), (*record.resume_course, record.resume_step)
    common = set.intersection(*({*disk, *each} for each in memory))
    known = disk | {stamp: kept for each in memory for stamp, kept in each.items()}
    held = {stamp: known[stamp] for stamp in common if bound < 0 or stamp.step < bound}
    right = {stamp for stamp, kept in held.items() if bound < 0 or _right(kept)}
    if bound >= 0 and chosen in held and right and not _right(known[Stamp._make(chosen)]):
        return f"the job goes on from step {record.resume_step}, whose replicas are apart, though {max(right)} is right"
    compared = {s for s in right if bound < 0 or all(node.replicas.agreed(s) for node in nodes)}
    for node, mine in zip(nodes, memory, strict=True):
        if record.resume_step >= 0 and record.resume_step not in {stamp.step for stamp in (*mine, *job.attempts)}:
            return f"the job goes on from step {record.resume_step}, and {node.name} has no such state of its ranks"
    best = max((stamp.step for stamp in compared or right or held), default=-1)
    return f"the job goes on from step {record.resume_step}, though step {best} is there" * (record.resume_step < best)


def _right(kept: Kept) -> bool:
    return not kept.odd and min(kept.state, default=0) >= 0


def _bound(watch: Watch) -> int:
    """The first step that is known to be wrong, by the faults that have not been answered yet; -1: none is."""
    waiting = (i.onset for i in watch.incidents.values() if i.rung in RESTARTS and i.resume_step is None and i.open)
    return min((onset for onset in waiting if onset >= 0), default=-1)


def _within_budget(job: Job, watch: Watch, record: GenerationRecord) -> str:
    most = job.policy.max_without_progress + 1
    if record.phase is Phase.LAUNCH and watch.without_progress > most and not job.faults.unknown:  # it has no snapshots
        return f"{watch.without_progress} restarts in a row brought no newer snapshot; {most} are allowed"
    if watch.unlaunched > _UNLAUNCHED:
        return f"{watch.unlaunched} generations were opened in a row, and none was launched"
    return ""


def one_generation_runs(job: Job, watch: Watch) -> Iterator[str]:
    for here in _all_ranks(job):
        if here.alive and any(ranks.alive for ranks in job.strays):
            yield f"ranks of generation {job.strays[-1].generation} live beside those of {here.generation}"
        if watch.record and here.generation > watch.record.number:
            yield f"ranks of generation {here.generation} run, and the record is of {watch.record.number}"
    for generation in job.stepped_in:
        if generation < watch.newest:
            yield f"ranks of generation {generation} did a step after those of {watch.newest} had"
        watch.newest = max(watch.newest, generation)
    job.stepped_in.clear()


def _all_ranks(job: Job) -> list[Ranks]:
    """Of all generations that there are any of, the newest first."""
    return sorted({node.ranks for node in job.nodes.values() if node.ranks}, key=lambda ranks: -ranks.generation)


def each_state_follows(job: Job, watch: Watch) -> Iterator[str]:
    for step, state, inner in _states(job):
        if len(state) != step:
            yield f"the state of step {step} has used {len(state)} samples"
        if inner != _inner(state):
            yield f"generator or momentum of step {step} are not those of the steps before it"


def _states(job: Job) -> Iterator[tuple[int, State, Inner]]:
    for ranks in _all_ranks(job):
        yield ranks.step, ranks.state, ranks.inner
    for node in job.nodes.values():
        for step, kept in node.arena.items():
            yield step, kept.state, kept.inner
    for step in job.disk:
        yield step, job.written[step].state, job.written[step].inner


@lru_cache(maxsize=4096)
def _inner(state: State) -> Inner:
    return _inner(state[:-1]).stepped(abs(state[-1])) if state else Inner()


def no_sample_is_lost_or_repeated(job: Job, watch: Watch) -> Iterator[str]:
    for ranks in _all_ranks(job):
        yield from _used(ranks.state, ranks.course.windows)
    for step in job.disk:
        kept = job.written[step]
        yield from _used(kept.state, tuple(Window(*window) for window in kept.course["windows"]))


def _used(state: State, windows: tuple[Window, ...]) -> Iterator[str]:
    used = state if not state or (min(state) > 0 and max(state) < HURT) else tuple(abs(s) % HURT for s in state)
    if used != samples(len(state), windows):
        left_out = " ".join(map(str, windows)) or "nothing"
        yield f"step {len(state)} has used the samples {' '.join(map(str, used))}, where {left_out} is left out"


@lru_cache(maxsize=4096)
def samples(steps: int, windows: tuple[Window, ...]) -> State:
    """Those that an undisturbed run uses which leaves these windows out."""
    return tuple(batch(step, windows) + 1 for step in range(steps))


def what_is_on_disk_is_whole(job: Job, watch: Watch) -> Iterator[str]:
    for step, state in job.disk.items():
        if job.written[step].missing or job.written[step].state != state:
            yield f"the snapshot of step {step} is on disk without rank {sorted(job.written[step].missing)}"
        if len(job.parts[job.written[step].stamp]) < job.written[step].seat[1]:
            yield f"the snapshot of step {step} is on disk without the parts of all nodes"


def ranks_go_on_from_what_is_sealed(job: Job, watch: Watch) -> Iterator[str]:
    for restored in job.restored[watch.restored :]:
        kept, step = restored.kept, restored.step
        if any((it.state, it.inner, it.bits) != (kept.state, kept.inner, kept.bits) for it in restored.others):
            yield f"the ranks of some nodes went on from another state of step {step}"
        if any(not each.sealed or each.missing for each in (kept, *restored.others)):
            yield f"the ranks went on from step {step}, which not all of them hold"
        if len(kept.state) != step:
            yield f"the ranks asked for step {step} and got {len(kept.state)}"
        bound = restored.before if restored.in_place else -1
        if 0 <= bound <= step:
            yield f"the ranks went back to step {step}, and step {bound} is wrong"
    record = watch.record
    if record and record.phase is Phase.LAUNCH and 0 <= _bound(watch) <= record.resume_step:
        yield f"generation {record.number} goes on from step {record.resume_step}, and step {_bound(watch)} is wrong"


def snapshots_keep_up(job: Job, watch: Watch) -> Iterator[str]:
    if job.judged_by.observe:  # then ranks train on in a state that is not finite, and none of it is kept
        return
    for node in job.nodes.values():
        ranks = node.ranks
        if ranks is None or not ranks.alive or ranks.life is not RankPhase.TRAINING:
            continue
        sealed = max((step for step, kept in node.arena.items() if kept.sealed), default=-1)
        missed = sum(step > sealed for step in job.missed)
        if ranks.step - sealed > _LAG + missed and ranks.step > ranks.begun + _LAG + missed:
            yield f"the ranks are at step {ranks.step}, and the newest sealed snapshot is of step {sealed}"


def rewinds_end(job: Job, watch: Watch) -> Iterator[str]:
    ladder = job.judged_by.ladder
    if len(watch.turns) > ladder.max_replays + ladder.max_skips + 1:
        yield f"the ranks went back {len(watch.turns)} times for one fault"


def training_goes_on(job: Job, watch: Watch) -> Iterator[str]:
    """Whoever could do a step a second ago has done one, or has reason not to, whatever is away."""
    ranks, moved, idle = _motion(job)
    if watch.idle or watch.ranks is None or (idle and ranks and ranks.alive):
        return
    if not (job.store.down or job.cut.etcd or job.faults.disk_full or job.faults.drain_dead):
        return
    if (
        job.store.down
        and job.node
        and ranks is not watch.ranks
        and any(node in job.nodes.values() for node in watch.owners)
    ):
        yield "the ranks were ended while etcd was away"
    if ranks is watch.ranks and moved == watch.moved and watch.ranks.alive:
        yield f"training stands still at step {moved[0]}"


def _motion(job: Job) -> tuple[Ranks | None, tuple[int, ...], bool]:
    """The ranks, what changes with each second of theirs, and whether they have reason to stand still."""
    ranks = job.node.ranks if job.node else None
    if ranks is None:
        return None, (), True
    waits = ranks.hung or ranks.paused or bool(ranks.busy_s)
    if not proves(job.sizes, job.spares, len(ranks.record.members)):
        waits = waits or ranks.unleased(job.now_s)
    idle = not ranks.whole or ranks.closed or waits or ranks.life is not RankPhase.TRAINING
    return ranks, (ranks.step, ranks.rewinds, ranks.life), idle


Check = Callable[["Job", Watch], Iterator[str]]
CHECKS: tuple[tuple[int, Check], ...] = (
    (1, one_generation_runs),
    (2, each_state_follows),
    (3, no_sample_is_lost_or_repeated),
    (4, what_is_on_disk_is_whole),
    (5, ranks_go_on_from_what_is_sealed),
    (6, snapshots_keep_up),
    (7, rewinds_end),
    (8, training_goes_on),
)
