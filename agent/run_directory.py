"""The run directory: everything of one job on this node that outlives the agent. Its lock lets only one agent use it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..checkpoint.backend import paths, place
from ..checkpoint.backend.filesystem import Files, own_name, read_file
from ..checkpoint.backend.place import Place
from ..resilience.errors import MachineError, UsageError
from ..resilience.ipc.file_descriptors import high
from ..resilience.report.journal import Journal
from ..resilience.store.etcd.access import Papers
from ..resilience.text import formatting
from .ranks.exit_codes import born

MARK = paths.JOB
_MARK_BYTES = 1024


class RunDirectory:
    """`<root>/` etcd/ · snapshots/ · logs/ · journal.jsonl · endpoint · lock"""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self._lock: int | None = None

    @property
    def etcd(self) -> Path:
        return self.root / "etcd"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def leaving(self) -> Path:
        """File for the stacks of an agent that hung on its way out."""
        return self.logs / "leaving.log"

    @property
    def journal(self) -> Path:
        return self.root / "journal.jsonl"

    @property
    def journals(self) -> list[Path]:
        """Its own journal, and those of nodes that were started from here, as far as they lie here. The leader's journal tells of the whole
        job."""
        return [self.journal, *sorted(self.root.glob("nodes/*/journal.jsonl"))]

    @property
    def endpoint(self) -> Path:
        """Job name and etcd endpoints of the running agent, for the other commands."""
        return self.root / "endpoint"

    def publish(self, job: str, endpoints: Sequence[str], papers: Papers) -> None:
        """Write down for the other commands where the running agent's store is, and which files let them in. No secret is among it. Raises
        MachineError."""
        me = {"pid": os.getpid(), "born": born(os.getpid())}
        told = {"job": job, "endpoints": [*endpoints], "papers": asdict(papers.absolute()), **me}
        try:
            self.endpoint.write_text(json.dumps(told))
        except OSError as error:
            raise MachineError(f"{self.endpoint} cannot be written ({error.strerror}); nothing was started") from error

    def agent(self) -> dict[str, Any] | None:
        """What the agent that runs here has published; None if none runs."""
        place = self._published(self.endpoint)
        since = born(place["pid"]) if place else ""
        return place if place and since and place.get("born", since) == since else None

    def published(self) -> dict[str, Any] | None:
        """What the last agent that ran here has published."""
        return self._published(self.endpoint, self._last_endpoint)

    @staticmethod
    def _published(*files: Path) -> dict[str, Any] | None:
        for file in files:
            with suppress(FileNotFoundError, ValueError):
                place: dict[str, Any] = json.loads(file.read_text())
                return place
        return None

    @property
    def _last_endpoint(self) -> Path:
        """With several nodes: what an agent had published before it left in order."""
        return self.root / "endpoint.last"

    @property
    def several(self) -> bool:
        """Whether the agent that ran here last was one of several nodes. Their etcd outlives it, and the leader tells what happens."""
        starts = [line for line in Journal(self.journal).read() if line["kind"] == "start"]
        return bool(starts and starts[-1].get("several"))

    def kept(self) -> Place:
        """The place that holds the `snapshots/` of the job that ran here last. A directory that was moved or copied uses its own."""
        if (self.root / paths.SNAPSHOTS / MARK).exists():
            return Files(self.root)
        starts = [line for line in Journal(self.journal).read() if line["kind"] == "start"]
        return place.at(starts[-1]["snapshots"] if starts else str(self.root))

    @property
    def modules(self) -> Path:
        return self.root / "modules.json"

    @property
    def finished(self) -> Path:
        """Its existence marks that the training has reached its end, and that nothing of it is missing."""
        return self.root / "finished"

    def take(self) -> None:
        """Create the directory if it is missing, and lock it. Raises MachineError if it cannot be written, UsageError if another agent has
        it."""
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            self._lock = high(os.open(self.root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644))
        except OSError as error:
            raise MachineError(
                f"the run directory {self.root} cannot be written ({error.strerror}); nothing was started. Name another one with --run-dir"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            raise UsageError(
                f"another mt-resilient is running in {self.root}; look at it with: mt-resilient status --run-dir {self.root}"
            ) from error

    def own(self, snapshots: Place, name: str = "") -> None:
        """Make `snapshots` this job's for good. name: the job's name, if it has several nodes. Raises UsageError if they are another job's:
        each job would take the other's state for its own, and retire it. Raises MachineError if they lack this job's mark: the job would
        begin anew."""
        ours = self.root / "job"
        try:
            missed = ours.exists() and not snapshots.there(MARK)
        except MachineError as error:
            raise MachineError(f"{error}; nothing was started") from error
        if missed:
            raise MachineError(
                f"{snapshots} does not hold the snapshots of this job; nothing was started. Mount it, or name the place "
                f"that holds them with --snapshots; to begin anew, name another directory than {self.root} with --run-dir"
            )
        writable(snapshots)
        within = isinstance(snapshots, Files) and snapshots.path.parent == self.root
        theirs = snapshots.read(MARK, _MARK_BYTES).decode(errors="replace") if snapshots.there(MARK) else ""
        identity = _text(ours) if ours.exists() else (within and theirs) or _identity(name)
        if not theirs:
            snapshots.write(MARK, identity.encode())
        if not ours.exists():  # last: it says that the mark in `snapshots` must exist
            ours.write_text(identity)
        if (theirs or identity) != _text(ours):
            raise UsageError(
                f"the snapshots in {snapshots} are another job's; nothing was started. Name another place with --snapshots"
            )

    @property
    def identity(self) -> str:
        """Eight hexadecimal digits that no other job has; after `own`."""
        return _text(self.root / "job")[:8]

    @property
    def job(self) -> str:
        """The name of a job that was given none, in characters that a key of the store may have."""
        return formatting.printable(self.root.name)

    def release(self) -> None:
        if self.several and self.endpoint.exists():
            self.endpoint.replace(self._last_endpoint)
        self.endpoint.unlink(missing_ok=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _text(file: Path) -> str:
    return read_file(file, _MARK_BYTES).decode(errors="replace")


def _identity(job: str) -> str:
    return uuid.uuid5(uuid.NAMESPACE_URL, f"mt-resilient:{job}").hex if job else uuid.uuid4().hex


def writable(snapshots: Place) -> None:
    """Try to write to `snapshots`; create it if it is a directory. Raises MachineError with one sentence."""
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
