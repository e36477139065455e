"""Runs one agent on each host, through the `ssh` program: starts them together, reads them together, ends them together.

hosts ──▶ ssh … agent.ssh.ssh_remote ──▶ an agent each          stdout and stderr come back line by line, behind the node's name
Ctrl-C, SIGTERM … ──▶ a word to each far end ──▶ the agents' own ending; a second one ends them at once; a third leaves without them

Nothing here waits for a reader of the output (`output/async_output.py`): messages reach the far ends in any case.
"""

from __future__ import annotations

import json
import os
import resource
import secrets
import select
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass, replace

from ...resilience.clock import monotonic_s, wall_s
from ...resilience.errors import MachineError
from ...resilience.ipc import die_with_parent
from ..loop.shutdown import heard
from ..output.async_output import Printing
from ..output.terminal import Terminal
from . import fleet_status
from .fleet_status import Member, Phase
from .hostfile import Host
from .ssh_remote import SIGNALS

ALIVE_S, SILENCE_S = 5.0, 60.0
"""Time between two messages to each far end, and the silence after which a far end ends its agent."""
_OPTIONS = ("BatchMode=yes", "ConnectTimeout=20", "ServerAliveInterval=15", "ServerAliveCountMax=3", "LogLevel=ERROR")
"""Never prompt; notice within 45 s that a host has vanished. The user's options come first, and the first one counts (ssh_config(5))."""
_READ_S = 5.0
"""How long the last lines may take to be read, once the user has asked for the end."""
_WORDS = 3
"""How many of ssh's last lines a message repeats."""


class Reached:
    """One host: the ssh process to it, and what it has printed."""

    def __init__(self, host: Host, options: Sequence[str], order: Mapping[str, object]) -> None:
        self.host, self.member = host, Member(node=host.node)
        self._hello = str(order["hello"]).encode()
        self._said: list[str] = []
        self._rest = {1: b"", 2: b""}
        far = f"exec {shlex.quote(sys.executable)} -P -m mt_resilient.agent.ssh.ssh_remote"
        place = f"{host.user}@{host.host}" if host.user else host.host
        self.process = die_with_parent.spawn(
            [*command(host, options), place, far],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C must not end it: the far end is told of it, and more output follows
        )
        assert self.process.stdout
        assert self.process.stderr
        self.outputs = {self.process.stdout.fileno(): 1, self.process.stderr.fileno(): 2}
        self.tell(json.dumps(order))

    def tell(self, word: str) -> None:
        assert self.process.stdin
        with suppress(OSError):  # ssh is gone: seen at the end of its output
            self.process.stdin.write(word.encode() + b"\n")
            self.process.stdin.flush()

    def hear(self, fd: int, show: Callable[[int, bytes], None]) -> bool:
        """Show new output, line by line. Return False at the end of this descriptor."""
        stream = self.outputs[fd]
        part = os.read(fd, 1 << 16)
        *lines, self._rest[stream] = (self._rest[stream] + part).split(b"\n")
        if not part:
            del self.outputs[fd]
            lines = [line for line in (self._rest.pop(stream),) if line]
        for line in lines:
            if self.member.phase is Phase.UP:
                show(stream, line)
            elif line.endswith(self._hello) and stream == 1:  # after output of a .bashrc without a line end
                self.member = replace(self.member, phase=Phase.UP)
            else:
                self._said.append(line.decode(errors="replace").strip())
        return bool(part)

    def settle(self) -> None:
        """Note how ssh has ended, and the phase that follows from it."""
        code = self.process.wait()
        phase = fleet_status.gone(self.member.phase is Phase.UP, code)
        self.member = replace(self.member, phase=phase, code=code, ended_s=monotonic_s())
        assert self.process.stdin
        with suppress(OSError):
            self.process.stdin.close()

    @property
    def words(self) -> str:
        """The last output of ssh or the host from before the agent started."""
        return last_words(self._said) or f"ssh ended with code {self.member.code}"


def last_words(lines: Sequence[str]) -> str:
    """ssh's last lines, joined on one line."""
    return " | ".join([line for line in lines if line][-_WORDS:])


def command(host: Host, options: Sequence[str]) -> list[str]:
    """The ssh command with its options. options: `Key=value` as for `ssh -o`; they override ours, and the hostfile's port overrides
    them."""
    port = [f"Port={host.port}"] if host.port else []
    return ["ssh", "-T", *(word for option in (*port, *options, *_OPTIONS) for word in ("-o", option))]


@dataclass(frozen=True)
class Start:
    """How an agent is started on a host."""

    options: Sequence[str]
    """For `ssh -o`."""
    agent: Callable[[Host], Sequence[str]]
    """Returns the agent's command, whose program is at the same path there."""
    environment: Mapping[str, str]


