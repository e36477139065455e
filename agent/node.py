"""This node's objects that outlive a generation (ranks' pages, snapshot memory, warm and drain process), and the present worker group.

The supervisor acts through this class. Each method of `Node` carries out one action immediately, and makes no decisions.
"""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import chain

from ..checkpoint.arena import arena
from ..checkpoint.arena.arena import Slot
from ..checkpoint.arena.slot_header import MARKS, Stamp
from ..checkpoint.backend.place import Place
from ..resilience.clock import monotonic_s, wall_s
from ..resilience.ipc.handoff import Handoff
from ..resilience.model.data_windows import Window
from ..resilience.model.generation import GenerationRecord, Source
from ..resilience.model.node import NodeStatus
from ..resilience.model.signals import InPlaceRewind
from ..resilience.model.types import Generation
from .buddy.buddy_client import Copies
from .launch import python_check
from .launch.torchrun import Launch
from .monitor.hang_monitor import Lookout
from .monitor.node_health import Vitals
from .monitor.stack_sampler import Witness
from .policies import NodePolicies
from .ranks import status_report
from .ranks.after_death import AfterDeath
from .ranks.board import Board, read
from .ranks.descriptor_server import Door
from .ranks.orphans import TIDY_S, Orphans, forget_openmp
from .ranks.rank_output import RankOutput
from .ranks.warm_client import WarmProcess, started
from .ranks.worker_group import WorkerGroup
from .run_directory import RunDirectory
from .snapshots.drain_client import Draining, drain_config
from .snapshots.inventory import Holdings
from .snapshots.saving import Saving

_NO_SCRIPT = 2
"""The exit code of Python if it does not find its script."""


