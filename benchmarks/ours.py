"""Our snapshots as one of the peers: a rank's `Tape` on an arena (shared memory) that this process owns as an agent does, and the real
drain process.

The tape gets the state in the form of Megatron's mixed precision: bf16 parameters in a module; fp32 copies and both moments in an
optimizer. Sealing needs no exchange between ranks here, because there is only one rank.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from measure import say
from peer import AsyncPeer, Saving
from states import State
from torch import nn

from mt_resilient.agent.snapshots.drain_client import Draining
from mt_resilient.checkpoint.arena import arena
from mt_resilient.checkpoint.backend.filesystem import Files
from mt_resilient.checkpoint.durable import catalog
from mt_resilient.resilience.inprocess.tally import Directive, Held, Judgement, RankPolicy, Wanted
from mt_resilient.resilience.ipc.board_events import PAGE_BYTES
from mt_resilient.resilience.ipc.board_layout import Page
from mt_resilient.resilience.ipc.handoff import Handoff
from mt_resilient.resilience.model.types import Generation, Step
from mt_resilient.training.attach.attach import Attachment
from mt_resilient.training.snapshot.snapshot_pace import Pace
from mt_resilient.training.snapshot.snapshots import Tape
from mt_resilient.training.state.sources import source_of

RUN = "beac4000"
PATIENCE_S = 60.0
"""The most seconds to wait until memory is ready, before the first save."""


class Ours(AsyncPeer):
    package = "mt-resilient"

    def __init__(self, root: Path, slots: int = 3) -> None:
        """root: the directory of snapshots. Only one snapshot is kept."""
        super().__init__("mt-resilient")
        self.root = root
        self.last: dict[str, Any] = {}
        """The drain process's report about the last snapshot."""
        self._slots = arena.create(1, slots)
        self._step = 0
        self._training: tuple[State, Tape, torch.optim.Optimizer] | None = None
        self._restarted: tuple[State, Tape] | None = None
        self._draining = self._drain(root)

    @property
    def version(self) -> str:
        try:
            return metadata.version(self.package)
        except metadata.PackageNotFoundError:
            return "from its sources"

    # -- saving ------------------------------------------------------------------------------------------------------------

    def warm_up(self, state: State) -> None:
        """Save once into each slot. A slot's first snapshot prepares its memory. Before that, the drain process maps the memory and tries
        both writers."""
        for number in range(len(self._slots[0])):
            started = time.perf_counter()
            self.save(state, self.root)
            took_s = time.perf_counter() - started
            say(
                f"  slot {number}: {took_s:.2f} s with its memory made ready; the drain process wrote for {self.last['write_s']} s"
            )

    def save_async(self, state: State, directory: Path) -> Saving:
        """directory: not used, because snapshots are written to `root`."""
        self._record(state, durable=True)
        step = self._step
        return Saving(self._staged, lambda: self._durable(step), self._before_update, self._settle)

    def keep(self, state: State) -> Saving:
        """Take a snapshot in memory only."""
        self._record(state, durable=False)
        return Saving(self._staged, self._staged, self._before_update, self._settle)

    def save(self, state: State, directory: Path) -> None:
        saving = self.save_async(state, directory)
        saving.staged()
        saving.done()

    def drain_to(self, root: Path, state: State) -> None:
        """Write snapshots to this root from now on. On return, one snapshot from each slot has been written there."""
        self.close()
        self.root, self._draining = root, self._drain(root)
        for _ in self._slots[0]:
            self.save(state, root)
        self.settle_down()

    def close(self) -> None:
        self._draining.finish()
        for event in self._events(PATIENCE_S):
            if event["event"] == "finished":
                break

    def _record(self, state: State, durable: bool) -> None:
        self._step += 1
        tape = self._tape(state)
        tape.record(self._step, Wanted.ON_DISK if durable else Wanted.NOWHERE, patience_s=PATIENCE_S)
        if tape.held[0] is Held.MISSED:
            raise RuntimeError("no slot and no memory for a snapshot: use less with --mib")

    def _staged(self) -> None:
        assert self._training is not None
        self._training[1].finish()
        self._settle()

    def _settle(self) -> None:
        """Apply the outcome of the latest snapshots, as a boundary does when all ranks know it."""
        assert self._training is not None
        newest, earlier = self._training[1].held
        judgement = Judgement(directive=Directive.GO_ON, newest=newest, earlier=earlier)
        self._training[1].settle(judgement)

    def _before_update(self) -> None:
        """Call the hook that torch calls before an optimizer's step. There are no gradients, so the step changes nothing."""
        assert self._training is not None
        self._training[2].step()

    def _durable(self, step: int) -> None:
        if self.last.get("step") == step:
            return
        for event in self._events(600.0):
            if event["event"] in ("failed", "died"):
                raise RuntimeError(f"the drain process: {event['reason']}")
            if event["event"] == "durable" and event["step"] == step:
                self.last = event
                return
        raise RuntimeError("the drain process says nothing")

    def settle_down(self) -> None:
        """Wait until the older snapshot is deleted."""
        until_s = time.monotonic() + PATIENCE_S
        while len(catalog.committed(Files(self.root))) > 1 and time.monotonic() < until_s:
            time.sleep(0.01)

    def _drain(self, root: Path) -> Draining:
        root.mkdir(parents=True, exist_ok=True)
        paths = arena.paths(self._slots, os.getpid())
        config = {"arena": paths, "root": str(root), "run": RUN, "local_ranks": 1, "keep": 1}
        draining = Draining(config, root / "drain.log")
        draining.keep_running(time.monotonic())
        return draining

    def _events(self, patience_s: float) -> Iterator[dict[str, Any]]:
        until_s = time.monotonic() + patience_s
        while (left_s := until_s - time.monotonic()) > 0:
            if self._draining.fd is not None:
                select.select([self._draining.fd], [], [], left_s)
            yield from self._draining.events(time.monotonic())

    # -- loading -----------------------------------------------------------------------------------------------------------

    def load(self, state: State, directory: Path) -> None:
        """Load from disk, like a rank that is new on this machine."""
        if self._restarted is None or self._restarted[0] is not state:
            self._restarted = state, self._new_tape(state, arena.create(1, 1))[0]
        self._restarted[1].go_back(self._step)

    def rewind(self, state: State) -> None:
        """Rewind in place, from the arena. state: the state that was saved."""
        self._tape(state).go_back(self._step)

    def rank_anew(self, state: State) -> Callable[[], None]:
        """Return a function that loads the last snapshot into `state`, like a rank that was restarted after another rank's death. The arena
        exists, but its memory is neither mapped nor registered."""
        tape = self._new_tape(state, self._slots)[0]
        return lambda: tape.go_back(self._step)

    # -- the tape ----------------------------------------------------------------------------------------------------------

    def _tape(self, state: State) -> Tape:
        if self._training is None or self._training[0] is not state:
            self._training = state, *self._new_tape(state, self._slots)
        return self._training[1]

    def _new_tape(self, state: State, slots: list[list[int]]) -> tuple[Tape, torch.optim.Optimizer]:
        handoff = Handoff(
            generation=Generation(1), board="", snapshots=str(self.root), resume_step=Step(-1),
            arena=tuple(map(tuple, arena.paths(slots, os.getpid()))), replay_until=Step(-1), every_steps=1,
            durable_every_steps=1, reach_steps=100, policy=RankPolicy(), turns=(), windows=(), modules="", origin="",
        )  # fmt: skip
        page = Page(memoryview(bytearray(PAGE_BYTES)))
        attachment = Attachment(handoff=handoff, page=page, rank=0, local_rank=0, world=1)
        model, optimizer = _model(state), _optimizer(state)
        sources = {"model": model, "optimizer": optimizer}
        return Tape(
            attachment, {name: source_of(name, each) for name, each in sources.items()}, Pace(1)
        ), optimizer.optimizer


def _model(state: State) -> nn.Module:
    model = nn.Module()
    for name, tensor in _named(state, "model."):
        model.register_parameter(name.replace(".", "/"), nn.Parameter(tensor, requires_grad=False))
    return model


def _optimizer(state: State) -> Any:
    """Return an optimizer that is wrapped as Megatron's mixed precision wraps Adam. Its parameters are the fp32 copies."""
    main = {name: nn.Parameter(tensor, requires_grad=False) for name, tensor in _named(state, "optimizer.main.")}
    adam = torch.optim.Adam(main.values())
    for part in ("exp_avg", "exp_avg_sq"):
        for name, tensor in _named(state, f"optimizer.{part}."):
            adam.state[main[name]][part] = tensor
    return SimpleNamespace(optimizer=adam, param_groups=adam.param_groups)


def _named(state: State, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name.removeprefix(prefix), tensor) for name, tensor in state.items() if name.startswith(prefix))
