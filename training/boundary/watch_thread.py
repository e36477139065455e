"""A thread in the rank that tells the agent what the main thread cannot tell while it waits: whether the device advances, and which
collectives the rank has called.

It follows the device (`device_probe.py`). When the agent asks for stacks, it adds to the answer what torch's flight recorder knows.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress

import torch

from ...resilience.clock import monotonic_ns, sleep
from ...resilience.detect import flight_recorder
from ...resilience.ipc.board_layout import Page
from ...resilience.model.types import Doing, RankPhase
from ..attach import stack_signal
from ..attach.attach import Attachment
from .device_probe import DeviceProbe

_LOOK_S = 0.25
_QUIET_NS = 1_000_000_000
"""Nanoseconds of silence after which the device is followed."""
_SETTLE_S = 0.05
"""Seconds in which faulthandler writes all stacks."""
_DUMPS = "_dump_nccl_trace_json", "_dump_fr_trace_json"
"""torch's functions that return the flight recorder's content: of NCCL, and (from 2.8) of other backends."""


def watch(at: Attachment, kind: str) -> None:
    """Start the thread. Call it on the thread of the loop. kind: the type of the device; empty: the CPU."""
    probe = DeviceProbe(kind, at.page) if kind else None
    if probe or at.world > 1:
        threading.Thread(target=_run, args=(at.page, probe), name="mt-resilient-watch", daemon=True).start()


def _run(page: Page, probe: DeviceProbe | None) -> None:
    if probe is not None and not probe.begin():
        probe = None
    answered, even = 0, False
    while page.phase == RankPhase.TRAINING and page.doing != Doing.LEFT:
        sleep(_LOOK_S)
        even = not even
        if monotonic_ns() - max(page.beat_ns, page.restored_ns) < _QUIET_NS:
            if probe:
                probe.follow()
            continue
        try:
            if probe and even:
                probe.put()
        except RuntimeError:  # an error of the device, which the loop gets as well
            page.device_since_ns, page.device_queued, page.device_called = 0, page.device_reached, page.device_answered
            probe = None
        answered = _answer(stack_signal.answers, answered)


def _answer(file: int, answered: int) -> int:
    """If the agent has asked for stacks, append the flight recorder's content to the answer. Return the size of the file after it."""
    with suppress(OSError):
        written = os.fstat(file).st_size
        if written in (0, answered):
            return written
        sleep(_SETTLE_S)
        if os.fstat(file).st_size == written and (found := flight_recorder.summary(_recorded())):
            os.write(file, f"\n{flight_recorder.line(found)}\n".encode())
        return os.fstat(file).st_size
    return answered


def _recorded() -> list[str]:
    """Return the content of torch's flight recorders, in JSON."""
    found = []
    for name in _DUMPS:
        dump = getattr(getattr(torch._C, "_distributed_c10d", None), name, None)
        with suppress(RuntimeError, TypeError, UnicodeDecodeError):
            found += [dump().decode()] if dump else []
    return found
