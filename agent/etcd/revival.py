"""Restarts an embedded etcd when it has died."""

from __future__ import annotations

from collections.abc import Callable

from ...resilience.clock import monotonic_s
from ...resilience.errors import MachineError, SiteError
from .server import AGAIN_WITHIN_S, EmbeddedEtcd


class Revival:
    """Restarts the embedded etcd when it has died. After each failed restart it waits twice as long as before, at most 10 s."""

    def __init__(
        self, server: EmbeddedEtcd, endpoint: str, spared: set[int], say: Callable[[str, str], object]
    ) -> None:
        """spared: gets the process id of the new etcd instead of the old one's. say: reports a sentence with its mood."""
        self._server, self._endpoint, self._spared, self._say = server, endpoint, spared, say
        self._wait_s, self._not_before_s = 1.0, 0.0

    def __call__(self) -> None:
        if self._server.alive() or monotonic_s() < self._not_before_s:
            return
        gone = self._server.pid or 0
        try:
            if self._server.start(AGAIN_WITHIN_S) != self._endpoint:
                self._server.stop()
                raise MachineError(f"another process has taken etcd's port, {self._endpoint}")
            self._wait_s = 1.0
            self._say("etcd had died and was started again", "good")
        except SiteError as error:
            self._say(f"{error}; the start is tried again in {self._wait_s:.0f} s", "bad")
            self._not_before_s = monotonic_s() + self._wait_s
            self._wait_s = min(10.0, self._wait_s * 2)
        self._spared.discard(gone)
        self._spared.add(self._server.pid or 0)
