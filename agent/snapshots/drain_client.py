"""The agent's side of the drain process (which writes snapshots from memory to disk): keeps it running, reads its events, and asks it to
finish."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from ...checkpoint.backend.place import Place
from ...checkpoint.durable.retention import RetentionPolicy
from ...checkpoint.durable.save_interval import SnapshotPolicy
from ...resilience.ipc import die_with_parent
from ...resilience.ipc.file_descriptors import appending

LAST_TRIES = 3
"""How many deaths of the drain process end a fetch. One more death than this ends the final writes."""
STOP_S = 5.0
"""Seconds that a killed drain process may take to end."""
RESTART_S = (1.0, 60.0)
"""First and longest wait in seconds before a dead drain process is restarted. Each further death of the drain process in a row doubles the
wait."""


_FIELDS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "durable": {"step": int, "bytes": int, "seconds": (int, float)},
    "written": {"step": int},
    "failed": {"step": int, "reason": str},
    "retired": {"step": int},
    "replicated": {"seconds": (int, float)},
    "not replicated": {"step": int, "reason": str},
    "fetched": {"step": int, "bytes": int, "seconds": (int, float)},
    "not fetched": {"step": int, "reason": str},
    "reserved": {"bytes": int},
    "not reserved": {"reason": str},
    "buddy lost": {"reason": str},
    "deaf": {"reason": str},
}
"""The fields that an event of each kind must have."""


def heard(line: bytes) -> dict[str, Any] | None:
    """Return the event in a line of the drain process's output. None: the line is not an event; a library may have printed it."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    kind = event.get("event") if isinstance(event, dict) else None
    if not isinstance(kind, str):
        return None
    return event if all(isinstance(event.get(name), what) for name, what in _FIELDS.get(kind, {}).items()) else None


def drain_config(arena: Sequence[Sequence[str]], root: Place, run: str, policy: SnapshotPolicy) -> dict[str, Any]:
    """Return the drain process's configuration for a job. arena: paths of the slots (shared memory for snapshots), by local rank. run:
    eight hexadecimal digits that identify this run of the job."""
    return {
        "arena": arena,
        "root": root.address,
        "run": run,
        "local_ranks": len(arena),
        "max_write_mb_per_s": policy.max_write_mb_per_s,
        **{field.name: getattr(policy, field.name) for field in fields(RetentionPolicy)},
    }


