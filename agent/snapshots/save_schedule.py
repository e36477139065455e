"""Decides when to ask for the next snapshot on disk, unless the user has set the interval in steps."""

from __future__ import annotations

from ...checkpoint.durable.save_interval import durable_interval_s

FIRST_S = 60.0
"""Seconds from the start to the first snapshot on disk. Later intervals follow from the write time and the failure rate."""


class Pacing:
    def __init__(self, devices: int, now_s: float) -> None:
        """devices: number of devices that can fail. now_s: monotonic."""
        self._devices = devices
        self._started_s, self._next_s = now_s, now_s + FIRST_S
        self._save_s = 0.0
        self.failures = 0

    def saved(self, took_s: float) -> None:
        """Record that a snapshot took `took_s` seconds to write."""
        self._save_s = took_s

    def due(self, now_s: float) -> bool:
        """Return whether a snapshot is due; if so, set the time of the next one."""
        if now_s < self._next_s:
            return False
        interval_s = durable_interval_s(self._save_s, self._devices, self.failures, now_s - self._started_s)
        self._next_s = now_s + (interval_s if self._save_s else FIRST_S)
        return True
