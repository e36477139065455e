"""Watches memory: how much is left on this machine and in its control groups, and which processes use it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import suppress

import psutil

from ...checkpoint.arena.memory_limits import available_bytes
from ...resilience.detect import memory_pressure
from ...resilience.detect.memory_pressure import SPANS_S, Reading
from ...resilience.model.signals import Shortage

SAMPLE_S = 2.0
SNAPSHOT_S = 30.0
"""Fewest seconds between two snapshots on disk that are requested because memory runs out. The interval is also at least four times the
duration of the last write."""


class Reserves:
    def __init__(self) -> None:
        self.shortage: Shortage | None = None
        """The present shortage, for the status."""
        self._readings: deque[Reading] = deque(maxlen=int(max(SPANS_S) / SAMPLE_S) + 1)
        self._next_s = 0.0
        self._snapshot_s = 0.0

    def look(self, pids: Mapping[str, int], now_s: float, wall_s: float) -> bool:
        """Take a reading, if it is time. Return True if a shortage has begun or ended. pids: processes whose memory use to read, by name.
        now_s: monotonic."""
        if now_s < self._next_s:
            return False
        self._next_s = now_s + SAMPLE_S
        used = {who: size for who, pid in pids.items() if (size := _resident(pid))}
        return self.judge(Reading(now_s, available_bytes(), used), wall_s)

    def judge(self, reading: Reading, wall_s: float) -> bool:
        """Evaluate a reading. Return True if a shortage has begun or ended."""
        self._readings.append(reading)
        readings = tuple(self._readings)
        if self.shortage:
            gone = memory_pressure.over(readings)
            self.shortage = None if gone else self.shortage
            return gone
        self.shortage = memory_pressure.short(readings, wall_s)
        return self.shortage is not None

    def snapshot_due(self, save_s: float, now_s: float) -> bool:
        """Return whether to ask for a snapshot on disk because memory runs out. If a snapshot is due, set the time of the next one. save_s:
        seconds that the last write took."""
        if not self.shortage or now_s < self._snapshot_s:
            return False
        self._snapshot_s = now_s + max(SNAPSHOT_S, 4 * save_s)
        return True


def _resident(pid: int) -> int:
    with suppress(psutil.Error):
        return int(psutil.Process(pid).memory_info().rss)
    return 0