class SshLaunch:
    def __init__(
        self,
        hosts: Sequence[Host],
        start: Start,
        least: int,
        ending_s: float,
        terminal: Terminal,
        watch: Callable[[], None] = lambda: None,
        begun: Callable[[], bool] = lambda: True,
    ) -> None:
        """least: how many hosts the job needs to begin; ending_s: how long an agent may take to leave when its connection is gone; watch:
        called about once a second; begun: whether the job has begun, as far as is known."""
        self._hosts, self._how, self._least = hosts, start, least
        self._ending_s = ending_s
        self._terminal, self._watch, self._has_begun = terminal, watch, begun
        self._begun = False
        self._signals: list[int] = []
        self._obeyed = 0
        self._gave_up = 0
        """The exit code, once the launch has given up; else 0."""
        self._reached: list[Reached] = []
        self._printing: dict[int, Printing] = {}

    def run(self) -> int:
        """Run until all agents have left. Return the job's exit code, or that of what has kept it from beginning. Raises MachineError if an
        ssh cannot be started."""
        wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        before = {number: signal.signal(number, self._on_signal) for number in heard(SIGNALS.values())}
        before[signal.SIGTSTP] = signal.signal(
            signal.SIGTSTP, signal.SIG_IGN
        )  # stopped by Ctrl-Z, this process would fall silent
        previous = signal.set_wakeup_fd(woken)
        self._printing = {fd: Printing(fd) for fd in (1, 2)}
        try:
            self._start()
            with redirect_stderr(self._printing[2]):
                return self._attend(wake)
        finally:
            for reached in self._reached:
                reached.process.kill()  # its far end notices, and ends its agent
                reached.process.wait()
            for printing in self._printing.values():
                self._let_read(printing)
            signal.set_wakeup_fd(previous)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(wake)
            os.close(woken)

    def _start(self) -> None:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # each ssh takes three descriptors
        hello = f"mt-resilient {secrets.token_hex(8)}"
        for host in self._hosts:
            order = {
                "hello": hello,
                "folder": os.getcwd(),
                "environment": dict(self._how.environment),
                "command": list(self._how.agent(host)),
                "silence_s": SILENCE_S,
                "ending_s": self._ending_s,
            }
            try:
                self._reached.append(Reached(host, self._how.options, order))
            except OSError as error:
                raise MachineError(
                    f"no ssh to {host.node} can be started ({error.strerror}); the {len(self._reached)} before it were ended again. "
                    "Raise this machine's limits (for open files: ulimit -Hn), or name fewer hosts"
                ) from error

    def _attend(self, wake: int) -> int:
        poller = select.poll()
        poller.register(wake, select.POLLIN)
        owner = {fd: reached for reached in self._reached for fd in reached.outputs}
        for fd in owner:
            poller.register(fd, select.POLLIN)
        alive_s = monotonic_s()
        while owner and len(self._signals) < 3:
            for fd, _ in poller.poll(1000):
                if fd == wake:
                    os.read(wake, 4096)
                elif not owner[fd].hear(fd, self._shower(owner[fd])):
                    poller.unregister(fd)
                    self._ended(owner.pop(fd))
            self._hand_on()
            if monotonic_s() - alive_s >= ALIVE_S:
                alive_s = monotonic_s()
                self._tell_all("")
            self._watch()
        if self._gave_up:
            return self._gave_up
        if owner:
            self._say("asked a third time: leaving without waiting for the agents, which end by themselves", "warn")
            return 128 + self._signals[0]
        return fleet_status.exit_code(self.members)

    @property
    def members(self) -> tuple[Member, ...]:
        return tuple(reached.member for reached in self._reached)

    def _ended(self, reached: Reached) -> None:
        if reached.outputs:
            return
        reached.settle()
        member, reason = reached.member, "" if self._gave_up else self._hopeless()
        match member.phase:
            case Phase.UNUSABLE:
                without = "" if reason or self._gave_up else "; the job goes without it"
                self._say(f"{member.node} cannot be used ({reached.words}){without}", "bad")
            case Phase.LOST:
                self._say(
                    f"{member.node} is lost: {fleet_status.how_lost(member.code)}; the others go on if the job can do without it",
                    "bad",
                )
                if not self._signals and any(other.phase is Phase.UP for other in self.members):
                    back = f"cd {shlex.quote(os.getcwd())} && {shlex.join(self._how.agent(reached.host))}"
                    self._say(f"once {member.node} is well again, this brings it back, given there: {back}")
            case _:
                self._say(f"the agent on {member.node} has left, with code {member.code}")
        if reason:
            self._gave_up = member.code if member.phase is Phase.ENDED else MachineError.exit_code
            self._tell_all(signal.SIGINT.name)  # SIGINT ends the job; SIGTERM is for one node
            self._say(reason, "bad")

    def _hopeless(self) -> str:
        reason = fleet_status.hopeless(self.members, self._least, begun=self._begun or bool(self._signals))
        if reason and not self._begun and self._has_begun():
            self._begun = True
            return self._hopeless()
        return reason

    def _hand_on(self) -> None:
        for number in self._signals[self._obeyed : 2]:
            self._tell_all(signal.Signals(number).name)
            if self._obeyed == 0:
                self._say(f"{signal.Signals(number).name}: told all agents; once more ends them at once", "warn")
            self._obeyed += 1

    def _tell_all(self, word: str) -> None:
        for reached in self._reached:
            if reached.outputs:
                reached.tell(word)

    def _on_signal(self, number: int, _: object) -> None:
        self._signals.append(number)

    def _shower(self, reached: Reached) -> Callable[[int, bytes], None]:
        def show(stream: int, line: bytes) -> None:
            self._printing[stream].show(reached.member.node.encode() + b": " + line + b"\n")

        return show

    def _let_read(self, printing: Printing) -> None:
        """Let the last output be read. From a signal on, wait for the reader at most _READ_S."""
        printing.end()
        while printing.thread.is_alive() and not self._signals:
            printing.thread.join(1.0)
        printing.thread.join(_READ_S)

    def _say(self, sentence: str, mood: str = "info") -> None:
        self._terminal.say(sentence, wall_s(), mood)