class Draining:
    """The drain process, as the agent manages it. Training never depends on it: when it dies, the agent restarts it, and snapshots stay in
    memory meanwhile."""

    def __init__(self, config: dict[str, Any], log: Path, secrets: Mapping[str, str]) -> None:
        """secrets: environment variables that the process gets in addition to the agent's own."""
        self._config, self._log, self._secrets = config, log, secrets
        self._log_fd = -1
        self._process: subprocess.Popen[bytes] | None = None
        self._rest = b""
        self._deaths = 0
        self._not_before_s = 0.0
        self.finished = False
        self.lost = ""
        """Why the newest snapshot that should be on disk is not there; empty if it is there."""
        self._newest = -1
        self._asked = False
        self._fetches: tuple[str, ...] = ()
        """Arguments of the fetch that is still under way; empty: no fetch is."""
        self._lost = 0
        """How many times the process has died during this fetch."""

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def fd(self) -> int | None:
        """The descriptor that becomes readable when the process sends an event or ends; None: the process does not run."""
        return self._process.stdout.fileno() if self._process and self._process.stdout else None

    def keep_running(self, now_s: float) -> None:
        """Start the process if it does not run and its wait after a death is over. Pending final writes or a fetch skip the wait. now_s:
        monotonic."""
        waited_for = self._asked or self._fetches
        if self._process is not None or self.finished or (now_s < self._not_before_s and not waited_for):
            return
        self._not_before_s = now_s + RESTART_S[0]  # in case the start fails
        command = [sys.executable, "-m", "mt_resilient.agent.snapshots.drain_process", json.dumps(self._config)]
        if self._log_fd < 0:  # kept open: the disk may hang when the process is restarted
            self._log_fd = appending(self._log)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._log_fd}
        self._process = die_with_parent.spawn(
            command, start_new_session=True, env={**os.environ, **self._secrets}, **pipes
        )
        os.set_blocking(self._process.stdout.fileno(), False)  # type: ignore[union-attr]
        if self._fetches:
            self._tell("fetch", *self._fetches)
        if self._asked:
            self.finish()

    def events(self, now_s: float) -> Iterator[dict[str, Any]]:
        """Yield the process's events since the last call. The death of the drain process is also an event."""
        if self._process is None or self._process.stdout is None:
            return
        data = self._process.stdout.read()
        if data:
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                event = heard(line)
                if event is None:
                    continue
                self.finished = self.finished or (event["event"] == "finished" and self._asked)
                self._deaths = 0
                if event["event"] in ("fetched", "not fetched"):
                    self._fetches = ()
                if event["event"] in ("durable", "written", "failed") and event["step"] >= self._newest:
                    self._newest = event["step"]
                    self.lost = f"step {event['step']}: {event['reason']}" if event["event"] == "failed" else ""
                yield event
        if data != b"" or self._process.poll() is None:
            return
        code = self._process.wait()
        self._process.stdin.close()  # type: ignore[union-attr]
        self._process.stdout.close()
        self._process, self._rest = None, b""
        if not self.finished:
            wait = min(RESTART_S[0] * 2**self._deaths, RESTART_S[1])
            self._deaths += 1
            if self._asked and self._deaths > LAST_TRIES:
                self.finished, self.lost = True, "the drain process died again and again while it wrote this snapshot"
            self._not_before_s = now_s + wait
            self._lost += 1
            yield {"event": "died", "reason": f"the drain process ended with code {code}", "retry_in_s": wait}
            if self._fetches and self._lost == LAST_TRIES:
                step, self._fetches = int(self._fetches[3]), ()
                yield {
                    "event": "not fetched",
                    "step": step,
                    "reason": "the drain process died again and again meanwhile",
                }

    def finish(self) -> None:
        """Ask the process to write all pending snapshots and exit. `finished` becomes True afterwards. If the process dies before that, the
        agent restarts it."""
        self._asked = True
        self._tell("finish")

    def give_up(self) -> None:
        """Kill the process, and abandon the snapshots that it has not written yet."""
        self.stop()
        self.finished = True

    def begin_again(self) -> None:
        """Allow a new process, because the job continues after `finish`. Kill the old process, which may be waiting for a dead node's
        part."""
        self.stop()
        self._asked, self.finished, self.lost = False, False, ""

    def protect(self, names: Sequence[str]) -> None:
        """From now on, also after a restart of the process, protect exactly these snapshots from deletion as too old."""
        self._config = {**self._config, "protected": [*names]}
        self._tell("protect", *names)

    def copy_to(self, address: str) -> None:
        """From now on, also after a restart of the process, send copies of snapshots to this address; empty: send none."""
        self._config = {**self._config, "buddy": {**self._config["buddy"], "send_to": address}}
        self._tell("copy", address)

    def reserve(self, nbytes: int) -> None:
        """Allocate `nbytes` of memory for each rank now, for a later fetch; after a restart of the process, allocate it again."""
        self._config = {**self._config, "reserve_bytes": nbytes}
        self._tell("reserve", str(nbytes))

    def fetch(self, address: str, *numbers: int) -> None:
        """Fetch this node's part of a snapshot from the node at `address`. numbers: generation, rewinds, step, and this node's first global
        rank. An event reports the outcome."""
        self._fetches, self._lost = (address, *map(str, numbers)), 0
        self._tell("fetch", *self._fetches)

    def _tell(self, *words: str) -> None:
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):  # the process is dead: `events` will notice
                self._process.stdin.write(f"{' '.join(words)}\n".encode())
                self._process.stdin.flush()

    def stop(self) -> None:
        """Kill the process. An unfinished snapshot on disk has no COMMIT file and is deleted later."""
        if self._process is not None:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):  # the process hangs together with its storage
                self._process.wait(STOP_S)
            for pipe in (self._process.stdin, self._process.stdout):
                with suppress(OSError):  # the process has not read the last line
                    pipe.close()  # type: ignore[union-attr]
            self._process, self._rest = None, b""
        self._not_before_s, self._fetches = 0.0, ()
