"""Faults of the disk, and of snapshots on disk and in memory."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ...checkpoint.arena.arena import Slot, State
from ...resilience.clock import sleep
from ..judgement.plan import Injection
from ..live.board_reader import memfds
from ..live.job import Job, NotThere
from .registry import Done, Fault, fault

_BLOCK = b"\0" * (1 << 20)
_REMOUNTS, _REMOUNT_S = 100, 0.05
_LEFT = 1
"""Snapshots on disk that must be left: if all are damaged, the job ends on purpose."""
_PLACE = 77
"""The byte that flips: within the first tensor of a slab, or the text of a table or manifest."""


@fault(lasts_s=6.0, root=True)
def disk_full(job: Job, injection: Injection) -> Done:
    """The disk for snapshots (a small file system that is mounted for this) is full for some seconds."""
    ballast = _disk(job) / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(_BLOCK)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
    return Done(did="filled the disk for snapshots", end=ballast.unlink)


@fault(lasts_s=6.0, root=True)
def disk_read_only(job: Job, injection: Injection) -> Done:
    """The disk for snapshots (a small file system that is mounted for this) cannot be written for some seconds."""
    disk = _disk(job)
    for _ in range(_REMOUNTS):
        if _remount(disk, "ro"):
            return Done(did="made the disk for snapshots read-only", end=lambda: _remount(disk, "rw"))
        sleep(_REMOUNT_S)  # a file is open for writing
    raise NotThere("the disk for snapshots was written all the time")


def _remount(disk: Path, how: str) -> bool:
    return subprocess.run(["mount", "-o", f"remount,{how}", disk], capture_output=True, check=False).returncode == 0


def _disk(job: Job) -> Path:
    if job.disk is None:
        raise NotThere("no small file system could be mounted")
    return job.disk


@fault(of_a_rank=True)
def memory_flipped(job: Job, injection: Injection) -> Done:
    """A bit flips in the newest snapshot that memory holds of one rank. Then that rank is killed."""
    victim = job.rank(injection.rank)
    slots = [Slot(path) for path in memfds(job.agent.pid, f"mt-resilient-{injection.rank}-")]
    sealed = {slot.header().step: slot for slot in slots if slot.header().state is State.SEALED}
    if not sealed:
        raise NotThere("no snapshot is in memory yet")
    step = max(sealed)
    with sealed[step].reading() as view:
        if view is None:
            raise NotThere("the newest snapshot in memory is being replaced")
        view.memory[5] ^= 16
    victim.kill()
    return Done(
        did=f"flipped a bit of rank {injection.rank}'s snapshot of step {step} in memory, and SIGKILL to the rank"
    )


@fault()
def journal_torn(job: Job, injection: Injection) -> Done:
    """The agent is killed while it writes its journal: the last line has no end. Then the same command is given again."""
    job.restart(signal.SIGKILL, -signal.SIGKILL, lambda: job.cut_journal(9))
    return Done(did="SIGKILL to the agent, and the end of its journal cut off; the same command again", needs_disk=True)


def _flip(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.seek(_PLACE)
        byte = opened.read(1)
        opened.seek(_PLACE)
        opened.write(bytes([byte[0] ^ 16]))


def _truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def _tear(file: Path) -> None:
    """Make the second half zeros, as a file system does whose journal has the size but not the data."""
    whole = file.stat().st_size
    _truncate(file)
    os.truncate(file, whole)


_PARTS = {
    "slab": ("rank-*/c/0/0", "tensors"),
    "table": ("rank-*/zarr.json", "table of tensors"),
    "manifest": ("rank-*.json", "manifest"),
    "commit": ("COMMIT", "mark of completeness"),
}
_DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped": (_flip, "has a flipped bit"),
    "truncated": (_truncate, "has only its first half"),
    "torn": (_tear, "has zeros in place of its second half"),
    "missing": (Path.unlink, "is missing"),
}


def _damaging(part: str, how: str) -> Fault:
    """Return the fault that one file of the newest snapshot on disk is damaged while no agent runs."""
    pattern, name = _PARTS[part]
    damage, words = _DAMAGES[how]

    def strike(job: Job, injection: Injection) -> Done:
        if len(job.on_disk()) < _LEFT + 1:
            raise NotThere("no older snapshot is on disk, without which the job ends rather than begin anew")
        hurt: list[Path] = []

        def hurt_it() -> None:
            newest = max(job.on_disk(), key=lambda each: (job.on_disk()[each], each))
            files = sorted((job.snapshots() / newest).glob(pattern))
            with suppress(IndexError):
                damage(files[-1])
                hurt.append(files[-1])

        job.restart(signal.SIGKILL, -signal.SIGKILL, hurt_it)
        if not hurt:
            raise NotThere("the snapshot was deleted meanwhile")
        where = hurt[0].relative_to(job.snapshots())
        did = f"SIGKILL to the agent, and {where} {words}; the same command again"
        return Done(did=did, needs_disk=True, damaged=where.parts[0])

    strike.__name__ = f"{part}_{how}"
    strike.__doc__ = (
        f"On disk, the {name} of the newest snapshot {words}, and the agent is killed. The same command must start from an "
        "older snapshot."
    )
    return strike


for _part in ("slab", "table", "manifest"):
    for _how in _DAMAGES:
        fault()(_damaging(_part, _how))
fault()(_damaging("commit", "missing"))
