"""Watches this node's health: slow ranks, available memory, devices, and what the kernel reports.

ranks' pages ──strides──┐
/proc, cgroups ─reserves─┼──▶ fields of the status, and sentences
drivers, kernel's log ───┘
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping, Sequence

from ...resilience.detect import device_health
from ...resilience.detect.device_health import HOT_LOOKS, DeviceReading
from ...resilience.detect.straggler import StragglerPolicy
from ...resilience.ipc.board_layout import Page
from ...resilience.model.signals import Complaint
from ..ranks.worker_group import WorkerGroup
from . import device_reader
from .device_reader import DeviceReader
from .kernel_log import KernelLog, OutOfMemory
from .memory_monitor import Reserves
from .step_times import Strides


class Vitals:
    def __init__(self, policy: StragglerPolicy, sentences: list[tuple[str, str]]) -> None:
        """sentences: gets sentences for the log, each with its mood."""
        self._sentences = sentences
        self.strides, self.reserves, self.kernel = Strides(policy), Reserves(), KernelLog()
        self.devices = DeviceReader(device_reader.command())
        self._unobserved = ""
        """The sentence that no device can be read, once it was said."""
        self._first: dict[str, DeviceReading] = {}
        self._last: dict[str, deque[DeviceReading]] = {}
        self.complaints: tuple[Complaint, ...] = ()
        """Complaints (faults that a device or its driver reports) since this agent's start, each once."""

    @property
    def introduction(self) -> str:
        """Return a sentence about what cannot be observed on this node; empty: everything can."""
        neither = "the health of devices is not observed (there is no NVIDIA device with pynvml, nor one of Moore Threads with pymtml)"
        missing = [] if self.devices.words else [neither]
        missing += [] if self.kernel.readable else ["the agent cannot read the kernel's log"]
        return "; ".join(missing)

    def look(
        self,
        group: WorkerGroup | None,
        pages: Sequence[Page],
        helpers: Mapping[str, int],
        ended: bool,
        now_s: float,
        wall_s: float,
    ) -> bool:
        """Run all monitors, once in each round of the agent's loop. Return True if a shortage, a straggler or a complaint is new, or one of
        the first two has ended. helpers: further processes whose memory use to read, by name. ended: processes of the worker group have
        just ended. now_s: monotonic."""
        known = len(self.complaints)
        self._hear(group, ended, pages, now_s, wall_s)
        self._look_at_devices(pages, now_s, wall_s)
        ranks = {f"rank {pages[n].rank}": process.pid for n, process in (group.ranks if group else {}).items()}
        news = self.reserves.look({**ranks, "the agent": os.getpid(), **helpers}, now_s, wall_s)
        slow = group is not None and self.strides.look(pages, now_s, wall_s)
        return news or slow or len(self.complaints) > known

    def told(self, group: WorkerGroup | None) -> dict[str, object]:
        """Return the fields that this module adds to the node's status."""
        return {
            "stragglers": self.strides.stragglers if group else (),
            "shortage": self.reserves.shortage,
            "complaints": self.complaints,
        }

    def _hear(self, group: WorkerGroup | None, ended: bool, pages: Sequence[Page], now_s: float, wall_s: float) -> None:
        """Read drivers' complaints from the kernel's log. If ranks have just ended, find out whether the OOM killer killed one of them."""
        lines = self.kernel.news()
        self.kernel.hear(lines, now_s)
        for device, words in device_health.xids(lines):
            self._complain(device, words, pages, wall_s)
        if not ended or group is None:
            return
        for process in group.watched():
            if process.ended_s and process.code in (None, -9) and not process.out_of_memory:
                found = self.kernel.out_of_memory(process.pid)
                process.out_of_memory = found is OutOfMemory.CERTAIN
                process.oom_killer_active = found is OutOfMemory.PERHAPS

    def _look_at_devices(self, pages: Sequence[Page], now_s: float, wall_s: float) -> None:
        for news in self.devices.news(now_s):
            for device, words in news.complaints:
                self._complain(device, words, pages, wall_s)
            if news.readings is None:
                continue
            for device in device_health.silent(self._first, news.readings):
                self._complain(device, "it does not answer", pages, wall_s)
            for reading in news.readings:
                first = self._first.setdefault(reading.device, reading)
                last = self._last.setdefault(reading.device, deque(maxlen=HOT_LOOKS))
                last.append(reading)
                for words in device_health.complaints(first, tuple(last)):
                    self._complain(reading.device, words, pages, wall_s)
        if self.devices.problem and not self._unobserved:
            self._unobserved = f"the health of devices is not observed: {self.devices.problem}"
            self._sentences.append((self._unobserved, "warn"))

    def _complain(self, device: str, words: str, pages: Sequence[Page], wall_s: float) -> None:
        if not any((known.device, known.words) == (device, words) for known in self.complaints):
            step = max((page.step for page in pages), default=-1)
            self.complaints = (*self.complaints, Complaint(device=device, words=words, at_s=wall_s, step=step))
