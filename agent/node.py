"""What this node has beyond one generation: board, arena, warm and drain process; and the gang of the present one.

The hands of the supervisor: every method does one thing at once and decides nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import chain
from typing import Any

from ..checkpoint.arena import arena
from ..checkpoint.arena.arena import Slot
from ..checkpoint.arena.slot_header import MARKS, Stamp
from ..checkpoint.backend.place import Place
from ..checkpoint.durable.retention import RetentionPolicy
from ..checkpoint.durable.save_interval import AUTO, SnapshotPolicy
from ..resilience.clock import monotonic_s, wall_s
from ..resilience.detect.hang_rules import HangPolicy
from ..resilience.detect.straggler import StragglerPolicy
from ..resilience.errors import MachineError
from ..resilience.inprocess.tally import RankPolicy
from ..resilience.ipc import die_with_parent
from ..resilience.ipc.handoff import Handoff
from ..resilience.model.data_windows import Window
from ..resilience.model.generation import GenerationRecord, Source
from ..resilience.model.node import NodeStatus
from ..resilience.model.signals import InPlaceRewind
from ..resilience.model.types import RankPhase
from ..resilience.plan.resume_point import StabilityPolicy
from .buddy.buddy_client import Copies
from .launch import python_check
from .launch.torchrun import Launch
from .monitor.hang_monitor import Lookout
from .monitor.node_health import Vitals
from .monitor.stack_sampler import Witness
from .ranks import status_report
from .ranks.board import Board
from .ranks.descriptor_server import Door
from .ranks.orphans import TIDY_S, Orphans, forget_openmp, is_ours
from .ranks.warm_client import WarmProcess
from .ranks.worker_group import Gang, watched
from .run_directory import RunDirectory
from .snapshots.drain_client import Draining
from .snapshots.inventory import Holdings
from .snapshots.save_schedule import Pacing

_NO_SCRIPT = 2
"""Exit code of a Python that does not find its script."""


class Node:
    def __init__(
        self,
        launch: Launch,
        directory: RunDirectory,
        root: Place,
        policy: SnapshotPolicy,
        judged_by: RankPolicy,
        run: str,
        origin: Place | None = None,
        windows: tuple[Window, ...] = (),
        hang: HangPolicy | None = None,
        stability: StabilityPolicy | None = None,
        stragglers: StragglerPolicy | None = None,
        copies: Copies | None = None,
    ) -> None:
        """root: place that holds `snapshots/`; run: eight hex digits that name this life of the job; origin: snapshot of another job to
        start from; windows: of data, to be left out; copies: where there are other nodes to hold them."""
        self.launch, self.directory, self.root, self.policy = launch, directory, root, policy
        self.judged_by, self.origin, self.windows, self.run = judged_by, origin, windows, run
        self.board = Board(launch.ranks)
        self.copies = copies
        self.arena = arena.create(launch.ranks, policy.slots + (MARKS if copies else 0))
        self.paths = arena.paths(self.arena, os.getpid())
        self.gang: Gang | None = None
        self._orphans = Orphans()
        self._in_order = False
        """The last gang has ended by itself, and well."""
        self._ran: tuple[int, ...] = ()
        """Its node rank, and number of nodes."""
        self.held = Holdings(
            [[Slot(path) for path in row] for row in self.paths], root, run, stability or StabilityPolicy(), copies
        )
        self.told: tuple[InPlaceRewind, ...] = ()
        self.sentences: list[str] = []
        """Of what is wrong here, for people; whoever tells them takes them out."""
        self.witness = Witness(launch.ranks, directory.logs)
        self._door = Door([self.board.path, *chain(*self.paths), *self.witness.paths])
        self.lookout = Lookout(hang or HangPolicy(), self.witness, observe=judged_by.observe)
        self.snapshot_asked = ""
        """The last request for a snapshot on disk that the ranks were told of."""
        self._save_s = 0.0
        """What the last snapshot on disk took."""
        self.vitals = Vitals(stragglers or StragglerPolicy())
        self.warm = WarmProcess(
            launch.rank_command,
            lambda: launch.shared_environment(os.environ),
            directory.modules,
            directory.logs / "warm.log",
            launch.warm_refused,
        )
        config = {
            "arena": self.paths,
            "root": root.address,
            "run": run,
            "local_ranks": launch.ranks,
            "max_write_mb_per_s": policy.max_write_mb_per_s,
            **{field.name: getattr(policy, field.name) for field in fields(RetentionPolicy)},
        }
        self.pacing = Pacing(launch.ranks, monotonic_s()) if policy.durable_every_steps == AUTO else None
        if copies:
            config["buddy"] = copies.config
        self.drain = Draining(config, directory.logs / "drain.log", copies.environment if copies else {})

    # -- processes --------------------------------------------------------------------------------------------------------

    def start_gang(self, record: GenerationRecord, node_rank: int) -> None:
        """Start the ranks of `record` on what `resume_step` says; forked if the warm process is ready, cold otherwise."""
        self.held.settle(record, node_rank)
        # Until the next start: newer ones may turn out bad, or never come.
        self.drain.protect([name for step, name in self.held.shelf.seen.durable if step == record.resume_step])
        if self.pacing and self.board.orders.generation:
            self.pacing.failures += 1
        ranks = node_rank, len(record.members)
        same = record.onset < 0 and record.begins is None and ranks == self._ran
        reached = status_report.reached(self.board.pages, record.resume_step) if same else ()
        self._ran = ranks
        self.board.clear(record.number)
        self._door.pids.clear()
        self.told, self.snapshot_asked = (), ""
        self.board.pause(record.waits)  # before any of them looks
        self.board.fetching(self.fetching)
        self.lookout.begin(tells=record.resume_step >= 0)
        self.vitals.strides.begin()
        handoff = Handoff(
            generation=record.number,
            board=self.board.path,
            arena=tuple(tuple(row) for row in self.paths),
            snapshots=self.root.address,
            resume_step=record.resume_step,
            replay_until=record.replay_until,
            reached=reached,
            origin=self.origin.address if self.origin else "",
            every_steps=self.policy.every_steps,
            durable_every_steps=self.policy.durable_every_steps,
            reach_steps=self.policy.reach_steps,
            policy=self.judged_by,
            turns=record.turns,
            rewind=record.begins,
            windows=self.windows,
            modules=str(self.directory.modules),
            copies=self.copies is not None and len(record.members) > 1,
            stacks=self.witness.paths,
        )
        arguments = self.launch.arguments(
            nodes=len(record.members),
            node_rank=node_rank,
            master_addr=record.master_addr,
            master_port=record.master_port,
            run=self.run,
        )
        environment = self.launch.environment(os.environ) | handoff.to_environment() | self._door.environment
        why = self.warm.why
        if self.warm.ready:
            try:
                pid, how = self.warm.launch(self.launch.program, arguments, environment, self.launch.ranks)
                self.gang = Gang(record.number, watched(pid), how)
                return
            except MachineError as error:
                why = str(error)
                self._orphans.end(self._helpers())  # it may have forked all the same, and answered too late
        try:
            process = die_with_parent.spawn([*self.launch.program, *arguments], env=environment, start_new_session=True)
            process.returncode = 0  # the gang reaps it: without this, Popen would look for it again
            self.gang = Gang(record.number, watched(process.pid), f"cold: {why}")
        except OSError:
            self._orphans.end(self._helpers())  # nobody watches it: the next round starts another one
            raise

    def fetch(self, record: GenerationRecord, node_rank: int, source: Source, address: str) -> None:
        """Get this node's part of the state that `record` begins with from `source`, whose copies are to be had at `address`; empty:
        nowhere. Its ranks may start and build meanwhile."""
        assert self.copies
        stamp = Stamp(source.generation, source.rewinds, record.resume_step)
        if not address:
            self.copies.unfetched.append(stamp)
            return
        self.held.settle(record, node_rank)
        self.held.fetches(stamp, record.number)
        self.copies.fetching = stamp
        self.drain.fetch(address, *stamp, node_rank * self.launch.ranks)

    @property
    def fetching(self) -> bool:
        """Whether that part is on its way."""
        return self.copies is not None and self.copies.fetching is not None

    def fence(self) -> None:
        """End the gang, for another generation may have begun without this node; its status will say so."""
        self._read()
        if self.gang is not None:
            self.gang.fence()
            self._orphans.end(self._helpers())

    def stop_gang(self, *, last: bool = False) -> None:
        """End every process of the gang, to the last, and what is fetched for it: nothing comes into memory behind the next choice.
        last: no other gang follows. What a script has left running that has ended in order it has meant to: torchrun lets it be, too."""
        self._read()
        if self.gang is not None:
            self._in_order = last and self.gang.launcher.code == 0
            self.gang.kill()
            if not self._in_order:
                self._orphans.end(self._helpers())
            self._read()  # what they had done until then
            forget_openmp([process.pid for process in self.gang.watched() if process.ended_s])
            self.gang = None
        if self.copies and self.fetching:
            self.drain.stop()
            self.copies.fetching = None

    def clear(self, generation: int, since: int = 0, *, last: bool = False) -> None:
        """`stop_gang`, and a look at what the next one may go on from: nothing of generations before `since`, while this node had no part
        in the training."""
        self.stop_gang(last=last)
        if self._in_order and not last:  # the job goes on all the same
            self._in_order = False
            self._orphans.end(self._helpers())
        self.held.clear(generation, self._finished(), since)

    def _helpers(self) -> set[int]:
        return {pid for pid in (*self.warm.pids, self.drain.pid, *self.spared) if pid}

    spared: tuple[int, ...] = ()
    """Further children of the agent that are not the gang's: etcd."""

    def close(self) -> None:
        self.stop_gang()
        if not self._in_order:
            self._orphans.end(self._helpers(), TIDY_S)
        self.warm.stop()
        self.drain.stop()

    # -- observation ------------------------------------------------------------------------------------------------------

    def fds(self) -> list[int]:
        """Readable when something has happened."""
        helpers = [*self.warm.fds, *([] if self.drain.fd is None else [self.drain.fd])]
        return helpers + (self.gang.living_fds() if self.gang else [])

    def observe(self) -> bool:
        """Look at everything; True when the gang has changed."""
        self._read()
        ended = changed = self.gang.observe() if self.gang else False
        if ended:
            self._read()  # their last words
        if ended and self.gang:
            for process in self.gang.ranks.values():
                process.missing = self.launch.missing_script() if process.code == _NO_SCRIPT else ""
        if ended and self.gang and self.gang.launcher.code and self._started_none():
            self.gang.unimportable = python_check.unimportable(self.launch, os.environ)
        self._orphans.reap(self._helpers() | (self.gang.living() if self.gang else set()), monotonic_s())
        if self.gang:
            known = self.told[-1].ordinal if self.told else 0
            further = status_report.rewinds(self.board.pages, self.gang.generation, wall_s() - monotonic_s(), known)
            self.told = (*self.told, *further)
            self.held.went_back(further)
            for sighting in status_report.sightings(self.board.pages, self.gang.generation, 0.0):
                self.held.sound.doubt(sighting.onset)
            changed = ended or bool(further)
        self.lookout.look(self.gang, self.board.pages, monotonic_s(), wall_s())
        helpers = {"the drain process": self.drain.pid or 0}
        changed = self.vitals.look(self.gang, self.board.pages, helpers, ended, monotonic_s(), wall_s()) or changed
        return self.held.look(self._finished(), every=ended) or changed

    def _started_none(self) -> bool:
        """Whether the launcher of a job that this node has alone has come to start none of its Pythons."""
        alone = self.held.seat[1] == 1
        return alone and self.gang is not None and not self.gang.ranks and not self.launch.own_programs

    def _finished(self) -> int:
        return min(page.step for page in self.board.pages)

    def _read(self) -> None:
        """What the ranks say; who says what cannot be is ended."""
        if self.gang is None:
            return
        # Before its loop begins, a process may leave the page to one that it has started.
        trains = (
            local_rank for local_rank in self.gang.ranks if self.board.pages[local_rank].phase > RankPhase.ATTACHED
        )
        wrong = self.board.look({local_rank: self.board.pages[local_rank].pid for local_rank in trains})
        for local_rank, page in enumerate(self.board.pages):
            pid, known = self._door.pids.get((local_rank, page.pid), page.pid), self.gang.ranks.get(local_rank)
            if page.pid and (known is None or known.pid != pid):
                if pid != page.pid or is_ours(pid, self._helpers()):
                    self.gang.adopt(local_rank, pid)
                else:
                    self.board.refuse(local_rank)
                    self.sentences.append(
                        f"local rank {local_rank} says that it is process {page.pid}, but this agent has no such process. It runs unwatched"
                    )
        for local_rank, why in wrong.items():
            does = "does nothing while observing" if self.judged_by.observe else "ends it"
            self.sentences.append(
                f"local rank {local_rank} has written over its page ({why}). The agent {does}, and believes nothing more on that page. "
                "Something in that process writes beyond its own memory, or into a descriptor that is not its own"
            )
            if not self.judged_by.observe:
                self.gang.condemn(local_rank, why)

    def drain_events(self) -> Iterator[dict[str, Any]]:
        self.drain.keep_running(monotonic_s())
        for event in self.drain.events(monotonic_s()):
            if self.copies:
                self.copies.heard(event)
                self.board.fetching(self.fetching)
            if event["event"] == "durable":
                self._save_s = event["seconds"]
                if self.pacing:
                    self.pacing.saved(event["seconds"])
            yield event

    def pace_durable(self) -> None:
        """Ask for a snapshot on disk, if it is time for one."""
        if not self.gang or not self.all_training():
            return
        short = not self.judged_by.observe and self.vitals.reserves.snapshot_due(self._save_s, monotonic_s())
        if short or (self.pacing and self.pacing.due(monotonic_s())):
            self.board.ask_durable()
        if self.copies and self.held.seat[0] == 0 and self.held.seat[1] > 1 and self.copies.due(monotonic_s()):
            self.board.ask_copy()  # by one node, for all

    def status(self, generation: int) -> NodeStatus:
        memory, seen = self.held.memory(), self.held.shelf.seen
        said = status_report.status(
            gang=self.gang,
            pages=self.board.pages,
            generation=generation,
            now=wall_s(),
            offset_s=wall_s() - monotonic_s(),
            memory_steps=[stamp.step for stamp in memory],
            durable_steps=self.held.durable_steps(),
            rejected_steps=seen.rejected,
            storage=seen.there,
            told=self.told,
            stalls=self.lookout.stalls,
            stuck=bool(self.lookout.teardown),
            snapshot=self.snapshot_asked,
        )
        said = replace(said, seat=self.held.seat, observes=self.judged_by.observe)
        if self.copies:
            courses = tuple((stamp.generation, stamp.rewinds) for stamp in memory)
            unfetched = tuple(self.copies.unfetched)
            said = replace(said, courses=courses, copies=self.copies.held(), unfetched=unfetched)
        return replace(said, **self.vitals.told(self.gang), **self.held.sound.told(said))  # type: ignore[arg-type]

    def all_attached(self) -> bool:
        return all(page.pid for page in self.board.pages) or self.launch.own_programs or not self.launch.hooked

    def all_training(self) -> bool:
        return all(page.phase == RankPhase.TRAINING for page in self.board.pages)

    @property
    def untold(self) -> bool:
        """Whether its ranks run, and no loop of theirs tells of its steps: nothing of theirs is in a snapshot."""
        return (
            self.gang is not None and self.all_attached() and not any(p.tells or p.built_ns for p in self.board.pages)
        )

    @property
    def untakable(self) -> bool:
        """Whether the state of its ranks has come to hold something that no snapshot can hold."""
        return any(page.unsaved for page in self.board.pages)

    def ask_snapshot(self, request: str) -> None:
        """One on disk, as soon as the ranks come to a boundary."""
        self.snapshot_asked = request
        self.board.ask_durable()
