"""Faults of etcd: the job's own, or the three members that a job of several nodes has."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

import psutil

from ..judgement.plan import Injection
from ..live import small_disk
from ..live.agent import NotThere
from ..live.etcd_members import Members
from ..live.job import Job
from .processes import stop
from .registry import Done, Need, fault


def _own(job: Job) -> psutil.Process:
    return job.agent(1).helper("etcd", "etcd of the job's own")


@fault(Need.ONE_NODE, goes_on=True, parts_nodes=True)
def etcd_killed(job: Job, injection: Injection) -> Done:
    """The job's etcd is killed (SIGKILL). The agent starts it again, and the training must go on."""
    process = _own(job)
    process.kill()
    return Done(did=f"SIGKILL to etcd (process {process.pid})")


@fault(lasts_s=5.0, goes_on=True, parts_nodes=True)
def etcd_stopped(job: Job, injection: Injection) -> Done:
    """The job's etcd, or every member of it, is stopped (SIGSTOP) for some seconds. The training must go on."""
    members = job.cluster.etcd.processes.values() if job.cluster.etcd else ()
    found = [psutil.Process(member.pid) for member in members]
    return stop(*(found or [_own(job)]), name=f"all {len(found)} members of etcd" if found else "etcd")


@fault(parts_nodes=True)
def etcd_data_lost(job: Job, injection: Injection) -> Done:
    """All data of etcd are deleted. In a job of several nodes its members are killed and begin anew, and the training must go on. In a job
    of one node, the agent is killed, and the same command is given again."""
    if etcd := job.cluster.etcd:
        etcd.kill(*etcd.names)
        etcd.forget(etcd.names)
        etcd.start(*etcd.names)
        return Done(did=f"SIGKILL to all {len(etcd.names)} members of etcd, and their data deleted; they begin anew")
    data = job.agent(1).directory.etcd
    job.restart(signal.SIGKILL, -signal.SIGKILL, lambda: shutil.rmtree(data, ignore_errors=True))
    job.forgot = True
    return Done(did="SIGKILL to the agent, and etcd's data deleted; the same command again", needs_disk=True)


@fault(Need.NODES, lasts_s=6.0, goes_on=True, parts_nodes=True)
def etcd_member_killed(job: Job, injection: Injection) -> Done:
    """One of three members of etcd is killed (SIGKILL), and started again some seconds later. The training must go on."""
    return _kill(job, 1)


@fault(Need.NODES, lasts_s=6.0, goes_on=True, parts_nodes=True)
def etcd_majority_killed(job: Job, injection: Injection) -> Done:
    """Two of three members of etcd are killed (SIGKILL), and started again some seconds later. Meanwhile nothing can be read or written
    there, and the training must go on."""
    return _kill(job, 2)


@fault(Need.ETCD_DEVICE, lasts_s=6.0, goes_on=True, parts_nodes=True)
def etcd_disk_full(job: Job, injection: Injection) -> Done:
    """The disk with the data of the job's etcd, or of all members (a small file system on a loop device), is full for some seconds. Members
    that ended because of it are then started again. The training must go on."""
    empty = small_disk.fill(_disk(job, injection))

    def end() -> None:
        empty()
        if etcd := job.cluster.etcd:
            _start_again(etcd, etcd.names)

    return Done(did="filled the disk with etcd's data", end=end)


@fault(Need.ETCD_DEVICE, lasts_s=8.0, goes_on=True, parts_nodes=True)
def etcd_slow_fsync(job: Job, injection: Injection) -> Done:
    """For some seconds, each write of the job's etcd (of all its members) waits for up to 0.5 s: etcd's disk (a small file system on a loop
    device) is frozen again and again. The training must go on."""
    job.cluster.slowing = slowing = small_disk.slow(_disk(job, injection), injection.for_s)
    return Done(did="each write of etcd waits for up to 0.5 s", end=slowing.wait)


def _disk(job: Job, injection: Injection) -> Path:
    if job.cluster.etcd_disk is None:
        raise NotThere("no small file system for etcd's data could be mounted")
    job.disk_fails(injection.for_s)
    return job.cluster.etcd_disk


def _kill(job: Job, count: int) -> Done:
    etcd = job.cluster.members
    names = etcd.names[:count]
    etcd.kill(*names)

    did = f"SIGKILL to {' and '.join(names)} of {len(etcd.names)} members of etcd"
    return Done(did=did, end=lambda: _start_again(etcd, names))


def _start_again(etcd: Members, names: Sequence[str]) -> None:
    """Start those of these members that do not run. Another fault may have started some of them meanwhile."""
    etcd.start(*(name for name in names if etcd.processes[name].poll() is not None))
