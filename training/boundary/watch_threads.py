"""Threads in the rank that tell the agent what the main thread cannot tell while it waits: whether the device advances, and which
collectives the rank has called.

One thread follows the device (`device_probe.py`). When the agent asks for stacks, the other thread adds the content of torch's flight
recorder to them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch

from ...resilience.clock import monotonic_ns, sleep
from ...resilience.detect import flight_recorder
from ...resilience.ipc.board_layout import Page
from ...resilience.model.types import Doing, RankPhase
from .. import device
from ..attach import stack_signal
from ..attach.attach import Attachment
from .device_probe import DeviceProbe

_MARK_S, _LOOK_S = 0.5, 0.2
"""Seconds between two marks in the queue of the device, and between two checks whether the agent has asked."""
_QUIET_NS = 1_000_000_000
"""Nanoseconds of silence after which the threads begin to work."""
_SETTLE_S = 0.05
"""Seconds in which faulthandler writes all stacks."""
_DUMPS = "_dump_nccl_trace_json", "_dump_fr_trace_json"
"""torch's functions that return the flight recorder's content: of NCCL, and (from 2.8) of other backends."""


def watch(at: Attachment, where: torch.device | None) -> None:
    """Start the threads of this module. Call `watch` on the thread of the training loop. where: the device to follow; None: there is
    none."""
    stack_signal.yield_to_script(at.page)
    at.page.main_thread = threading.get_ident()
    if where:
        _start(_follow, at.page, DeviceProbe(where, at.page))
    if at.world > 1:
        _start(_answer, at.page, stack_signal.answers, where)


def unwatch(page: Page, phase: RankPhase) -> None:
    """Call this when the loop has ended: from now on, the agent looks at the main thread. phase: the rank's phase from now on."""
    stack_signal.yield_to_script(page)
    page.main_thread = threading.main_thread().ident or 0
    page.phase = phase


def _start(work: Callable[..., None], *arguments: Any) -> None:
    threading.Thread(target=work, args=arguments, name=f"mt-resilient{work.__name__}", daemon=True).start()


def _silent(page: Page, look_s: float) -> Iterator[bool]:
    """While the loop runs, yield every `look_s` seconds whether the rank has been silent for so long that the agent may ask about it."""
    while page.phase == RankPhase.TRAINING and page.doing != Doing.LEFT:
        sleep(look_s)
        stack_signal.yield_to_script(page)
        yield monotonic_ns() - max(page.beat_ns, page.restored_ns) > _QUIET_NS


def _follow(page: Page, probe: DeviceProbe) -> None:
    """Put marks into the queue of the device. If the queue is full, this waits, and holds up nothing else."""
    if not probe.begin():
        return
    try:
        for silent in _silent(page, _MARK_S):
            probe.put() if silent else probe.follow()
    except (
        RuntimeError
    ):  # an error of the device, which the loop gets as well; or the device cannot be followed any longer
        page.device_since_ns = 0


def _answer(page: Page, file: int, where: torch.device | None) -> None:
    """Each time the agent has asked for stacks, append the flight recorder's content to the answer. file: the answer's file descriptor.
    where: the device whose events the recorder queries."""
    if where:
        device.module(where.type).set_device(where)
        device.allow_capture(where.type)
    answered = 0
    for silent in _silent(page, _LOOK_S):
        with suppress(OSError):
            written = os.fstat(file).st_size if silent else 0
            if written in (0, answered):
                continue
            sleep(_SETTLE_S)
            if os.fstat(file).st_size == written:
                if found := flight_recorder.summary(_recorded()):
                    os.write(file, f"\n{flight_recorder.line(found)}\n".encode())
                answered = os.fstat(file).st_size


def _recorded() -> list[str]:
    """Return the content of torch's flight recorders, in JSON."""
    found = []
    for name in _DUMPS:
        dump = getattr(getattr(torch._C, "_distributed_c10d", None), name, None)
        with suppress(RuntimeError, TypeError, UnicodeDecodeError):
            found += [dump().decode()] if dump else []
    return found
