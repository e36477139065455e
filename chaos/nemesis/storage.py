"""Faults of the disk, and of snapshots on disk and in memory."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ...checkpoint.arena.arena import Slot, State
from ...resilience.clock import sleep, wall_s
from ..judgement.plan import Injection
from ..live import small_disk
from ..live.agent import NotThere
from ..live.board_reader import memfds
from ..live.job import Job
from .registry import Done, Fault, Need, fault

_REMOUNTS, _REMOUNT_S = 100, 0.05
_LEFT = 1
"""Snapshots on disk that must be left: if all are damaged, the job ends on purpose."""
_SYNCED_S = 0.3
"""The name of a snapshot that is this old has been synced: it appears a moment before that."""
_PLACE = 77
"""The byte that flips: within the first tensor of a slab, or the text of a table or manifest."""


@fault(Need.ROOT, lasts_s=6.0, goes_on=True, parts_nodes=True)
def disk_full(job: Job, injection: Injection) -> Done:
    """The disk for snapshots (a small file system that is mounted for this) is full for some seconds."""
    return Done(did="filled the disk for snapshots", end=small_disk.fill(_disk(job, injection)))


@fault(Need.ROOT, lasts_s=6.0, goes_on=True, parts_nodes=True)
def disk_read_only(job: Job, injection: Injection) -> Done:
    """The disk for snapshots (a small file system that is mounted for this) cannot be written for some seconds."""
    disk = _disk(job, injection)
    for _ in range(_REMOUNTS):
        if _remount(disk, "ro"):
            return Done(did="made the disk for snapshots read-only", end=lambda: _remount(disk, "rw"))
        sleep(_REMOUNT_S)  # a file is open for writing
    raise NotThere("the disk for snapshots was written all the time")


@fault(Need.DEVICE, lasts_s=6.0, goes_on=True, parts_nodes=True)
def disk_errors(job: Job, injection: Injection) -> Done:
    """The disk for snapshots (a small file system on a loop device) reports an error for each write (EIO), for some seconds."""
    disk = _disk(job, injection)
    small_disk.break_device(disk)
    return Done(did="the disk for snapshots reports EIO", end=lambda: small_disk.break_device(disk, broken=False))


@fault(Need.DEVICE, lasts_s=6.0, goes_on=True, parts_nodes=True)
def disk_hangs(job: Job, injection: Injection) -> Done:
    """Each process that writes to the disk for snapshots (a small file system on a loop device) waits for some seconds, as with a slow
    fsync."""
    freezer = small_disk.freeze(_disk(job, injection), injection.for_s)
    return Done(did="all writes to the disk for snapshots wait", end=freezer.wait)


@fault(Need.DEVICE, parts_nodes=True)
def power_lost(job: Job, injection: Injection) -> Done:
    """All nodes lose their power: all processes are killed (SIGKILL), and the disk for snapshots (a small file system on a loop device)
    keeps only what was synced. Then the same command is given again, and must start from the newest snapshot on disk."""
    _require_a_well_disk(job)
    if any(agent.away for agent in job.agents):
        raise NotThere("a node is away, and would come back while the disk fails")
    disk, newest_s = _disk(job, injection), max((job.committed_s(name) for name in job.on_disk()), default=0.0)
    if wall_s() - newest_s < _SYNCED_S:
        raise NotThere("a snapshot on disk was being completed all the time")
    small_disk.break_device(disk)
    killed = sum(agent.kill_everyone() for agent in job.agents if agent.running)
    job.restart(signal.SIGKILL, -signal.SIGKILL, lambda: small_disk.after_power_loss(disk))
    did = f"SIGKILL to all {killed} processes of the job, and the disk lost what was not synced; the same command again"
    return Done(did=did, needs_disk=True)


def _require_a_well_disk(job: Job) -> None:
    """Raise NotThere while another fault of the disk lasts: files cannot be damaged, and what was synced is not known."""
    if not job.disk_is_well:
        raise NotThere("another fault of the disk lasts")


def _remount(disk: Path, how: str) -> bool:
    return subprocess.run(["mount", "-o", f"remount,{how}", disk], capture_output=True, check=False).returncode == 0


def _disk(job: Job, injection: Injection) -> Path:
    if job.cluster.disk is None:
        raise NotThere("no small file system could be mounted")
    job.disk_fails(injection.for_s)
    return job.cluster.disk


@fault(of_a_rank=True, corrupts=True)
def memory_flipped(job: Job, injection: Injection) -> Done:
    """A bit flips in the newest snapshot that memory holds of one rank. Then that rank is killed."""
    victim, step = job.rank(injection.rank), _flip_in_memory(job, injection.rank)
    victim.kill()
    return Done(
        did=f"flipped a bit of rank {injection.rank}'s snapshot of step {step} in memory, and SIGKILL to the rank"
    )


@fault(of_a_rank=True, harmless=True, corrupts=True)
def bit_in_arena(job: Job, injection: Injection) -> Done:
    """A bit flips in the newest snapshot that memory holds of one rank. Nothing may restart because of it, and the snapshot may not get to
    disk."""
    step = _flip_in_memory(job, injection.rank)
    return Done(did=f"flipped a bit of rank {injection.rank}'s snapshot of step {step} in memory")


def _flip_in_memory(job: Job, rank: int) -> int:
    """Flip a bit in the newest snapshot of this rank in memory. Return its step. Raises NotThere."""
    agent, at = job.place_of(rank)
    slots = [Slot(path) for path in memfds(agent.pid, f"mt-resilient-{at}-")]
    sealed = {slot.header().step: slot for slot in slots if slot.header().state is State.SEALED}
    if not sealed:
        raise NotThere("no snapshot is in memory yet")
    step = max(sealed)
    with sealed[step].reading() as view:
        if view is None:
            raise NotThere("the newest snapshot in memory is being replaced")
        view.memory[5] ^= 16
    return step


@fault(parts_nodes=True)
def journal_torn(job: Job, injection: Injection) -> Done:
    """The agent is killed while it writes its journal: the last line has no end. Then the same command is given again."""
    job.restart(signal.SIGKILL, -signal.SIGKILL, lambda: job.agents[0].cut_journal(9))
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
        _require_a_well_disk(job)
        if len(job.on_disk()) < _LEFT + 1:
            raise NotThere("no older snapshot is on disk, without which the job ends rather than begin anew")
        hurt: list[Path] = []

        def hurt_it() -> None:
            newest = max(job.on_disk(), key=lambda each: (job.on_disk()[each], each))
            files = sorted((job.snapshots / newest).glob(pattern))
            with suppress(IndexError):
                damage(files[-1])
                hurt.append(files[-1])

        job.restart(signal.SIGKILL, -signal.SIGKILL, hurt_it)
        if not hurt:
            raise NotThere("the snapshot was deleted meanwhile")
        where = hurt[0].relative_to(job.snapshots)
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
        fault(parts_nodes=True)(_damaging(_part, _how))
fault(parts_nodes=True)(_damaging("commit", "missing"))
