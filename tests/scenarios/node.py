"""The agent of the simulated node, one life of it: what `Supervisor` and `Node` do, with values for processes and memory.

    ranks step → pages → NodeStatus → store → Controller → generation record → duty → this node

`register`, `duty`, `Controller`, `Election`, `Heartbeat`, pages, exits and statuses are the real ones.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np

from mt_resilient.agent import report
from mt_resilient.agent.duty import Action, LocalState, duty
from mt_resilient.agent.heartbeat import Heartbeat
from mt_resilient.agent.launch import Launch
from mt_resilient.agent.lookout import Lookout
from mt_resilient.agent.registration import described, register
from mt_resilient.agent.replicas import Replicas, Sight, layout_of
from mt_resilient.agent.run_directory import RunDirectory
from mt_resilient.checkpoint.agreement import Words
from mt_resilient.checkpoint.geometry import Part
from mt_resilient.checkpoint.tensors import plan
from mt_resilient.resilience.board import PAGE_BYTES, Page
from mt_resilient.resilience.errors import MachineError, StoreUnavailable
from mt_resilient.resilience.hang import HangPolicy
from mt_resilient.resilience.keys import Keys
from mt_resilient.resilience.machine import Phase
from mt_resilient.resilience.orders import GenerationRecord
from mt_resilient.resilience.signals import (
    Ack,
    AckKind,
    InPlaceRewind,
    NodeId,
    NodeRecord,
    Order,
    OrderedBy,
    RankPhase,
    Request,
    Step,
)
from mt_resilient.resilience.stability import StabilityPolicy
from mt_resilient.resilience.store import LeaseGone
from mt_resilient.resilience.wire import dumps, loads

from .eyes import Eyes
from .kept import Kept
from .ranks import Ranks

if TYPE_CHECKING:
    from .cluster import Job

NODE, KEYS = NodeId("a"), Keys("job")
WEIGHT = Part(name="model/w", shape=(2,), offset=(0,), box=(2,))
LEASE_S = 10
GRACE_S = 5.0
HANG = HangPolicy(warmup_steps=2, floor_s=4, start_s=8, teardown_s=6, confirm_s=2)
DRAIN_S = 2
"""Ticks from a seal to the commit on disk."""


class Node:
    """The agent of the node, one life of it: what `Supervisor` and `Node` do, with values for processes and memory."""

    def __init__(self, job: Job, instance: str) -> None:
        self.job, self.instance = job, instance
        self.say, self.faults, self.policy, self.judged_by = job.say, job.faults, job.policy, job.judged_by
        self.total, self.durable_every, self.stepped = job.total, job.durable_every, job.stepped
        self.disk, self.rejected = job.disk, job.rejected
        memory = memoryview(bytearray(job.ranks_each * PAGE_BYTES))
        self.pages = [Page(memory[i * PAGE_BYTES : (i + 1) * PAGE_BYTES]) for i in range(job.ranks_each)]
        self.replicas = Replicas([], StabilityPolicy())
        tables = [
            plan(None, [("model/w", "float32", (2,))], {"model/w": [replace(WEIGHT, replica=(n,))]})
            for n in range(job.ranks_each)
        ]
        self.layouts = tuple(layout_of(table.to_json()) for table in tables)
        self.arena: dict[int, Kept] = {}
        self.ranks: Ranks | None = None
        self.record: GenerationRecord | None = None
        self.acked: tuple[int, AckKind | None] = (0, None)
        self.leave_ordered_s = 0.0
        self.drain_asked_s = 0.0
        self.held_until_s = 0.0
        """Between reading the record and obeying it."""
        self.asked: Request | None = None
        self.snapshot_asked = ""
        self.told: tuple[InPlaceRewind, ...] = ()
        self.lookout = Lookout(HANG, Eyes(self), observe=self.judged_by.observe)
        registration = NodeRecord(instance=instance, host=NODE, pid=4, ranks=job.ranks_each)
        launch = Launch(program=("torchrun",), python="python", options=(), ranks=job.ranks_each, script=("train.py",))
        self.store: Any = job.client(instance)
        first = max((stamp.generation for _, stamp in job.stamps.values()), default=0) + 1
        spec = described(launch, (1,), 0, "0" * 8, first, job.wall_s)
        _, self.over = register(self.store, KEYS, spec, RunDirectory(Path("mt-runs/train")), NODE, registration)
        self.heartbeat = Heartbeat(self.store, KEYS, NODE, registration, LEASE_S)
        self.controller = job.controller(instance)

    # -- memory and disk ------------------------------------------------------------------------------------------------------

    def stage(self, ranks: Ranks, durable: bool, patient: bool = False) -> frozenset[int]:
        """Keep their state; of older ones only the newest sealed one and those that are still to be written stay. The ranks that could
        not take their copy. patient: they wait for a slot."""
        fresh = ranks.kept()
        missing: frozenset[int] = frozenset()
        if ranks.step not in self.arena and not patient:
            missing = self.faults.miss_at.pop(ranks.step, missing)
        fresh.missing = missing
        self.job.missed += [ranks.step] if missing else []
        self.arena.setdefault(ranks.step, fresh).durable |= durable
        sealed = max((step for step, kept in self.arena.items() if kept.sealed), default=-1)
        for step, kept in list(self.arena.items()):
            if step < sealed and not (kept.durable and not kept.drained):
                del self.arena[step]
        return missing

    def drain(self, now_s: float, finish: bool = False) -> None:
        if self.faults.disk_full or self.faults.drain_dead:
            return
        for step, kept in sorted(self.arena.items()):
            if kept.sealed and kept.durable and not kept.drained:
                kept.drained_at_s = kept.drained_at_s or now_s + DRAIN_S
                if finish or now_s >= kept.drained_at_s:
                    kept.drained = True
                    self.disk[step] = kept.state
                    self.job.written[step], self.job.stamps[step] = kept, (self.instance, kept.stamp)
                    self.say(f"step {step} is on disk")

    def compare(self, now_s: float, number: int) -> None:
        """What `Soundness` does, with one tensor that all ranks hold alike: its fingerprint is the state itself, but for a bit."""
        sights = [
            Sight(
                stamp=kept.stamp,
                ranks=tuple(range(len(self.pages))),
                tables=self.layouts,
                words=self._words(kept),
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

    def _words(self, kept: Kept) -> tuple[Words, ...]:
        word = crc32(repr(kept.state).encode())
        return tuple(
            np.array([word ^ (rank + 1 if rank in kept.odd else 0)], np.uint64) for rank in range(len(self.pages))
        )

    def _ours(self, step: int) -> bool:
        return self.job.stamps[step][0] == self.instance

    # -- observe, publish, obey -------------------------------------------------------------------------------------------------

    def round(self, now_s: float) -> int | None:
        """One round of the supervisor; the exit code when the job is over."""
        if self.ranks:
            self.ranks.advance(now_s)
            self.job.last_state = self.ranks.state
        self.drain(now_s)
        if self.faults.agent_stalls:
            return None
        if self.ranks:
            self._abandon(report.rewinds(self.pages, self.ranks.gang.generation, self.job.skew_s, len(self.told)))
            self.compare(now_s, self.ranks.gang.generation)
        self.lookout.look(self.ranks.gang if self.ranks else None, self.pages, now_s, self.job.wall_s)
        for _, sentence in self.lookout.words():
            self.say(f"the agent: {sentence}")
        try:
            if self.held_until_s:
                if now_s < self.held_until_s:
                    return None
                self.held_until_s = 0.0
                return self._obey(now_s)
            self.heartbeat.beat(now_s)
            if self.asked:
                self.store.put(KEYS.request("stop-a"), dumps(self.asked))
            if self.record is not None:
                self._publish(now_s)
            self.controller.tick(self.heartbeat.lease, self.job.wall_s)
            entry = self.store.get(KEYS.generation)
            self.record = loads(GenerationRecord, entry.value) if entry else None
            if self.record and self.record.phase is Phase.ENDED and self.record.number <= self.over:
                self.record = None
            if self.faults.obeys_late_s:
                self.held_until_s, self.faults.obeys_late_s = now_s + self.faults.obeys_late_s, 0
                return None
            return self._obey(now_s)
        except LeaseGone:
            self.heartbeat.lost()
        except StoreUnavailable:
            pass  # ranks go on training; the next round tries again
        return None

    def _abandon(self, further: list[InPlaceRewind]) -> None:
        """What was written to disk of the steps that the ranks have gone back behind is of another course of the training."""
        self.told = (*self.told, *further)
        for rewind in further:
            self.replicas.went_back(rewind.to, rewind.generation, rewind.ordinal)
            for step in [step for step in self.disk if step > rewind.to]:
                if self.job.stamps[step][1][:2] < (rewind.generation, rewind.ordinal):
                    self.disk.pop(step)
                    self.say(f"the snapshot of step {step} is set aside")

    def _publish(self, now_s: float) -> None:
        for page in self.pages:
            words = page.farewell()
            if words.get("kind") == "snapshot" and words["path"] and int(words["step"]) in self.disk:
                del self.disk[int(words["step"])]
                self.rejected.add(int(words["step"]))
                self.say(f"the snapshot of step {words['step']} is set aside")
        gang = self.ranks.gang if self.ranks else None
        number = gang.generation if gang else self.record.number if self.record else 0
        status = report.status(
            gang=gang,
            pages=self.pages,
            generation=number,
            now=self.job.wall_s,
            offset_s=self.job.skew_s,
            memory_steps=[s for s, kept in sorted(self.arena.items()) if kept.sealed and self.replicas.fit(kept.stamp)],
            durable_steps=sorted(self.disk),
            rejected_steps=sorted(self.rejected),
            storage=True,
            told=self.told,
            stalls=self.lookout.stalls,
            stuck=bool(self.lookout.teardown),
            snapshot=self.snapshot_asked,
        )
        stamps = {step: kept.stamp for step, kept in self.arena.items()}
        stamps |= {step: self.job.stamps[step][1] for step in self.disk if self._ours(step)}
        status = replace(
            status,
            agreed_steps=tuple(Step(step) for step, stamp in sorted(stamps.items()) if self.replicas.agreed(stamp)),
            mismatches=self.replicas.mismatches,
        )
        self.store.put(KEYS.status(NODE), dumps(status))

    def _obey(self, now_s: float) -> int | None:
        record, over = self.record, self.ranks is not None and self.ranks.gang.launcher.ended_s > 0
        me = LocalState(
            instance=self.instance,
            gang=self.ranks.gang.generation if self.ranks else 0,
            gang_over=over,
            attached=self.ranks is not None and all(page.pid for page in self.pages),
            training=self.ranks is not None and all(page.phase == RankPhase.TRAINING for page in self.pages),
            acked=self.acked,
            rewind=self.pages[0].ordered,
            paused=bool(self.pages[0].paused),
            snapshot=self.snapshot_asked,
            leave_ordered=self.leave_ordered_s > 0,
            grace_over=self.leave_ordered_s > 0 and now_s - self.leave_ordered_s > GRACE_S,
        )
        action = duty(record, me)
        if record is None or action is Action.WAIT:
            return None
        match action:
            case Action.CLEAR:
                self._clear(now_s, record.number)
                self._publish(now_s)
                self._ack(AckKind.READY, now_s)
            case Action.LAUNCH:
                for step, kept in list(self.arena.items()):
                    if step > record.resume_step or not kept.sealed:
                        del self.arena[step]
                if self.ranks and self.ranks.alive:
                    self.job.strays.append(self.ranks)
                self.replicas.went_back(record.resume_step)
                self.told, self.snapshot_asked = (), ""
                self.lookout.begin(tells=record.resume_step >= 0)
                self.ranks = Ranks(self, record, now_s)
                self.say("the node starts its ranks")
            case Action.SAY_RUNNING:
                self._ack(AckKind.RUNNING, now_s)
            case Action.ORDER_REWIND:
                assert record.rewind
                for page in self.pages:
                    page.ordered_to, page.ordered_skip = record.rewind.to, record.rewind.skip
                    page.ordered_by = tuple(OrderedBy).index(record.rewind.cause)
                    page.ordered = record.rewind.number
            case Action.ORDER_PAUSE:
                for page in self.pages:
                    page.paused = int(record.paused)
            case Action.ORDER_SNAPSHOT:
                self.snapshot_asked = record.snapshot
                for page in self.pages:
                    page.durable_step = -1
                    page.durable += 1
            case Action.ORDER_LEAVE:
                for page in self.pages:
                    page.order = Order.SNAPSHOT_AND_STOP
                self.leave_ordered_s = now_s
                self.say("the node orders its ranks to take a last snapshot and leave")
            case Action.END_GANG:
                self._clear(now_s, record.number)
                self.drain(now_s, finish=True)
                self.drain_asked_s = self.drain_asked_s or now_s
                hurry = (self.asked is not None or record.exit_code != 0) and now_s - self.drain_asked_s > GRACE_S
                if hurry or not any(k.sealed and k.durable and not k.drained for k in self.arena.values()):
                    self._ack(AckKind.ENDED, now_s)
            case Action.STAND_DOWN:
                self._end_ranks()
            case Action.LEAVE:
                self.heartbeat.end()
                unwritten = record.complete and self.total not in self.disk and not self.judged_by.observe
                code = MachineError.exit_code if unwritten and not record.exit_code else record.exit_code
                self.say(f"the agent leaves with exit code {code}")
                return code
        return None

    def _clear(self, now_s: float, number: int) -> None:
        """End the ranks, and let go of what nobody is to go on from."""
        self._end_ranks()
        self.compare(now_s, number)
        for step in [step for step, kept in self.arena.items() if not self.replicas.fit(kept.stamp)]:
            del self.arena[step]

    def _end_ranks(self) -> None:
        if self.ranks and not self.ranks.gang.launcher.ended_s:
            self.say("the node ends what is left of the ranks")
        self.ranks = None

    def _ack(self, kind: AckKind, now_s: float) -> None:
        assert self.record
        ack = Ack(kind=kind, generation=self.record.number, instance=self.instance, at_s=self.job.wall_s, port=29500)
        self.store.put(KEYS.ack(self.record.number, NODE), dumps(ack))
        self.acked = (self.record.number, kind)
        self.say(f"the node says {kind}")
