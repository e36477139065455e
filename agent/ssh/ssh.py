"""Runs one agent on each host, through the `ssh` program. One loop starts all agents, reads their output, and ends them.

hosts ──▶ ssh … agent.ssh.ssh_remote ──▶ an agent each          stdout and stderr come back line by line, behind the node's name
Ctrl-C, SIGTERM … ──▶ a message to each far end ──▶ the agents shut down; a second signal kills them; a third exits without waiting

A far end is the process `ssh_remote` on a host. The loop never waits for a reader of the output (`output/async_output.py`), so a blocked
terminal does not delay messages to the far ends.
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
from ..output.async_output import Printing, cut
from ..output.terminal import Terminal
from . import fleet_status
from .fleet_status import Member, Phase
from .hostfile import Host
from .ssh_remote import SIGNALS

ALIVE_S, SILENCE_S = 5.0, 60.0
"""Seconds between two messages to each far end, and seconds of silence after which a far end ends its agent."""
_OPTIONS = ("BatchMode=yes", "ConnectTimeout=20", "ServerAliveInterval=15", "ServerAliveCountMax=3", "LogLevel=ERROR")
"""ssh never prompts, and notices within 45 s that a host has vanished. The user's options come first, because ssh uses the first value of
each option (ssh_config(5))."""
_READ_S = 5.0
"""Seconds that a reader may take for the last lines of output, after the user has asked to end the job."""
_WORDS = 3
"""How many of ssh's last lines a message repeats."""


class Reached:
    """One host: the ssh process to the host, and what that process has printed."""

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
            start_new_session=True,  # Ctrl-C must not end ssh: the far end gets a message instead, and more output follows
        )
        assert self.process.stdout
        assert self.process.stderr
        self.outputs = {self.process.stdout.fileno(): 1, self.process.stderr.fileno(): 2}
        self.tell(json.dumps(order))

    def tell(self, word: str) -> None:
        assert self.process.stdin
        with suppress(OSError):  # ssh has exited: `hear` notices that
            self.process.stdin.write(word.encode() + b"\n")
            self.process.stdin.flush()

    def hear(self, fd: int, show: Callable[[int, bytes], None]) -> bool:
        """Show new output, line by line. Return False at the end of this descriptor."""
        stream = self.outputs[fd]
        part = os.read(fd, 1 << 16)
        lines, self._rest[stream] = cut(self._rest[stream] + part)
        if not part:
            del self.outputs[fd]
            lines = [line + b"\n" for line in (self._rest.pop(stream),) if line]
        for line in lines:
            if self.member.phase is Phase.UP:
                show(stream, line)
            elif line.rstrip().endswith(self._hello) and stream == 1:  # after output of a .bashrc without a line end
                self.member = replace(self.member, phase=Phase.UP)
            else:
                self._said.append(line.decode(errors="replace").strip())
        return bool(part)

    def settle(self) -> None:
        """Record ssh's exit code, and the phase of the host that follows from the code."""
        code = self.process.wait()
        phase = fleet_status.gone(self.member.phase is Phase.UP, code)
        self.member = replace(self.member, phase=phase, code=code, ended_s=monotonic_s())
        assert self.process.stdin
        with suppress(OSError):
            self.process.stdin.close()

    @property
    def words(self) -> str:
        """The last lines that ssh or the host printed before the agent started."""
        return last_words(self._said) or f"ssh ended with code {self.member.code}"


def last_words(lines: Sequence[str]) -> str:
    """Return ssh's last lines, joined into one line."""
    return " | ".join([line for line in lines if line][-_WORDS:])


def command(host: Host, options: Sequence[str]) -> list[str]:
    """Return the ssh command with its options. options: `Key=value`, as for `ssh -o`. These options override `_OPTIONS`, and the hostfile's
    port overrides both."""
    port = [f"Port={host.port}"] if host.port else []
    return ["ssh", "-T", *(word for option in (*port, *options, *_OPTIONS) for word in ("-o", option))]


@dataclass(frozen=True)
class Start:
    """How an agent is started on a host."""

    options: Sequence[str]
    """For `ssh -o`."""
    agent: Callable[[Host], Sequence[str]]
    """Returns the agent's command for a host. The agent's program must be at the same path on that host as on this one."""
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
        """least: number of hosts that the job needs to begin. ending_s: seconds that an agent may take to exit after its connection is
        gone. watch: called about once a second. begun: returns whether the job may have begun."""
        self._hosts, self._how, self._least = hosts, start, least
        self._ending_s = ending_s
        self._terminal, self._watch, self._has_begun = terminal, watch, begun
        self._begun = False
        self._signals: list[int] = []
        self._obeyed = 0
        self._gave_up = 0
        """The exit code after the launch has given up; otherwise 0."""
        self._reached: list[Reached] = []
        self._printing: dict[int, Printing] = {}

    def run(self) -> int:
        """Run until all agents have exited. Return the job's exit code. If the job could not begin, return the code of the failure instead.
        Raises MachineError if an ssh process cannot be started."""
        wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        before = {number: signal.signal(number, self._on_signal) for number in heard(SIGNALS.values())}
        # A process stopped by Ctrl-Z would send nothing.
        before[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, signal.SIG_IGN)
        previous = signal.set_wakeup_fd(woken)
        self._printing = {fd: Printing(fd) for fd in (1, 2)}
        try:
            self._start()
            with redirect_stderr(self._printing[2]):
                return self._attend(wake)
        finally:
            for reached in self._reached:
                reached.process.kill()  # the far end notices, and ends its agent
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
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # each ssh process uses three descriptors
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
                    f"no ssh to {host.node} can be started ({error.strerror}); the {len(self._reached)} ssh processes "
                    "before it were ended. Raise this machine's limits (for open files: ulimit -Hn), or name fewer hosts"
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
            self._say("third signal: exiting without waiting for the agents, which end by themselves", "warn")
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
                without = "" if reason or self._gave_up else "; the job runs without it"
                self._say(f"{member.node} cannot be used ({reached.words}){without}", "bad")
            case Phase.LOST:
                self._say(
                    f"{member.node} is lost: {fleet_status.how_lost(member.code)}; the other nodes continue if the job can do without it",
                    "bad",
                )
                if not self._signals and any(other.phase is Phase.UP for other in self.members):
                    back = f"cd {shlex.quote(os.getcwd())} && {shlex.join(self._how.agent(reached.host))}"
                    self._say(f"once {member.node} works again, give this command there to bring it back: {back}")
            case _:
                self._say(f"the agent on {member.node} has exited with code {member.code}")
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
                self._say(
                    f"{signal.Signals(number).name}: all agents were told; a second signal ends them at once", "warn"
                )
            self._obeyed += 1

    def _tell_all(self, word: str) -> None:
        for reached in self._reached:
            if reached.outputs:
                reached.tell(word)

    def _on_signal(self, number: int, _: object) -> None:
        self._signals.append(number)

    def _shower(self, reached: Reached) -> Callable[[int, bytes], None]:
        def show(stream: int, line: bytes) -> None:
            self._printing[stream].show(reached.member.node.encode() + b": " + line)

        return show

    def _let_read(self, printing: Printing) -> None:
        """Wait until the last output is read. After a signal, wait at most _READ_S seconds."""
        printing.end()
        while printing.thread.is_alive() and not self._signals:
            printing.thread.join(1.0)
        printing.thread.join(_READ_S)

    def _say(self, sentence: str, mood: str = "info") -> None:
        self._terminal.say(sentence, wall_s(), mood)
