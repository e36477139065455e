"""Copy a rank's state from the device to a slot (shared memory for its part of a snapshot), on a separate stream. The loop continues
immediately, and waits only before it would overwrite a tensor whose copy is not complete.

    boundary:  tensors that the forward pass writes are copied first, and the loop's stream waits for this small copy
    thread:    all other tensors: fingerprints on the device and copies; when the copies have arrived, the slot is staged
    optimizer: its first step after the boundary waits, on the device, until nothing reads the state any more (through a hook of torch)
    proof:     fingerprints before and after the copies; if they differ, the script has written the tensor meanwhile

Only the optimizer's wait delays the loop. If a step takes longer than its snapshot, the copies are complete before the optimizer steps. If
a step is shorter, the part whose copies would be too late is first copied within the device (`detour.py`).
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any
from weakref import WeakSet

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...checkpoint.arena.arena import RankArena, Slot, View
from ...checkpoint.arena.fill import arrived, fill
from ...checkpoint.arena.slot_header import Header
from ...checkpoint.arena.staging import flat
from ...checkpoint.format import fingerprint
from ...checkpoint.format.tensor_table import Layout
from ...resilience.clock import monotonic_s
from ...resilience.inprocess.tally import Held
from .. import device
from ..state.tensors.finite_check import finite, sums
from .attempt import Copy, Job
from .detour import Detour
from .pinned_memory import PIECE_BYTES, Worker
from .slot_memory import SlotMemory
from .strided_copy import Strip, Transfer

_STRIP_BYTES = 32 << 20
"""The copying thread queues copies until they exceed this many bytes, and then waits until they have arrived. While a copy to the host is
always queued, an H100 begins no other work: a loop with 97 ms of work took 214 ms while 6.45 GB were copied, and 99 ms if no copy was
queued behind another."""
_LOOK_BYTES = 256 << 20
"""The bytes copied to the device before another stream takes their fingerprints. A device takes fingerprints fifty times as fast as it
receives bytes."""


class Offload:
    def __init__(self, where: torch.device, arena: RankArena) -> None:
        """where: the device of the models. The script may not have made it the current one."""
        kind = where.type
        self._module, self.device = device.module(kind), where
        self._stream, self._reading = device.own_stream(kind, where), device.own_stream(kind, where)
        """Streams for the copies, and for the kernels that read the state meanwhile. On one stream, kernels would delay later copies."""
        self._transfer = Transfer(kind, PIECE_BYTES)
        self._detour = Detour()
        self._before: Job | None = None
        """The last snapshot. `_detour` does not yet know how long the optimizer waited for it."""
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._under_way: list[Job] = []
        self._captures: Callable[[], bool] = getattr(self._module, "is_current_stream_capturing", lambda: False)
        self.stepped: WeakSet[torch.optim.Optimizer] = WeakSet()
        """The optimizers whose steps wait for copies."""
        self.captured: WeakSet[torch.optim.Optimizer] = WeakSet()
        """Those whose step was captured into a graph. No hook runs when the graph is replayed."""
        self._hook = register_optimizer_step_pre_hook(self._before_update)
        self.memory = SlotMemory(where, arena.slots, self.finish)
        self._worker = Worker(self._carry, self._jobs)

    # -- the loop's side ---------------------------------------------------------------------------------------------------

    def room(self, wanted: Header, table_bytes: int, stride: int) -> list[Slot]:
        """Return the slots that can store such a snapshot now, as `SlotMemory.ready` does, except those whose copies run."""
        ready = self.memory.ready(wanted, table_bytes, stride)
        busy = {job.slot for job in self.under_way()}
        return [slot for slot in ready if slot not in busy]

    def start(self, job: Job) -> None:
        """Start to copy `job`, whose slot is claimed. The state is complete at this point of the loop's stream."""
        loop = self._module.current_stream(self.device)
        job.begun, before, after = self._module.Event(), *_timing(self._module)
        job.begun.record(loop)
        try:
            with torch.no_grad():
                job.words += self._look(job, [*job.early, *job.proven])
                if job.early:
                    self._send(job, job.early, paced=False)
        except torch.OutOfMemoryError:
            self._abandon(job)
            return
        if job.words:
            before.record(loop)
            for stream in (self._reading, self._stream) if job.early else (self._reading,):
                self._after(stream, loop)
            after.record(loop)
            job.stops.append((before, after))
        job.early.clear()  # the loop may free these tensors, such as gradients, before the next snapshot
        self._under_way.append(job)
        self._jobs.put(job)

    def under_way(self) -> list[Job]:
        self._under_way = [job for job in self._under_way if not job.over.is_set()]
        return self._under_way

    def finish(self) -> None:
        """Wait until the copies of all jobs have arrived. Any thread may call this."""
        for job in [*self._under_way]:
            job.over.wait()

    def close(self) -> None:
        """End the threads and the hook: the loop has ended."""
        self.memory.close()
        if self._worker.close():
            self._hook.remove()

    def plan(self, layout: Layout) -> list[list[Strip]]:
        """Return the positions of each piece's bytes in a slot's image."""
        return self._transfer.plan(layout)

    def fill(self, slot: Slot, view: View, layout: Layout, into: Mapping[str, torch.Tensor]) -> None:
        """Fill tensors from a slot, as `fill.fill` does. Copy each tensor as soon as its memory is registered, and take fingerprints
        meanwhile."""
        image, plan = view.header.image, self.plan(layout)
        pinned = self.memory.prepare(slot, view.header)
        here = {name: tensor for name, tensor in into.items() if tensor.device != self.device}
        away = [number for number, piece in enumerate(layout.pieces) if piece.name not in here]
        words: list[torch.Tensor] = []
        new: list[torch.Tensor] = []
        new_bytes = 0
        try:
            self._after(self._module.current_stream(self.device), self._stream)
            for number in away:
                content, some = flat(into[layout.pieces[number].name]), plan[number]
                if some:
                    pinned.wait(some[-1].end(image.stride_bytes))
                with self._module.stream(self._stream):
                    self._transfer.copy(content, view.memory, image.stride_bytes, some, self._stream, down=False)
                new.append(content)
                new_bytes += content.numel()
                if number == away[-1] or new_bytes > _LOOK_BYTES:
                    self._after(self._stream, self._reading)
                    with self._module.stream(self._reading):
                        words += [fingerprint.on_device(each) for each in new]
                    new, new_bytes = [], 0
            fill(layout, here, view.chunks(), view.fingerprints)
            with self._module.stream(self._reading):
                found = fingerprint.gather(words).tolist() if words else []
            arrived(layout, dict(zip(away, found, strict=True)), view.fingerprints)
        finally:
            self._stream.synchronize()  # after this, nothing reads the slot

    def _before_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Before the optimizer's step, make the loop's stream wait until nothing reads the state any more."""
        if self._captures():
            self.finish()
            self.captured.add(optimizer)
            return
        self.stepped.add(optimizer)
        for job in self.under_way():
            stream = self._module.current_stream(self.device)
            before, after = _timing(self._module)
            before.record(stream)  # if the device still has work, the wait of this thread costs nothing
            job.issued.wait()
            if job.read is not None:
                stream.wait_event(job.read)
                after.record(stream)
                job.waits.append((before, after))

    # -- the threads -------------------------------------------------------------------------------------------------------

    def _after(self, before: Any, stream: Any) -> None:
        """Make later work on `stream` wait for the present work on `before`."""
        event = self._module.Event()
        event.record(before)
        stream.wait_event(event)

    def _look(self, job: Job, copies: Sequence[tuple[int, Copy]]) -> list[tuple[int, torch.Tensor]]:
        """Take fingerprints on the device that has the state. Return them by index."""
        with self._module.stream(self._reading):
            self._reading.wait_event(job.begun)
            return [(index, fingerprint.on_device(flat(source))) for index, (source, _) in copies]

    def _send(self, job: Job, copies: Sequence[tuple[int, Copy]], *, paced: bool = True) -> None:
        """Copy to the host. paced: copy strip by strip, and wait for each batch of strips to arrive before the next."""
        new_bytes = 0
        with self._module.stream(self._stream):
            self._stream.wait_event(job.begun)
            memory, stride = job.view.memory, job.view.header.image.stride_bytes
            for _, (source, some) in copies:
                job.sources.append(source)
                content = flat(source)
                for strip in some:
                    self._transfer.copy(content, memory, stride, [strip], self._stream, down=True)
                    new_bytes += strip.width * strip.rows
                    if paced and new_bytes > _STRIP_BYTES:
                        arrived, new_bytes = self._module.Event(blocking=True), 0
                        arrived.record(self._stream)
                        arrived.synchronize()

    def _learn(self, job: Job, nbytes: int) -> None:
        """Learn from the last snapshot how much of this one should take the detour."""
        before, self._before, job.nbytes = self._before, job, nbytes
        if before is not None:
            self._detour.waited(before.waited_s(), before.took_s, before.nbytes)

    def _carry(self) -> None:
        self._module.set_device(self.device)
        with suppress(Exception):  # an error must not end this thread: the loop would wait forever
            device.allow_capture(self.device.type)  # copies within the device may allocate memory
        for job in iter(self._jobs.get, None):
            try:
                self._carry_one(job)
            except Exception:  # an error of the device, which the loop gets as well
                traceback.print_exc()
                self._abandon(job)
            finally:
                job.issued.set()
                job.over.set()

    def _abandon(self, job: Job) -> None:
        with suppress(Exception):
            self._stream.synchronize()  # after this, nothing writes to the slot
        for each in (job.early, job.late, job.proven, job.checked, job.sources, job.words):
            each.clear()
        job.slot.free()
        job.held = Held.MISSED
        job.issued.set()
        job.over.set()

    def _carry_one(self, job: Job) -> None:
        late, job.late = job.late, []
        sizes = [source.nbytes for _, (source, _) in late]
        self._learn(job, sum(sizes))
        away = self._detour.divide(sizes, lambda: device.memory(self._module, self.device))
        with torch.no_grad():
            try:
                kept = self._set_aside(job, [copy for copy, far in zip(late, away, strict=True) if far])
            except torch.OutOfMemoryError:  # less is free than the runtime says
                self._detour.refused()
                kept, away = [], [False] * len(late)
            proven = {index for index, _ in job.proven}
            words = self._look(job, [copy for copy in late if copy[0] not in proven])
            with self._module.stream(self._reading):
                found = sums(job.checked)
            direct = [copy for copy, far in zip(late, away, strict=True) if not far]
            self._send(job, direct)
            self._after(self._stream, self._reading)
            again = self._look(job, direct)
            self._after(self._reading, self._stream)
            job.read = self._module.Event()
            job.read.record(self._stream)
            job.issued.set()
            again += self._look(job, kept)
            self._send(job, kept)
            arrived = self._module.Event(blocking=True)
            arrived.record(self._stream)
            arrived.synchronize()
            job.took_s = monotonic_s() - job.begun_s
            for each in (job.sources, job.checked, job.proven):
                each.clear()  # nothing here keeps the model after the training
            job.words += words
            with self._module.stream(self._reading):
                if job.words:
                    job.view.fingerprints[[index for index, _ in job.words]] = fingerprint.gather(
                        [word for _, word in job.words]
                    )
                job.overtaken = fingerprint.differing(again, job.view.fingerprints)
                job.finite = finite(found)
            job.found = {index: int(job.view.fingerprints[index]) for index in job.still}
        job.conclude()

    def _set_aside(self, job: Job, copies: Sequence[tuple[int, Copy]]) -> list[tuple[int, Copy]]:
        """Copy within the device. Raises torch.OutOfMemoryError."""
        with self._module.stream(self._reading):
            self._reading.wait_event(job.begun)
            return [(index, (flat(source).clone(), some)) for index, (source, some) in copies]


def _timing(runtime: Any) -> tuple[Any, Any]:
    """Return two events of which one can tell the time between them."""
    return runtime.Event(enable_timing=True), runtime.Event(enable_timing=True)
