"""Restarts the agent's own etcd when it has died. Training continues meanwhile."""

from __future__ import annotations

from ...resilience.clock import monotonic_s
from ...resilience.errors import MachineError, SiteError
from ..etcd.server import AGAIN_WITHIN_S, EmbeddedEtcd
from ..node import Node
from ..output.event_log import Telling


class Revival:
    """Restarts the embedded etcd when it has died. After each failed restart it waits twice as long as before, at most 60 s."""

    def __init__(self, server: EmbeddedEtcd, endpoint: str, node: Node, telling: Telling) -> None:
        self._server, self._endpoint, self._node, self._telling = server, endpoint, node, telling
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
        except SiteError as error:
            self._telling.say(f"{error}; the agent tries again in {self._wait_s:.0f} s", "bad")
            self._not_before_s = monotonic_s() + self._wait_s
            self._wait_s = min(60.0, self._wait_s * 2)
        self._node.spared.discard(gone)
        self._node.spared.add(self._server.pid or 0)