class Node:
    def __init__(
        self,
        launch: Launch,
        directory: RunDirectory,
        root: Place,
        policies: NodePolicies,
        run: str,
        origin: Place | None = None,
        windows: tuple[Window, ...] = (),
        copies: Copies | None = None,
    ) -> None:
        """root: place that holds `snapshots/`. run: eight hexadecimal digits that identify this run of the job. origin: snapshot of another
        job to start from. windows: data to skip. copies: None if no other node can hold copies."""
        self.launch, self.directory, self.root, self.policies = launch, directory, root, policies
        self.origin, self.windows, self.run = origin, windows, run
        kept = policies.snapshots
        self.board = Board(launch.ranks)
        self.copies = copies
        self.arena = arena.create(launch.ranks, kept.slots + (MARKS if copies else 0))
        self.paths = arena.paths(self.arena, os.getpid())
        self.group: WorkerGroup | None = None
        self.spared: set[int] = set()
        """Process ids of further children of the agent that are not in the worker group: etcd, and the command of a hook."""
        self.orphans = Orphans()
        self._in_order = False
        """True: the last worker group exited normally."""
        self._ran: tuple[int, ...] = ()
        """Node rank and number of nodes of the last worker group."""
        slots = [[Slot(path) for path in row] for row in self.paths]
        self.held = Holdings(slots, root, run, policies.stability, copies, policies.window_h)
        self.told: tuple[InPlaceRewind, ...] = ()
        self.sentences: list[tuple[str, str]] = []
        """Sentences for the log about faults on this node, each with its mood. The caller that reports a sentence removes it."""
        self.witness = Witness(launch.ranks, directory.logs)
        self.output = RankOutput(directory.logs, launch.ranks, policies.rank_log_mb)
        self._door = Door([self.board.path, *chain(*self.paths), *self.witness.paths, *self.output.paths])
        self._after_death = AfterDeath(self._door.token)
        self.lookout = Lookout(policies.hang, self.witness, observe=policies.ranks.observe)
        self.vitals = Vitals(policies.stragglers, self.sentences)
        self.warm = WarmProcess(
            launch.rank_command,
            lambda: launch.shared_environment(os.environ) | self._door.environment,
            directory.modules,
            directory.logs / "warm.log",
            launch.warm_refused,
        )
        config = drain_config(self.paths, root, run, kept) | ({"buddy": copies.config} if copies else {})
        self.drain = Draining(config, directory.logs / "drain.log", copies.environment if copies else {})
        self.saving = Saving(self.board, self.drain, copies, kept)

    # -- processes --------------------------------------------------------------------------------------------------------

    def start_group(self, record: GenerationRecord, node_rank: int) -> None:
        """Start this node's ranks for `record`, from its `resume_step`: forked if the warm process is ready, cold otherwise."""
        self.held.settle(record, node_rank)
        self.saving.resumed(record.resume_step, self.held.shelf.seen.durable)
        self.saving.begin()
        ran = node_rank, len(record.members)
        same = record.onset < 0 and record.begins is None and ran == self._ran
        reached = status_report.reached(self.board.pages, record.resume_step) if same else ()
        self._ran, self.told = ran, ()
        self.output.begin(record.number, node_rank)
        self.board.clear(record.number)
        self._door.pids.clear()
        self.board.pause(record.waits)  # before any rank reads its page
        self.board.fetching(self.fetching)
        self.lookout.begin(record.resume_step >= 0, record.warmup_s)
        self.vitals.strides.begin()
        handoff = Handoff(
            generation=record.number,
            board=self.board.path,
            arena=tuple(tuple(row) for row in self.paths),
            snapshots=self.root.address,
            unusable=self.held.unusable(),
            resume_step=record.resume_step,
            resume_course=record.resume_course,
            replay_until=record.replay_until,
            reached=reached,
            origin=self.origin.address if self.origin else "",
            every_steps=self.policies.snapshots.every_steps,
            durable_every_steps=self.policies.snapshots.durable_every_steps,
            reach_steps=self.policies.snapshots.reach_steps,
            policy=self.policies.ranks,
            turns=record.turns,
            rewind=record.begins,
            windows=self.windows,
            modules=str(self.directory.modules),
            copies=self.copies is not None and len(record.members) > 1,
            agents=(*record.members.values(),)[:8],
            outputs=self.output.handed,
            stacks=self.witness.paths,
            variables=self.launch.told_to_ranks(os.environ),
        )
        arguments = self.launch.arguments(
            nodes=ran[1], node_rank=ran[0], master_addr=record.master_addr, master_port=record.master_port, run=self.run
        )
        environment = self.launch.environment(os.environ) | handoff.to_environment() | self._door.environment
        self.group = started(self.launch, self.warm, record.number, arguments, environment, self._end_others)

    def fetch(self, record: GenerationRecord, node_rank: int, source: Source, address: str) -> None:
        """Fetch this node's part of the state at `record.resume_step` from `source`, which serves copies at `address` (empty: nowhere). The
        ranks may start meanwhile."""
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
        """True while this node's part of the state is being fetched."""
        return self.copies is not None and self.copies.fetching is not None

    def fence(self) -> None:
        """End the worker group, because another generation may have begun without this node. The node's status reports this."""
        self._read()
        if self.group is not None:
            self.group.fence()
            self._end_others()

    def stop_group(self, *, last: bool = False) -> None:
        """End every process of the worker group. Also stop the fetch of a snapshot, so that none arrives in memory after the leader's next
        choice. last: no other group follows, so processes that a script left running at its normal end may continue, as with torchrun."""
        self._read()
        if self.group is not None:
            self._in_order = last and self.group.launcher.code == 0
            self.group.kill()
            if not self._in_order:
                self._end_others()
            self._read()  # the last values on their pages
            forget_openmp([process.pid for process in self.group.watched() if process.ended_s])
            self.group = None
        if self.copies and self.fetching:
            self.drain.stop()
            self.copies.fetching = None

    def clear(self, generation: int, since: int = 0, *, last: bool = False) -> None:
        """Call `stop_group`, then check which snapshots the next group may restore. Free snapshots of generations before `since`: they are
        from before this node's last absence, in which the lineage may have changed."""
        self.stop_group(last=last)
        if self._in_order and not last:  # the job continues after all
            self._in_order = False
            self._end_others()
        self.held.clear(generation, self.board.finished_step(), since)

    def _end_others(self) -> None:
        """End every descendant of the agent except its helper processes."""
        self.orphans.end(self._helpers)

    def _helpers(self) -> set[int]:
        found = (*self.warm.pids, self.drain.pid, self.vitals.devices.pid, self._after_death.pid, *self.spared)
        return {pid for pid in found if pid}

    def close(self) -> None:
        self.stop_group()
        if not self._in_order:
            self.orphans.end(self._helpers, TIDY_S)
        self.warm.stop()
        self.drain.stop()
        self._after_death.not_needed()

    # -- observation ------------------------------------------------------------------------------------------------------

    def fds(self) -> list[int]:
        """Return the descriptors that become readable when a helper process or a rank has news."""
        helpers = [*self.warm.fds, *([] if self.drain.fd is None else [self.drain.fd])]
        return helpers + (self.group.living_fds() if self.group else [])

    def observe(self) -> bool:
        """Observe ranks, helpers, memory and devices. Return True if something changed that the leader must know."""
        self._read()
        ended = changed = self.group.observe() if self.group else False
        if ended:
            self._read()  # the last values on their pages
        if ended and self.group:
            self.output.tell(self.group)
            for process in self.group.ranks.values():
                process.missing = self.launch.missing_script() if process.code == _NO_SCRIPT else ""
        if ended and self.group and self.group.launcher.code and self._started_none():
            self.group.unimportable = python_check.unimportable(self.launch, os.environ)
        self.orphans.reap(self._helpers() | (self.group.living() if self.group else set()), monotonic_s())
        if self.group:
            known = self.told[-1].ordinal if self.told else 0
            further = status_report.rewinds(self.board.pages, self.group.generation, self.group.offset_s, known)
            self.told = (*self.told, *further)
            self.held.went_back(further)
            found = status_report.sightings(self.board.pages, self.group.generation, 0.0)
            self.held.sound.doubt(found)
            self.saving.watched(found, self.held.shelf.seen.durable)
            changed = ended or bool(further)
        self.lookout.look(self.group, self.board.pages, monotonic_s(), wall_s())
        helpers = {"the drain process": self.drain.pid or 0}
        changed = self.vitals.look(self.group, self.board.pages, helpers, ended, monotonic_s(), wall_s()) or changed
        return self.held.look(self.board.finished_step(), every=ended) or changed

    def _started_none(self) -> bool:
        """Return whether the launcher has started no rank, in a job of one node."""
        alone = self.held.seat[1] == 1
        return alone and self.group is not None and not self.group.ranks and not self.launch.own_programs

    def _read(self) -> None:
        """Read the ranks' pages, and end ranks that have written impossible values."""
        if self.group is not None:
            found = read(self.board, self._door, self.group, self._helpers(), observe=self.policies.ranks.observe)
            self.sentences += [(sentence, "bad") for sentence in found]

    def pace_saving(self) -> None:
        """Ask the ranks for the snapshots that are due."""
        if self.group and self.board.all_training():
            reserves, observes = self.vitals.reserves, self.policies.ranks.observe
            short = not observes and reserves.snapshot_due(self.saving.took_s, monotonic_s())
            self.saving.pace(self.held.seat, short=short)

    def status(self, generation: int) -> NodeStatus:
        kept = NodeStatus(
            generation=Generation(generation),
            at_s=wall_s(),
            **status_report.snapshots(self.held.memory(), self.held.durable()),
            rejected_steps=self.held.rejected_steps(),
            storage=self.held.shelf.seen.there,
        )
        said = status_report.status(
            kept,
            self.group,
            self.board.pages,
            offset_s=self.group.offset_s if self.group else 0.0,
            told=self.told,
            stalls=self.lookout.stalls,
            stuck=bool(self.lookout.teardown),
            snapshot=self.saving.asked,
        )
        said = replace(said, seat=self.held.seat, observes=self.policies.ranks.observe, warmup_s=self.lookout.warmup_s)
        if self.copies:
            said = replace(said, copies=self.copies.held(), unfetched=tuple(self.copies.unfetched))
        return replace(said, **self.vitals.told(self.group), **self.held.sound.told(said))  # type: ignore[arg-type]

    def all_attached(self) -> bool:
        return all(page.pid for page in self.board.pages) or self.launch.own_programs or not self.launch.hooked

    @property
    def untold(self) -> bool:
        """True if ranks run, but no training loop reports its steps, so no snapshot contains the ranks' state."""
        return (
            self.group is not None and self.all_attached() and not any(p.tells or p.built_ns for p in self.board.pages)
        )
