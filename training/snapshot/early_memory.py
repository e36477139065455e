"""Register the slot that a restarted rank will restore from, while the script still sets up its process groups and its model.

    attachment ──begin──▶ the script opens a device ──thread──▶ the slot is registered ──arena, pinned──▶ Tape, Offload

The script alone chooses its devices, so the thread waits until one has a context. Memory that is registered in one context is registered in
all of them. If no Session takes the memory, the thread releases it.
"""

from __future__ import annotations

import os
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue

import torch

from ...checkpoint.arena.arena import RankArena, Slot
from ...checkpoint.arena.slot_header import Header
from ...resilience.clock import monotonic_s
from .. import device
from ..attach.attach import Attachment
from .pinned_memory import Pinned, Worker

_KINDS = ("cuda", "musa")
_CONTEXT_S = 60.0
"""Seconds that the thread waits for a device's context."""
_LOOK_S = 0.005
"""Seconds between two checks for a context."""
_UNUSED_S = 120.0
"""Seconds after which registered memory that no Session has taken is released."""
_arenas: dict[int, RankArena] = {}
"""The arena that waits for its Tape, by pid: a forked child must not use its parent's."""
_pinned: dict[tuple[str, Slot], Pinned] = {}
"""The memory that waits for its Offload, by the device's type and the slot."""


def begin(at: Attachment) -> None:
    """Register the slot of `at` from which this rank will restore, once the script has opened a device."""
    for kind in _KINDS:
        if call := getattr(getattr(torch, kind, None), "_lazy_call", None):
            call(partial(_start, kind, at))


def arena(at: Attachment) -> RankArena:
    """Return the rank's slots. Only the first Tape of a process gets those that `begin` has opened."""
    return _arenas.pop(os.getpid(), None) or _opened(at)


def pinned(kind: str, slot: Slot) -> Pinned:
    """Return the slot's memory, which may be registered already, or is being registered."""
    return _pinned.pop((kind, slot), None) or Pinned(kind, slot)


def _opened(at: Attachment) -> RankArena:
    return RankArena(at.handoff.arena[at.local_rank], at.handoff.arena[0][0], at.handoff.reach_steps)


def _start(kind: str, at: Attachment) -> None:
    """Start the thread. torch calls this while it opens its first device, and an error here would prevent that."""
    with suppress(Exception):
        if at.page.pid != os.getpid():  # in a child that the script has forked
            return
        slots = _opened(at)
        slot = slots.holding(at.handoff.resume_step)
        wanted = slot.header() if slot else Header()
        if slot is None or (wanted.rank, wanted.world) != (at.rank, at.world):
            slots.close()
            return
        memory, requests = Pinned(kind, slot), SimpleQueue[None]()
        _arenas[os.getpid()], _pinned[kind, slot] = slots, memory

        def _register() -> None:
            _hold(kind, slot, wanted, memory, requests)

        Worker(_register, requests, memory)


def _hold(kind: str, slot: Slot, wanted: Header, memory: Pinned, requests: SimpleQueue[None]) -> None:
    """Register the memory, and release it if no Session takes it. requests: gets None when the process ends."""
    with suppress(Exception):  # the Offload registers what is not registered here
        if (where := _context(kind, requests)) is not None:
            device.module(kind).set_device(where)
            device.allow_capture(kind)
            memory.prepare(wanted, wanted.table_bytes)
            _ends(requests, _UNUSED_S)
    if _pinned.pop((kind, slot), None):
        memory.release()
    if left := _arenas.pop(os.getpid(), None):
        left.close()


def _context(kind: str, requests: SimpleQueue[None]) -> int | None:
    """Wait until this process has opened a device, and return the device's number. Return None if that does not happen or show."""
    contexts, until_s = device.contexts(kind), monotonic_s() + _CONTEXT_S
    while contexts is not None and monotonic_s() < until_s:
        if found := contexts():
            return found[0]
        if _ends(requests, _LOOK_S):
            break
    return None


def _ends(requests: SimpleQueue[None], seconds: float) -> bool:
    """Wait so long. Return at once, and true, if the process ends."""
    try:
        requests.get(timeout=seconds)
    except Empty:
        return False
    return True
