"""The agent of a simulated node, one life of it: the hands of the loop, with values for processes and memory.

    ranks step → pages → NodeStatus → store → Controller → generation record → step → this node

`register`, `Round` and `step` with all that they play with, the fence, pages, exits and statuses are the real ones.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np
from msgspec import structs

from mt_resilient.agent.join.registration import described, register
from mt_resilient.agent.launch.torchrun import Launch
from mt_resilient.agent.loop import next_action
from mt_resilient.agent.loop.next_action import Action, Begun, LocalState, Patience, duty
from mt_resilient.agent.loop.round import Round
from mt_resilient.agent.loop.store_outage import Outage
from mt_resilient.agent.monitor.hang_monitor import Lookout
from mt_resilient.agent.peers.fencing import Fence
from mt_resilient.agent.peers.lease import Heartbeat
from mt_resilient.agent.ranks import status_report
from mt_resilient.agent.ranks.worker_group import WorkerGroup
from mt_resilient.agent.run_directory import RunDirectory
from mt_resilient.agent.snapshots.fingerprint_source import Sight, layout_of
from mt_resilient.agent.snapshots.replica_check import Replicas
from mt_resilient.checkpoint.arena.slot_header import MARKS, Stamp
from mt_resilient.checkpoint.format.replica_agreement import Words
from mt_resilient.checkpoint.format.sharding import Part
from mt_resilient.checkpoint.format.tensor_table import plan
from mt_resilient.resilience.detect.hang_rules import HangPolicy
from mt_resilient.resilience.errors import MachineError, StoreUnavailable, UsageError
from mt_resilient.resilience.ipc.board_events import PAGE_BYTES
from mt_resilient.resilience.ipc.board_layout import Page
from mt_resilient.resilience.model.generation import GenerationRecord
from mt_resilient.resilience.model.node import Ack, AckKind, Death, NodeRecord, NodeStatus
from mt_resilient.resilience.model.request import Request
from mt_resilient.resilience.model.signals import InPlaceRewind
from mt_resilient.resilience.model.types import Doing, Generation, NodeId, Order, OrderedBy, RankPhase, Step
from mt_resilient.resilience.plan.resume_point import StabilityPolicy
from mt_resilient.resilience.store.codec import dumps
from mt_resilient.resilience.store.keys import Keys
from mt_resilient.resilience.store.protocol import LeaseGone
from mt_resilient.resilience.store.seat import Seat

from .eyes import Eyes
from .kept import Kept
from .lending import Lending
from .processes import ns
from .ranks import Ranks

if TYPE_CHECKING:
    from .cluster import Job

KEYS = Keys("job")
WEIGHT = Part(name="model/w", shape=(2,), offset=(0,), box=(2,))
LEASE_S = 10
SAYS_S = 2.0
"""How often it says how it is, as its status has it: it does so each second."""
PATIENCE = Patience(warm_s=0.0, leave_s=5.0)
AT_ONCE = (Action.FETCH, Action.LET_GO, Action.FINISH_WRITING, Action.GIVE_UP_WRITING)
"""What follows on them is done in the same second."""
HANG = HangPolicy(warmup_steps=2, floor_s=4, start_s=8, teardown_s=6, confirm_s=2, idle_s=2)
DRAIN_S = 2
"""Ticks from a seal to the commit on disk."""
DELIVER_LOOKS = 6
"""How long the node that commits waits for the parts of others."""


class Node:
    """The agent of the node, one life of it: what `Supervisor` and `Node` do, with values for processes and memory."""

    def __init__(self, job: Job, name: NodeId, instance: str) -> None:
        self.job, self.name, self.instance = job, name, instance
        self.says = "the node" if job.alone else name
        self.say, self.faults = job.say, job.faults
        self.disk, self.rejected = job.disk, job.rejected
        self.code: int | None = None
        """What the agent has left with."""
        memory = memoryview(bytearray(job.ranks_each * PAGE_BYTES))
        self.pages = [Page(memory[i * PAGE_BYTES : (i + 1) * PAGE_BYTES]) for i in range(job.ranks_each)]
        self.replicas = Replicas([], StabilityPolicy())
        self.left: list[tuple[int, tuple[int, int]]] = []
        """Steps that the training went back to, and since when it takes another course (`Holdings`)."""
        tables = [
            plan(
                None,
                [("model/w", "float32", (2,)), ("opt/0/state/0.0/exp_avg", "float32", (2,))],
                {
                    "model/w": [structs.replace(WEIGHT, replica=(n,))],
                    "opt/0/state/0.0/exp_avg": [structs.replace(WEIGHT, name="opt/exp_avg/model/w", replica=(n,))],
                },
            )
            for n in range(job.ranks_each)
        ]
        self.layouts = tuple(layout_of(table.to_json()) for table in tables)
        self.arena: dict[int, Kept] = {}
        self.lending = Lending(self)
        self.ranks: Ranks | None = None
        """Those of all nodes of the generation,"""
        self.group: WorkerGroup | None = None
        """and this node's processes of them."""
        self.seat = (0, 1)
        """Node rank and number of nodes, of the ranks that were started last."""
        self.acked: tuple[int, AckKind | None] = (0, None)
        self.begun = Begun()
        self.seen: frozenset[Stamp] = frozenset()
        """What it told last to be on disk."""
        self.dead = ""
        """The agent of the next node, which has died while its host lives: until etcd knows."""
        self.until_ns = 0
        """The ranks cross no boundary after this time."""
        self.settled = 0
        """Generation that the memory was cleared up for."""
        self.held_until_s = 0.0
        """Between reading the record and obeying it."""
        self.asked: Request | None = None
        self.snapshot_asked = ""
        self.told: tuple[InPlaceRewind, ...] = ()
        self.lookout = Lookout(HANG, Eyes(self), observe=job.judged_by.observe)
        registration = NodeRecord(
            instance=instance,
            host=name,
            pid=4,
            ranks=job.ranks_each,
            address=name,
            home=f"{name}, boot {job.boots[name]}",
            copies_port=4,
        )
        launch = Launch(program=("torchrun",), python="python", options=(), ranks=job.ranks_each, script=("train.py",))
        self.store: Any = job.client(instance, name)
        first = max((stamp.generation for _, stamp in job.stamps.values()), default=0) + 1
        spec = replace(described(launch, job.sizes, job.spares), run="0" * 8, first_generation=Generation(first))
        seat = Seat(self.store, KEYS, name)
        run = RunDirectory(Path("mt-runs/train"))
        spec, over = register(
            seat,
            spec,
            run,
            registration,
            job.waits,
            kept=lambda: max(self.disk, default=-1),
            lease_s=lambda _: job.left_s(name, LEASE_S),
        )
        self.nothing_left = over >= spec.first_generation
        self.heartbeat = Heartbeat(seat, registration, LEASE_S)
        telling: Any = SimpleNamespace(say=lambda words, _: self._says(words))
        self.fencing = None if job.alone else Fence(self.heartbeat, spec, self, self)
        self.loop = Round(
            heartbeat=self.heartbeat,
            controller=job.controller(instance, name),
            outage=Outage(self, telling, None, str, seat, spec, ""),  # type: ignore[arg-type]
            fence=self.fencing,
            over=over,
            say_again=self._say_again,
            publish=self._publish,
            obey=self._obey,
        )

    @property
    def record(self) -> GenerationRecord | None:
        return self.loop.record

    # -- memory and disk ------------------------------------------------------------------------------------------------------

    @property
    def first_rank(self) -> int:
        return self.seat[0] * len(self.pages)

    def stage(self, fresh: Kept, durable: bool) -> None:
        """Keep this state; of older ones only the newest sealed one, the last that are marked, and those that are to be written stay."""
        self.arena.setdefault(len(fresh.state), replace(fresh, seat=self.seat)).durable |= durable
        sealed = max((step for step, kept in self.arena.items() if kept.sealed), default=-1)
        marked = sorted(step for step, kept in self.arena.items() if kept.marked)[-MARKS:]
        for step, kept in list(self.arena.items()):
            if step < sealed and step not in marked and not (kept.durable and not kept.drained):
                del self.arena[step]

    def drain(self, now_s: float, finish: bool = False) -> None:
        """Each node writes its ranks' parts; the first one commits when all are there, and gives up when they do not come."""
        if self.faults.disk_full or self.faults.drain_dead:
            return
        for step, kept in sorted(self.arena.items()):
            if kept.sealed and kept.durable and not kept.drained:
                kept.drained_at_s = kept.drained_at_s or now_s + DRAIN_S
                if finish or now_s >= kept.drained_at_s:
                    parts = self.job.parts.setdefault(kept.stamp, {})
                    parts[kept.seat[0]] = self.instance
                    whole = len(parts) == kept.seat[1]
                    kept.looked += 1
                    kept.drained = kept.seat[0] > 0 or whole or kept.looked > DELIVER_LOOKS
                    if whole and kept.seat[0] == 0:
                        self.disk[step], self.job.attempts[kept.stamp] = kept.state, kept
                        self.job.written[step], self.job.stamps[step] = kept, (frozenset(parts.values()), kept.stamp)
                        self.say(f"step {step} is on disk")

    def compare(self, now_s: float, number: int) -> None:
        """What `Holdings.look` does, with one tensor that all ranks hold alike: its fingerprint is the state itself, but for a bit."""
        self._refuse_the_left()
        sights = [
            Sight(
                stamp=kept.stamp,
                ranks=self._global,
                tables=self.layouts,
                words=self._words(kept),
                everywhere=kept.durable or kept.marked,
            )
            for _, kept in sorted(self.arena.items())
            if kept.sealed and not self.replicas.compared(kept.stamp)
        ]
        self.replicas.judge(sights, self.job.wall_s, number)
        for step in [
            step for step in self.disk if self._ours(step) and not self.replicas.fit(self.job.stamps[step][1])
        ]:
            del self.disk[step]
            self.rejected.add(step)
            self.say(f"the snapshot of step {step} is set aside")

    @property
    def _global(self) -> tuple[int, ...]:
        return tuple(range(self.first_rank, self.first_rank + len(self.pages)))

    def _words(self, kept: Kept) -> tuple[Words, ...]:
        word = crc32(repr(kept.state).encode())
        return tuple(np.array([word ^ (rank + 1 if rank in kept.odd else 0), 0], np.uint64) for rank in self._global)

    def stored(self, step: int, course: tuple[int, ...] = ()) -> Kept | None:
        """What its ranks find of that step on disk."""
        stamp = self.job.listed(self.name).get(step)
        return self.job.attempts[stamp] if stamp and course in ((), stamp[:2]) else None

    def _left_behind(self, stamp: Stamp) -> bool:
        return any(stamp.left(to, life) for to, life in self.left)

    def _ours(self, step: int) -> bool:
        return self.instance in self.job.stamps[step][0]

    # -- observe, publish, obey -------------------------------------------------------------------------------------------------

    def live(self, now_s: float) -> int | None:
        """One round; the exit code when the job is over, or cannot go on here."""
        try:
            return self.round(now_s)
        except (UsageError, MachineError) as error:
            self._says(f"it leaves: {error}")
            self._end_ranks()
            self.heartbeat.end()
            return error.exit_code

    def round(self, now_s: float) -> int | None:
        """One round of the supervisor; the exit code when the job is over."""
        if self.nothing_left:
            self.say(f"the agent{'' if self.job.alone else f' of {self.name}'} finds the job finished")
            return 0
        self.drain(now_s, finish=self.begun.finishing_s > 0)
        self.lending.send(now_s)
        self.lending.fetch(now_s)
        if self.faults.agent_stalls or self.name in self.faults.stalled:
            return None
        if self.fencing:
            self.fencing.look(now_s, self.job.wall_s)
        if self.group:
            self._abandon(status_report.rewinds(self.pages, self.group.generation, self.job.skew_s, len(self.told)))
            self.compare(now_s, self.group.generation)
        self.lookout.look(self.group, self.pages, now_s, self.job.wall_s)
        for _, sentence in self.lookout.words():
            self._says(sentence)
        try:
            if self.held_until_s:
                if now_s < self.held_until_s:
                    return None
                self.held_until_s = 0.0
                assert self.record
                self._obey(self.record)
                return self._left()
            self.loop.begin(now_s)
            if self.dead:
                self.store.put(KEYS.death(self.dead), dumps(Death(at_s=self.job.wall_s)), self.heartbeat.lease)
                self.dead = ""
            if self.asked:
                self.store.put(KEYS.request(f"stop-{self.name}-{self.instance}"), dumps(self.asked))
            self.loop.turn(lambda: self.loop.decide(now_s, self.job.wall_s))
            if self.held_until_s:
                return None
            self.loop.end()
            return self._left()
        except LeaseGone:
            self.heartbeat.lost()
        except StoreUnavailable:
            pass  # ranks go on training; the next round tries again
        return None

    def _says(self, sentence: str) -> None:
        self.say(f"the agent{'' if self.job.alone else f' of {self.name}'}: {sentence}")

    def _say_again(self) -> None:
        self.acked = (0, None)

    def leased(self, until_s: float) -> None:
        """No rank shall cross a boundary after this time."""
        self.until_ns = ns(until_s)
        for page in self.pages:
            page.until_ns = self.until_ns

    def fence(self) -> None:
        """The others may go on without this node."""
        assert self.group
        self.say(f"{self.name} has lost its lease, its ranks stand still, and it ends them")
        self.group.fenced = True
        for process in (*self.group.ranks.values(), self.group.launcher):
            if not process.ended_s:
                process.ended_s, process.code, process.fenced = self.job.wall_s, -9, True
        if self.ranks:
            self.ranks.closed = True

    def _abandon(self, further: list[InPlaceRewind]) -> None:
        """What was written to disk of the steps that the ranks have gone back behind is of another course of the training."""
        self.told = (*self.told, *further)
        for rewind in further:
            to, life = rewind.to, (rewind.generation, rewind.ordinal)
            self.lending.forget(lambda stamp, to=to, life=life: stamp.step > to and stamp[:2] < life)  # type: ignore[misc]
            self.replicas.went_back(rewind.to, rewind.generation, rewind.ordinal)
            self._set_aside(to, life)

    def _set_aside(self, to: int, life: tuple[int, int]) -> None:
        self.left.append((to, life))
        self._refuse_the_left()

    def _refuse_the_left(self) -> None:
        """What is on disk of a course that was left, or has come there since."""
        for step in [*self.disk]:
            if self._left_behind(self.job.stamps[step][1]):
                del self.disk[step]
                self.say(f"the snapshot of step {step} is set aside")

    def _publish(self, record: GenerationRecord) -> None:
        for page in self.pages:
            words = page.farewell()
            if words.get("kind") == "snapshot" and words["path"] and int(words["step"]) in self.disk:
                del self.disk[int(words["step"])]
                self.rejected.add(int(words["step"]))
                self.say(f"the snapshot of step {words['step']} is set aside")
        on_disk = [stamp for _, stamp in sorted(self.job.listed(self.name).items()) if not self._left_behind(stamp)]
        self.seen = frozenset(on_disk)
        group = self.group
        number = group.generation if group else record.number
        in_memory = [k.stamp for _, k in sorted(self.arena.items()) if k.sealed and self.replicas.fit(k.stamp)]
        kept = NodeStatus(
            generation=Generation(number),
            at_s=self.job.wall_s,
            **status_report.snapshots(in_memory, on_disk),
            rejected_steps=tuple(map(Step, sorted(self.rejected))),
            storage=True,
        )
        status = status_report.status(
            kept,
            group,
            self.pages,
            offset_s=self.job.skew_s,
            told=self.told,
            stalls=self.lookout.stalls,
            stuck=bool(self.lookout.teardown),
            snapshot=self.snapshot_asked,
        )
        stamps = {step: kept.stamp for step, kept in self.arena.items()}
        stamps |= {step: self.job.stamps[step][1] for step in self.disk if self._ours(step)}
        status = replace(
            status,
            compared=2,
            agreed_steps=tuple(Step(step) for step, stamp in sorted(stamps.items()) if self.replicas.agreed(stamp)),
            mismatches=self.replicas.mismatches,
            held=self.replicas.held,
            seat=self.seat,
            **self.lending.told(),
        )
        if self.fencing:
            status = self.fencing.pulse(replace(status, often_s=SAYS_S))
        self.store.put(KEYS.status(self.name), dumps(status))

    def _local(self) -> LocalState:
        over = self.group is not None and self.group.launcher.ended_s > 0
        return LocalState(
            instance=self.instance,
            group=self.group.generation if self.group else 0,
            group_over=over,
            attached=self.ranks is not None and all(page.pid for page in self.pages),
            training=self.ranks is not None and all(page.phase == RankPhase.TRAINING for page in self.pages),
            acked=self.acked,
            rewind=self.pages[0].ordered,
            paused=bool(self.pages[0].paused),
            waiting=all(page.doing == Doing.PAUSED for page in self.pages),
            snapshot=self.snapshot_asked,
            written=not any(k.sealed and k.durable and not k.drained for k in self.arena.values()),
            hurry=self.asked is not None,
        )

    def _left(self) -> int | None:
        """The exit code, where the job is over for this agent."""
        record, job = self.record, self.job
        if record is None or duty(record, self._local()) is not Action.LEAVE:
            return None
        self.heartbeat.end()
        keeps = not (job.judged_by.observe or self.faults.unknown)
        unwritten = keeps and record.complete and job.total not in self.disk
        code = MachineError.exit_code if unwritten and not record.exit_code else record.exit_code
        self.say(f"the agent{'' if job.alone else f' of {self.name}'} leaves with exit code {code}")
        return code

    def _obey(self, record: GenerationRecord) -> bool:
        now_s = self.job.now_s
        if self.faults.obeys_late_s:
            self.held_until_s, self.faults.obeys_late_s = now_s + self.faults.obeys_late_s, 0
            return False
        actions: tuple[Action, ...] = AT_ONCE
        while actions and actions[-1] in AT_ONCE:
            begun, actions = next_action.step(record, self._local(), self.begun, now_s, PATIENCE)
            for action in actions:
                self._do(action, record, now_s)
            self.begun = begun
        return bool(actions)

    def _do(self, action: Action, record: GenerationRecord, now_s: float) -> None:
        match action:
            case Action.CLEAR:
                self._clear(now_s, record)
            case Action.SAY_READY:
                self._publish(record)
                self._ack(AckKind.READY, record)
            case Action.FETCH:
                self._settle(record)
                self.lending.ask(record, now_s)
            case Action.LAUNCH:
                self._settle(record)
                if self.ranks and self.ranks.alive:
                    self.job.strays.append(self.ranks)
                    self.ranks.leave(self)
                self.replicas.went_back(record.resume_step)
                self.told, self.snapshot_asked = (), ""
                self.lookout.begin(tells=record.resume_step >= 0)
                self.ranks = self.job.joined(self, record)
                self.say(f"{self.says} starts its ranks")
            case Action.SAY_RUNNING:
                self._ack(AckKind.RUNNING, record)
            case Action.ORDER_REWIND:
                assert record.rewind
                for page in self.pages:
                    page.ordered_to, page.ordered_skip = record.rewind.to, record.rewind.skip
                    page.ordered_by = tuple(OrderedBy).index(record.rewind.cause)
                    page.ordered = record.rewind.number
            case Action.ORDER_PAUSE:
                for page in self.pages:
                    page.paused = int(record.waits)
            case Action.ORDER_SNAPSHOT:
                self.snapshot_asked = record.saves
                for page in self.pages:
                    page.durable_step = -1
                    page.durable += 1
            case Action.ORDER_LEAVE:
                for page in self.pages:
                    page.order = Order.SNAPSHOT_AND_STOP
                self.say(f"{self.says} orders its ranks to take a last snapshot and leave")
            case Action.PASS_SIGNAL:
                self._end_ranks("passes the signal on to")
            case Action.END_GROUP:
                self._clear(now_s, record)
            case Action.LET_GO if record.onset >= 0:
                self.arena = {step: kept for step, kept in self.arena.items() if step < record.onset}
                self._set_aside(record.onset - 1, (record.number + 1, 0))
            case Action.FINISH_WRITING:
                self.drain(now_s, finish=True)
            case Action.GIVE_UP_WRITING:
                for kept in self.arena.values():
                    kept.drained = True
            case Action.SAY_ENDED:
                self._ack(AckKind.ENDED, record)
            case Action.STAND_DOWN:
                self._end_ranks()

    def _settle(self, record: GenerationRecord) -> None:
        """Keep what the ranks of `record` can go back to; once, for what is fetched comes after it."""
        if self.settled == record.number:
            return
        self.settled = record.number
        self.seat = (record.node_rank(self.name), len(record.members))
        for step, kept in list(self.arena.items()):
            later = bool(record.resume_course) and kept.stamp > (*record.resume_course, record.resume_step)
            if step > record.resume_step or later or not kept.sealed or kept.seat != self.seat:
                del self.arena[step]
        self.lending.forget(lambda stamp: stamp.step > record.resume_step and stamp.generation < record.number)
        if record.onset >= 0:
            self._set_aside(record.onset - 1, (record.number, 0))

    def _clear(self, now_s: float, record: GenerationRecord) -> None:
        """End the ranks, and let go of what nobody is to go on from."""
        self._end_ranks()
        since = record.joined.get(self.name, 0)
        for step, kept in list(self.arena.items()):
            if max(kept.stamp.generation, self.lending.fetched.get(kept.stamp, 0)) < since:
                del self.arena[step]
        self.lending.forget(lambda stamp: stamp.generation < since)
        self.compare(now_s, record.number)
        for step in [step for step, kept in self.arena.items() if not self.replicas.fit(kept.stamp)]:
            del self.arena[step]

    def _end_ranks(self, does: str = "ends what is left of") -> None:
        if self.group and not self.group.launcher.ended_s:
            self.say(f"{self.says} {does} {'the' if self.job.alone else 'its'} ranks")
        if self.ranks:
            self.ranks.leave(self)
        self.ranks = self.group = None
        self.lending.abandon()

    def _ack(self, kind: AckKind, record: GenerationRecord) -> None:
        ack = Ack(kind=kind, generation=record.number, instance=self.instance, at_s=self.job.wall_s, port=29500)
        self.store.put(KEYS.ack(record.number, self.name), dumps(ack))
        self.acked = (record.number, kind)
        self.say(f"{self.says} says {kind}")
