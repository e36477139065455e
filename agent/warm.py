"""The agent's end of the warm process: started before the first gang, asked to fork each.

Importing torch and Megatron takes seconds and happens here: torch once for all ranks, before the first start; what else the ranks have
imported ahead of need. Where forking is not safe the process says why, and the gang starts cold.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from ..resilience import leash
from ..resilience.errors import MachineError

ANSWER_S = 10.0
"""A fork answers in milliseconds; a warm process that does not has a problem of its own."""
_IMPORTING = "the warm process is still importing"


class WarmProcess:
    """States: not started, importing, ready, or unusable, with the reason in `why`."""

    def __init__(self, python: str, modules: Path, home: str, log: Path) -> None:
        """modules: what the ranks imported, as their first step left it; home: the folder that is first on their sys.path."""
        self._command = [python, "-m", "mt_resilient.training.forkserver"]
        self._home = home
        self._modules = modules
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self.why = "the warm process has not been started yet"
        self.ready = False
        self._tried_in = -1
        self._unsafe = False
        self.knows = False
        """It was told to import what ranks of this life of the job have noted."""

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def wanted(self, generation: int) -> bool:
        """Whether to start it now: once in each generation where it is not there, unless forking has turned out not to be safe."""
        return self._process is None and not self._unsafe and self._tried_in != generation

    @property
    def importing(self) -> bool:
        """Under way: waiting for it is never slower than a cold start, which imports the same from the beginning, and torch twice."""
        return self._channel is not None and not self.ready

    @property
    def fd(self) -> int | None:
        """Readable when the process has something to say, or is gone."""
        return self._channel.fileno() if self._channel else None

    def learn(self) -> None:
        """Have it import what the ranks have noted."""
        assert self._channel
        self.knows, self.ready, self.why = True, False, _IMPORTING
        with suppress(OSError):  # gone: seen at the next look
            self._channel.sendall(b"{}\n")

    def start(self, environment: Mapping[str, str], generation: int) -> None:
        """Start importing, in the environment that ranks get. At normal priority: forked ranks would inherit a lower one."""
        self._tried_in, self.knows = generation, False
        ours, theirs = socket.socketpair()
        with ExitStack() as passing, self._log.open("ab") as log:
            passing.callback(theirs.close)
            passed = [theirs.fileno()]
            for stream in (1, 2):
                passed.append(os.dup(stream))
                passing.callback(os.close, passed[-1])
            command = [*self._command, *map(str, passed), str(os.getpid()), str(self._modules), self._home]
            self._process = leash.spawn(
                command,
                env=dict(environment),
                pass_fds=passed,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._channel = ours
        self.why = _IMPORTING

    def observe(self) -> bool:
        """Hear what it says, if anything; True when its state has changed."""
        if self._channel is None or not select.select([self._channel], [], [], 0)[0]:
            return False
        words = self._hear()
        if words is None:
            self._stop_because("the warm process ended; see its log")
        elif words.get("ready"):
            self.ready, self.why = True, ""
        else:
            self.give_up(words["why"])
        return True

    def launch(self, arguments: Sequence[str], environment: Mapping[str, str], generation: int) -> int:
        """Fork the gang's launcher; its pid. Raises MachineError when the process does not answer."""
        assert self._channel
        order = {"argv": list(arguments), "env": dict(environment), "cwd": os.getcwd(), "generation": generation}
        try:
            self._channel.sendall(json.dumps(order).encode() + b"\n")
            if select.select([self._channel], [], [], ANSWER_S)[0] and (words := self._hear()):
                return int(words["launcher"])
        except OSError:
            pass
        self._stop_because("the warm process did not answer")
        raise MachineError(self.why)

    def _hear(self) -> dict[str, Any] | None:
        assert self._channel
        line = b""
        while not line.endswith(b"\n"):
            part = self._channel.recv(65536)
            if not part:
                return None
            line += part
        return json.loads(line)

    def give_up(self, why: str) -> None:
        """Never again: it would not be otherwise the next time."""
        self._unsafe = True
        self._stop_because(why)

    def _stop_because(self, why: str) -> None:
        self.why = why
        self.stop()

    def stop(self) -> None:
        self.ready = False
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
