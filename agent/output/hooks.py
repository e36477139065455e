"""Reports incidents to another program: runs a command, or posts to a webhook. A thread does it, so that nothing else waits.

The event is one JSON object (`json_outputs.HookObject`). The command gets it on stdin; the webhook in the body of a POST.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Full, Queue
from urllib.parse import urlsplit

from ...resilience.clock import monotonic_s, sleep
from ...resilience.errors import UsageError
from ...resilience.ipc.file_descriptors import appending
from ...resilience.model.incident import Incident
from ...resilience.report.json_outputs import HookObject, hook_object
from ...resilience.store.codec import printed
from ...resilience.text.formatting import printable

_WEB = ("http://", "https://")
_MOST = 100
"""The most events that wait. If the hook is slower than the faults, further events are dropped."""
_PAUSES_S = (1.0, 4.0, 16.0, 60.0)
"""Seconds between two attempts."""
_SHELL = 'sh -c "$1" >&2; echo $?'
"""Runs the command, and prints the command's exit code on stdout. The shell's own exit code can be lost: a recovery that kills the shell
also reaps it."""
LAST_S = 5.0
"""Seconds that `finish` waits for the last events."""


@dataclass(frozen=True, kw_only=True)
class HooksPolicy:
    """A program that the agent informs of incidents (docs/operations.md)."""

    on_incident: str = ""
    """A command for `sh`, or an address that begins with `http://` or `https://`. Empty: none."""
    timeout_s: float = 30.0
    """How long one attempt may take."""

    def __post_init__(self) -> None:
        if self.timeout_s <= 0:
            raise UsageError(f"hooks.timeout_s is {self.timeout_s}; it must be more than 0")
        if self.on_incident.startswith(_WEB) and not _is_address(self.on_incident):
            raise UsageError(
                f"hooks.on_incident is {self.on_incident}, which is no address; write http://host/path or http://host:port/path, without "
                "spaces (%20 stands for a space)"
            )


class _Unredirected(urllib.request.HTTPRedirectHandler):
    """Makes a redirection an error. urllib would follow it with a GET without the event."""

    def redirect_request(self, *_: object) -> None:
        return None


_OPENER = urllib.request.build_opener(_Unredirected)


class Hooks:
    def __init__(self, policy: HooksPolicy, directory: Path, job: str, node: str) -> None:
        """directory: the run directory. Its file `logs/hooks.log` gets what the user's command prints, and why attempts to run it have
        failed."""
        self._policy, self._log = policy, directory / "logs" / "hooks.log"
        self._here = job, node, str(directory)
        self._events: Queue[HookObject | None] = Queue(_MOST)
        self._ending = threading.Event()
        self.pids: set[int] = set()
        """The command that runs now. The agent does not end it along with the ranks."""
        self._left_out = 0
        self._running: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._serve, name="hooks", daemon=True)
        if policy.on_incident:
            self._thread.start()

    def tell(self, incident: Incident) -> None:
        """Deliver, from the thread, that the incident has begun or is over."""
        if self._policy.on_incident:
            try:
                self._events.put_nowait(hook_object(incident, *self._here))
            except Full:
                self._left_out += 1

    def finish(self) -> None:
        """Wait up to LAST_S seconds until the last events are delivered."""
        if not self._policy.on_incident:
            return
        self._ending.set()
        until = monotonic_s() + LAST_S
        while monotonic_s() < until:
            try:
                self._events.put_nowait(None)
                break
            except Full:
                sleep(0.05)
        self._thread.join(max(0.0, until - monotonic_s()))
        if self._running:
            _end(self._running)

    def _serve(self) -> None:
        while (event := self._events.get()) is not None:
            self._deliver(event)
            if self._left_out:
                self._note(f"{self._left_out} events were dropped after this one, because {_MOST} waited")
                self._left_out = 0

    def _deliver(self, event: HookObject) -> None:
        for pause_s in (*_PAUSES_S, 0.0):
            problem = self._attempt(printed(event).encode())
            if not problem:
                return
            self._note(f"{event.text}: {problem}")
            self._ending.wait(pause_s)  # an agent that exits makes the remaining attempts at once

    def _attempt(self, body: bytes) -> str:
        """Return why the event was not delivered; empty: it was."""
        where, timeout_s = self._policy.on_incident, self._policy.timeout_s
        try:
            if where.startswith(_WEB):
                asked = urllib.request.Request(where, body, {"Content-Type": "application/json"})
                _OPENER.open(asked, timeout=timeout_s).close()
                return ""
            return self._run(where, body, timeout_s)
        except Exception as error:  # whatever the other program answers, the next event is tried
            return f"{type(error).__name__}: {error}"

    def _run(self, command: str, body: bytes, timeout_s: float) -> str:
        log = appending(self._log)
        with open(log, "ab") as file:
            process = subprocess.Popen(
                ["sh", "-c", _SHELL, "sh", command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                start_new_session=True,
            )
        self._running = process
        self.pids.add(process.pid)
        try:
            code = process.communicate(body, timeout_s)[0].decode().strip()
        except subprocess.TimeoutExpired:
            _end(process)
            process.wait()
            return f"it took longer than {timeout_s:g} s"
        finally:
            self._running = None
            self.pids.discard(process.pid)
        return "" if code == "0" else f"exit code {code}" if code else "it was killed"

    def _note(self, sentence: str) -> None:
        with suppress(OSError), self._log.open("a", errors="backslashreplace") as file:
            print(printable(sentence), file=file)


def _is_address(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return bool(parts.hostname and parts.port != 0 and text.isprintable() and text.isascii() and " " not in text)
    except ValueError:  # the port is no number
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the command and what it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
