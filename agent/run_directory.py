"""The run directory: all files of one job on this node. The files outlive the agent. The directory's lock lets only one agent use the
directory."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shlex
import sys
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..checkpoint.backend import paths, place
from ..checkpoint.backend.filesystem import Files, own_name, read_file
from ..checkpoint.backend.place import Place
from ..checkpoint.durable import catalog
from ..resilience.errors import MachineError, SnapshotError, UsageError
from ..resilience.ipc.file_descriptors import high
from ..resilience.model.state_machine import Phase
from ..resilience.report.journal import Journal
from ..resilience.store.etcd.access import Papers
from ..resilience.text import formatting
from .ranks.exit_codes import born

BOOT = Path("/proc/sys/kernel/random/boot_id")
MARK = paths.JOB
_MARK_BYTES = 1024


class InUse(UsageError):
    """Another agent has locked the run directory."""


class RunDirectory:
    """`<root>/` etcd/ · snapshots/ · logs/ · journal.jsonl · endpoint · lock"""

    def __init__(self, root: Path) -> None:
        self.root = root = root.absolute()
        self._lock: int | None = None
        self.etcd, self.logs, self.journal = root / "etcd", root / "logs", root / "journal.jsonl"
        self.leaving = self.logs / "leaving.log"
        """The file for the stacks of an agent that hung while it exited."""
        self.modules = root / "modules.json"
        self.endpoint = root / "endpoint"
        """The file with the job name and etcd endpoints of the running agent, for the other commands."""
        self._last_endpoint = root / "endpoint.last"
        """With several nodes: such a file of the last agent, if that agent exited normally."""
        self.finished = root / "finished"
        """A file that exists if the training has reached its end and no result is missing."""

    @property
    def below(self) -> list[RunDirectory]:
        """This run directory, and those below it of nodes that were started from here. The leader's journal covers the whole job."""
        return [self, *(RunDirectory(path.parent) for path in sorted(self.root.glob("nodes/*/journal.jsonl")))]

    @property
    def nodes(self) -> list[RunDirectory]:
        """The run directories of this job's nodes that are known here: those of `below`, and those beside this one
        (`agent/join/static_nodes.py`)."""
        found, owner = self.below, self.owner if self.root.parent.name == "nodes" else ""
        for path in sorted(self.root.parent.glob("*/journal.jsonl")) if owner else ():
            with suppress(OSError, SnapshotError):  # a node's directory that cannot be read
                if path != self.journal and (other := RunDirectory(path.parent)).owner == owner:
                    found.append(other)
        return found

    def publish(self, job: str, endpoints: Sequence[str], papers: Papers, metrics_port: int = 0) -> None:
        """Write the running agent's etcd endpoints, and the paths of its credentials, to a file for the other commands. The file contains
        no secret. Raises MachineError."""
        me = {"pid": os.getpid(), "born": born(os.getpid()), "machine": _machine()}
        told = {
            "job": job,
            "endpoints": [*endpoints],
            "papers": asdict(papers.absolute()),
            "metrics_port": metrics_port,
            **me,
        }
        try:
            self.endpoint.write_text(json.dumps(told))
        except OSError as error:
            raise MachineError(f"{self.endpoint} cannot be written ({error.strerror}); nothing was started") from error

    def agent(self) -> dict[str, Any] | None:
        """Return the endpoint data of the agent that runs here; None: no agent runs here."""
        place = self._published(self.endpoint)
        since = born(place["pid"]) if place else ""
        return place if place and since and place.get("born", since) == since else None

    @property
    def gone(self) -> bool:
        """Whether the last agent was killed on this machine, and so did not exit normally. False if it may run on another machine."""
        place = self._published(self.endpoint)
        return place is not None and place.get("machine") == _machine() and self.agent() is None

    def published(self) -> dict[str, Any] | None:
        """Return the endpoint data of the last agent that ran here; None: there are none."""
        return self._published(self.endpoint, self._last_endpoint)

    @staticmethod
    def _published(*files: Path) -> dict[str, Any] | None:
        for file in files:
            with suppress(FileNotFoundError, ValueError):
                place = json.loads(file.read_text())
                if isinstance(place, dict):
                    return place
        return None

    @property
    def several(self) -> bool:
        """True if the last agent that ran here belonged to a job of several nodes. The etcd of a job of several nodes outlives the agent,
        and the leader reports the events."""
        return bool(self.start().get("several"))

    def kept(self) -> Place:
        """Return the place (a directory or object store) that holds the `snapshots/` of the job that ran here last. If the run directory
        contains snapshots, that is the directory itself, even after it was moved or copied."""
        if (self.root / paths.SNAPSHOTS / MARK).exists():
            return Files(self.root)
        return place.at(self.start().get("snapshots", str(self.root)))

    @property
    def arguments(self) -> list[str] | None:
        """The script and arguments of the last run (`Spec.command`); None: not known."""
        return self.start().get("arguments")

    def start(self) -> dict[str, Any]:
        """Return what the last agent that ran here wrote at its start; empty: no agent did."""
        return next((line for line in reversed(self._milestones()) if line["kind"] == "start"), {})

    @property
    def ends(self) -> bool:
        """Whether the last agent that ran here has begun to end its job."""
        over = (Phase.ENDING, Phase.ENDED)
        last = self._milestones()[-1:]
        return any(line["kind"] == "end" or line.get("record", {}).get("phase") in over for line in last)

    def _milestones(self) -> tuple[dict[str, Any], ...]:
        with suppress(FileNotFoundError, NotADirectoryError), self.journal.open("rb") as file:
            now = os.fstat(file.fileno())  # NFS asks its server when a file is opened, and not for `stat`
            return _milestones_of(self.journal, now.st_size, now.st_mtime_ns)
        return ()

    @property
    def has_snapshot(self) -> bool:
        """The job has a committed snapshot, or its storage does not answer."""
        try:
            return bool(catalog.look(self.kept()).durable)
        except MachineError:
            return True

    def take(self) -> None:
        """Create the directory if it is missing, and lock it. Raises MachineError if it cannot be written or locked, InUse if another agent
        has locked it."""
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            self._lock = high(os.open(self.root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644))
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            opened, self._lock = self._lock, None
            if opened is not None:
                os.close(opened)
                if error.errno in (errno.EAGAIN, errno.EACCES):
                    raise self.in_use from error
            what, where = ("written", "") if opened is None else ("locked", " on a local disk")
            raise MachineError(
                f"the run directory {self.root} cannot be {what} ({error.strerror}); nothing was started. Name another one{where} with "
                "--run-dir"
            ) from error

    @property
    def in_use(self) -> InUse:
        """The error that another agent has locked this directory."""
        return InUse(
            f"another mt-resilient is running in {self.root}; look at it with: mt-resilient status --run-dir {self.root}. To "
            "train beside it, name another directory with --run-dir"
        )

    def own(self, snapshots: Place, name: str = "", shared: Path | None = None) -> None:
        """Bind the place `snapshots` to this job permanently, with a mark file. name: the job's name, if it has several nodes. shared: the
        run directory of all nodes, if a node without a mark may adopt the mark of the snapshots there (`shared_run.heir`).

        Raises UsageError if the place belongs to another job: each job would restore and delete the other's snapshots. Raises MachineError
        if this job's mark is missing: the job would start again from the beginning."""
        ours = self.root / "job"
        try:
            missed = ours.exists() and not snapshots.there(MARK)
        except MachineError as error:
            raise MachineError(f"{error}; nothing was started") from error
        if missed:
            raise MachineError(
                f"{snapshots} does not hold the snapshots of this job; nothing was started. Mount it, or name with "
                f"--snapshots the place that holds them; to begin anew, name another directory than {self.root} with --run-dir"
            )
        writable(snapshots)
        within = isinstance(snapshots, Files) and snapshots.path.parent in (self.root, shared)
        theirs = snapshots.read(MARK, _MARK_BYTES).decode(errors="replace") if snapshots.there(MARK) else ""
        identity = self.owner or (within and theirs) or _identity(name)
        if not theirs:
            snapshots.write(MARK, identity.encode(), first=not snapshots.there(MARK))  # an empty mark: power failed
            theirs = snapshots.read(MARK, _MARK_BYTES).decode(errors="replace")
        if theirs != identity:
            raise UsageError(
                f"the snapshots in {snapshots} are another job's; nothing was started. Name another place with --snapshots"
            )
        if not self.owner:  # written last: this file says that the mark in `snapshots` must exist
            Files(self.root).write("job", identity.encode())

    @property
    def owner(self) -> str:
        """The identity of the job that this directory belongs to; empty: it belongs to none yet."""
        file = self.root / "job"
        return read_file(file, _MARK_BYTES).decode(errors="replace") if file.exists() else ""

    @property
    def identity(self) -> str:
        """Eight hexadecimal digits that identify the job. Valid after `own`."""
        return self.owner[:8]

    @property
    def job(self) -> str:
        """The name of a job to which the user gave none, in characters that a key in etcd may contain."""
        return formatting.printable(self.root.name)

    def release(self) -> None:
        if self.several and self.endpoint.exists():
            self.endpoint.replace(self._last_endpoint)
        self.endpoint.unlink(missing_ok=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


@lru_cache(maxsize=16)
def _milestones_of(journal: Path, size: int, changed_ns: int) -> tuple[dict[str, Any], ...]:
    """Return the lines about starts, generations and ends. Cached, because an agent that waits for another one looks many times."""
    return tuple(line for line in Journal(journal).read() if line["kind"] in ("start", "generation", "end"))


def _machine() -> str:
    """Return a text that identifies the machine since its boot, and the container on it. Process ids are valid only there."""
    return f"{BOOT.read_text(encoding='utf-8').strip()}:{os.stat('/proc/self/ns/pid').st_ino}"


def command_again() -> str:
    """Return a shell command that starts this program again from any folder; empty: this process was started without arguments."""
    words = [Path(sys.argv[0]).name, *sys.argv[1:]]
    return f"cd {shlex.quote(os.getcwd())} && {shlex.join(words)}" if words[1:] else ""


def _identity(job: str) -> str:
    return uuid.uuid5(uuid.NAMESPACE_URL, f"mt-resilient:{job}").hex if job else uuid.uuid4().hex


def writable(snapshots: Place) -> None:
    """Check, with a test file, that the place `snapshots` can be written. If the place is a directory, create it. Raises MachineError."""
    probe = f".probe-{own_name()}"
    try:
        snapshots.write(probe, b"\0" * 4096)
        snapshots.delete(probe)
    except MachineError as error:
        what = "directory" if isinstance(snapshots, Files) else "store"
        raise MachineError(
            f"the snapshot {what} {snapshots} cannot be written ({error}); nothing was started. Make room or give another one with "
            "--snapshots"
        ) from error
