"""The agent's side of the warm process: a Python interpreter that has run the ranks' imports, and forks the next launcher and its ranks.

At the first start, torchrun starts the ranks itself: only its launcher is forked, from a process that has imported torchrun. The ranks
record what they import. From then on, a second warm process runs the opening of the ranks' script (the imports at its top,
`training/warm/preload.py`). If ranks cannot be forked from the second process, `why` contains the reason, the first process keeps forking
launchers, and the next start is cold.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...resilience.errors import MachineError
from ...resilience.ipc import die_with_parent
from ...resilience.ipc.file_descriptors import appending
from ...resilience.store.poll import readable
from ..launch.torchrun import Launch
from .worker_group import WorkerGroup, watched

ANSWER_S = 10.0
"""Seconds that a warm process may take to answer. A fork takes milliseconds; a slower process has some other problem."""
_ENDS_S = 0.5
"""Seconds that a warm process may take to exit after its last message."""
TRIES = 2
"""How many times the agent starts a warm process in one generation, if the process keeps dying."""
VARIABLE = "MT_RESILIENT_WARM"


FIRST_START = "the first start is torchrun's own"
NO_STEP = "the ranks had reported no step, and are forked only after one"


class ForkServer:
    """One process from which launchers are forked (`training/warm/forkserver.py`)."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: int, **plan: Any) -> None:
        """command: the command that starts a rank. log: file descriptor of the log. plan: further arguments for `forkserver.serve`."""
        self.ready = False
        self.channel, theirs = socket.socketpair()
        self.channel.settimeout(ANSWER_S)
        with theirs:
            passed = theirs.fileno(), log
            told = {"channel": passed[0], "log": passed[1], "agent": os.getpid(), **plan}
            self.process = die_with_parent.spawn(
                command,
                env={**environment, VARIABLE: json.dumps(told)},
                pass_fds=passed,
                start_new_session=True,
            )

    def heard(self) -> dict[str, Any] | None:
        """Return the process's new message. None: there is no message; empty: the process has ended."""
        if not readable([self.channel.fileno()]):
            return None
        words = self._hear()
        self.ready = bool(words.get("ready"))
        return words

    def launch(self, order: Mapping[str, Any]) -> int:
        """Fork a launcher and return its pid. Raises MachineError if the process does not answer."""
        try:
            self.channel.sendall(json.dumps(order).encode() + b"\n")
            words = self._hear() if readable([self.channel.fileno()], ANSWER_S) else {}
            if "stale" in words:
                raise MachineError(f"{words['stale']} has changed, or is gone, since the warm process has run it")
            if "launcher" in words:
                return int(words["launcher"])
        except OSError:
            pass
        raise MachineError(f"the warm process {self.ending()}")

    def _hear(self) -> dict[str, Any]:
        line = b""
        with suppress(OSError):
            while not line.endswith(b"\n"):
                part = self.channel.recv(65536)
                if not part:
                    break
                line += part
        with suppress(ValueError, TypeError, RecursionError):  # an import may have written to the channel
            return dict(json.loads(line))
        return {}

    def ending(self) -> str:
        """Return in words how the process has ended. Call `ending` when the process sends no more messages."""
        with suppress(subprocess.TimeoutExpired):
            code = self.process.wait(_ENDS_S)
            return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}; see its log"
        return "did not answer"

    def stop(self) -> None:
        self.channel.close()
        self.process.kill()
        with suppress(subprocess.TimeoutExpired):  # the process is stuck in the kernel: it is reaped when it ends
            self.process.wait(ANSWER_S)


