"""The far end of `run --hostfile`: the process that ssh starts on a host. This process starts the host's agent, and relays between the
agent and the connection.

    stdin, from the launching terminal                    here                              the agent
    one line of JSON: folder, environment, command   ──▶  starts it                    ──▶  it dies with this process
    SIGINT, SIGTERM …, a line each                   ──▶  forwards it (ssh does not)   ──▶  the signal
    an empty line every few seconds
    the end, or silence for `silence_s`              ──▶  SIGTERM, as a scheduler sends it to take the machine away

Output passes through this process, so that a broken connection does not kill a rank at its next `print`. The first line that this process
prints is the `hello` of that JSON. Any output before it came from ssh or a shell.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from ...resilience.clock import monotonic_s
from ...resilience.ipc import die_with_parent
from ...resilience.model.generation import PASSED_ON

KILL_S = 10.0
"""Seconds from the second SIGTERM, at which the agent exits immediately, to SIGKILL."""
SIGNALS = {number.name: number for number in (*PASSED_ON, signal.SIGUSR1, signal.SIGUSR2)}
UNUSABLE = 3
"""The exit code if this host cannot start the agent; equal to MachineError's."""


def main() -> int:
    """Run the agent. Return its exit code as a shell does: 128 + N if signal N killed the agent."""
    words = _Lines(0)
    order = words.first()
    if order is None:
        return UNUSABLE
    try:
        os.chdir(order["folder"])
    except OSError as error:
        print(f"the working directory {order['folder']} is not there ({error.strerror})", file=sys.stderr)
        return UNUSABLE
    print(order["hello"], flush=True)
    agent = die_with_parent.spawn(
        order["command"],
        env={**os.environ, **order["environment"]},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # so that sshd's signals to its own session do not reach the agent
    )
    _Between(agent, words, order["silence_s"], order["ending_s"]).run()
    code = agent.wait()
    return 128 - code if code < 0 else code


class _Lines:
    """Reads complete lines from a descriptor as they arrive."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.early: list[str] = []
        """Lines of the launching terminal that arrived together with its first line."""
        self._rest = b""

    def read(self) -> list[str] | None:
        """Return the complete lines that have arrived, or None at the end of the stream. Blocks until data arrives."""
        part = os.read(self.fd, 1 << 16)
        if not part:
            return None
        *whole, self._rest = (self._rest + part).split(b"\n")
        return [line.decode() for line in whole]

    def first(self) -> dict[str, Any] | None:
        """Return the launch order from the first line. None: the connection ended before the line was complete."""
        while (lines := self.read()) is not None:
            if lines:
                self.early = lines[1:]
                return json.loads(lines[0])
        return None


class _Between:
    def __init__(self, agent: subprocess.Popen[bytes], words: _Lines, silence_s: float, ending_s: float) -> None:
        """silence_s: seconds that the launching machine may be silent. A machine that vanishes does not close its connection, and sshd
        checks for this only if configured to. ending_s: seconds between the first SIGTERM and the second."""
        self._agent, self._words, self._silence_s = agent, words, silence_s
        self._patience_s = (ending_s, KILL_S)
        assert agent.stdout
        assert agent.stderr
        self._outputs = {agent.stdout.fileno(): 1, agent.stderr.fileno(): 2}
        self._listening = True
        self._heard_s = monotonic_s()
        self._next_end_s = 0.0
        self._asked = 0

    def run(self) -> None:
        """Relay until the agent's output ends. The output ends when the agent dies, because the agent's ranks die too."""
        poller = select.poll()
        for fd in (self._words.fd, *self._outputs):
            poller.register(fd, select.POLLIN)
        self._obey(self._words.early)
        while self._outputs:
            for fd, _ in poller.poll(1000):
                if not (self._copy(fd) if fd in self._outputs else self._hear()):
                    poller.unregister(fd)
            now = monotonic_s()
            if self._listening and now - self._heard_s > self._silence_s:
                self._listening = False
                poller.unregister(self._words.fd)
            if not self._listening and now >= self._next_end_s:
                self._end(now)

    def _copy(self, fd: int) -> bool:
        part = os.read(fd, 1 << 16)
        if not part:
            del self._outputs[fd]
            return False
        while part and self._outputs[fd]:
            try:
                part = part[os.write(self._outputs[fd], part) :]
            except OSError:  # the reader is gone: keep reading from the agent
                self._outputs[fd] = 0
        return True

    def _hear(self) -> bool:
        lines = self._words.read()
        self._heard_s = monotonic_s()
        self._listening = lines is not None
        self._obey(lines or ())
        return self._listening

    def _obey(self, lines: Sequence[str]) -> None:
        for line in lines:
            if line in SIGNALS:
                self._agent.send_signal(SIGNALS[line])

    def _end(self, now_s: float) -> None:
        """Send the agent the next signal, because the connection is gone. The first two are SIGTERM, and all later ones SIGKILL. Wait
        `ending_s` seconds after the first signal, and KILL_S seconds after each later one."""
        self._agent.send_signal(signal.SIGTERM if self._asked < 2 else signal.SIGKILL)
        self._next_end_s = now_s + self._patience_s[min(self._asked, 1)]
        self._asked += 1


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    sys.exit(main())