class WarmProcess:
    """The process that forks launchers, and a second process that also forks their ranks. The second process replaces the first when it is
    ready."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Callable[[], Mapping[str, str]],
        modules: Path,
        log: Path,
        refused: str = "",
    ) -> None:
        """command: the command with which torchrun would start a rank. environment: returns the environment variables that all ranks share;
        called at each start. modules: the file in which ranks record their imports. refused: why ranks must never be forked; empty: they
        may be."""
        self._command, self._environment, self._modules, self._log = command, environment, modules, log
        self._log_fd = -1
        self._launchers: ForkServer | None = None
        self._ranks: ForkServer | None = None
        self._tries: Counter[int] = Counter()
        self._less: dict[str, Any] = {}
        """Limits for the next warm process, because a statement of the opening could not run ahead of the fork."""
        self._left = ""
        self._refused = bool(refused)
        self.why = refused
        """Why ranks are not forked; empty while forking is possible."""

    @property
    def pids(self) -> set[int]:
        return {server.process.pid for server in self._servers()}

    @property
    def fds(self) -> list[int]:
        """The descriptors that become readable when one of the processes sends a message or ends."""
        return [server.channel.fileno() for server in self._servers()]

    def _servers(self) -> list[ForkServer]:
        return [server for server in (self._launchers, self._ranks) if server]

    @property
    def forks_ranks(self) -> bool:
        return self._ranks is not None and self._ranks.ready

    @property
    def ready(self) -> bool:
        return any(server.ready for server in self._servers())

    @property
    def importing(self) -> bool:
        """True while the first imports are under way. Waiting for them takes no longer than a cold start, which runs the same imports from
        the beginning."""
        newest = self._ranks or self._launchers
        again = bool(self._less) and self._launchers is not None and self._launchers.ready
        return newest is not None and not newest.ready and not again

    def keep(self, generation: int, *, ranks: bool) -> None:
        """Ensure that there is a process to fork from. ranks: ranks may be forked too, once ranks have recorded their imports."""
        if not self._command or self._ranks or self._tries[generation] >= TRIES:
            return
        if ranks and not self._refused and self._modules.exists():
            self._tries[generation] += 1
            self.why = "the warm process is still importing"
            self._ranks = self._prepared()
        elif not self._launchers:
            self._tries[generation] += 1
            self._launchers = self._started()
            self.why = self.why or FIRST_START

    def _prepared(self) -> ForkServer:
        return self._started(modules=str(self._modules), **self._less)

    def _started(self, **plan: Any) -> ForkServer:
        if self._log_fd < 0:  # kept open: the disk may hang at the next start
            self._log_fd = appending(self._log)
        return ForkServer(self._command, self._environment(), self._log_fd, **plan)

    def observe(self) -> tuple[bool, str]:
        """Read the processes' messages and act on them. Return whether the next start may have changed between warm and cold, and a
        sentence to report (or an empty one)."""
        said = self._launchers.heard() if self._launchers else None
        if said == {}:
            self._stop_launchers()
        words = self._ranks.heard() if self._ranks else None
        if words is None:
            return said is not None, ""
        if words.get("ready"):
            self._stop_launchers()
            self.why = ""
            return True, f"the warm process is ready: the next start will be forked{self._left}"
        ending = self._ranks.ending() if self._ranks and not words else ""
        self._stop_ranks()
        less = words.get("less", {})
        if less and self._less | less != self._less:
            self._less |= less
            self._left = f"; the ranks themselves run {words['why']} and everything after it"
            self._ranks = self._prepared()
            return False, ""
        self._refused = "why" in words
        self.why = f"{words['why']}{self._left}" if self._refused else f"the warm process {ending}"
        return True, f"the warm process cannot be used, so the next start will be cold: {self.why}"

    def give_up(self, why: str) -> None:
        """Stop the second process, which still imports, so that the next start is cold."""
        self.why = why
        self._stop_ranks()

    def launch(
        self, program: Sequence[str], arguments: Sequence[str], environment: Mapping[str, str], ranks: int
    ) -> tuple[int, str]:
        """Fork the worker group's launcher. Return its pid, and how it starts its `ranks`: `warm`, or `cold: why`. If the process does not
        answer, stop both processes and raise MachineError."""
        server = self._ranks if self.forks_ranks else self._launchers
        order = {
            "program": program,
            "argv": arguments,
            "env": environment,
            "cwd": os.getcwd(),
            "ranks": ranks,
        }
        try:
            assert server
            how = "warm" if server is self._ranks else f"cold: {self.why}"
            launcher = server.launch(order)
            self.why = NO_STEP if self.why == FIRST_START else self.why
            return launcher, how
        except MachineError as error:
            self.stop()
            self.why = str(error)
            raise

    def stop(self) -> None:
        self._stop_launchers()
        self._stop_ranks()

    def _stop_launchers(self) -> None:
        if self._launchers:
            self._launchers.stop()
            self._launchers = None

    def _stop_ranks(self) -> None:
        if self._ranks:
            self._ranks.stop()
            self._ranks = None


def started(
    launch: Launch,
    warm: WarmProcess,
    generation: int,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    end_others: Callable[[], None],
) -> WorkerGroup:
    """Start the launcher and return its worker group. end_others: ends every process of the worker group that the agent does not watch.
    Raises OSError."""
    why = warm.why
    if warm.ready:
        try:
            pid, how = warm.launch(launch.program, arguments, environment, launch.ranks)
            return WorkerGroup(generation, watched(pid), how)
        except MachineError as error:
            why = str(error)
            end_others()  # the warm process may have forked a launcher, and answered too late
    try:
        process = die_with_parent.spawn([*launch.program, *arguments], env=environment, start_new_session=True)
        process.returncode = 0  # the worker group reaps the process: without this line, Popen would wait for it again
        return WorkerGroup(generation, watched(process.pid), f"cold: {why}")
    except OSError:
        end_others()  # a launcher may run unwatched, and the next round starts another one
        raise
