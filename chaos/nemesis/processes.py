"""Faults of processes: killed, stopped, or told to end."""

from __future__ import annotations

import shutil
import signal
from contextlib import suppress

import psutil

from ..judgement.plan import Injection
from ..live.job import Job
from .registry import Done, fault


def _send(process: psutil.Process, number: signal.Signals, name: str) -> Done:
    process.send_signal(number)
    return Done(did=f"{number.name} to {name} (process {process.pid})")


def _stop(process: psutil.Process, name: str) -> Done:
    process.send_signal(signal.SIGSTOP)

    def end() -> None:
        with suppress(psutil.Error):
            process.send_signal(signal.SIGCONT)

    return Done(did=f"SIGSTOP to {name} (process {process.pid})", end=end)


@fault(of_a_rank=True)
def rank_killed(job: Job, injection: Injection) -> Done:
    """A rank's process is killed (SIGKILL), as by the kernel when memory runs out."""
    return _send(job.rank(injection.rank), signal.SIGKILL, f"rank {injection.rank}")


@fault(of_a_rank=True)
def rank_segfaults(job: Job, injection: Injection) -> Done:
    """A rank's process gets a segmentation fault (SIGSEGV)."""
    return _send(job.rank(injection.rank), signal.SIGSEGV, f"rank {injection.rank}")


@fault(of_a_rank=True)
def rank_terminated(job: Job, injection: Injection) -> Done:
    """One rank alone is told to end (SIGTERM)."""
    return _send(job.rank(injection.rank), signal.SIGTERM, f"rank {injection.rank}")


@fault(of_a_rank=True)
def rank_stopped(job: Job, injection: Injection) -> Done:
    """A rank's process is stopped (SIGSTOP) and never continued: a hang."""
    return _send(job.rank(injection.rank), signal.SIGSTOP, f"rank {injection.rank}")


@fault()
def launcher_killed(job: Job, injection: Injection) -> Done:
    """Torchrun's own process is killed (SIGKILL)."""
    launcher = job.rank(0).parent()
    assert launcher
    return _send(launcher, signal.SIGKILL, "torchrun")


@fault()
def agent_killed(job: Job, injection: Injection) -> Done:
    """The agent (mt-resilient run) is killed (SIGKILL). Its ranks must die with it. Then the same command is given again."""
    pid = job.agent.pid
    job.restart(signal.SIGKILL, -signal.SIGKILL)
    return Done(did=f"SIGKILL to the agent (process {pid}); the same command again", needs_disk=True)


@fault(lasts_s=3.0)
def agent_stopped(job: Job, injection: Injection) -> Done:
    """The agent is stopped (SIGSTOP) for some seconds, as by a debugger or a frozen virtual machine."""
    return _stop(psutil.Process(job.agent.pid), "the agent")


@fault()
def agent_terminated(job: Job, injection: Injection) -> Done:
    """The scheduler tells the agent to end (SIGTERM). It must end in order, with exit code 143. Then the same command is given again."""
    pid = job.agent.pid
    job.restart(signal.SIGTERM, 128 + signal.SIGTERM)
    return Done(did=f"SIGTERM to the agent (process {pid}); the same command again", needs_disk=True)


@fault()
def everything_killed(job: Job, injection: Injection) -> Done:
    """The agent, its helpers and all ranks are killed at once (SIGKILL), as by a reset of the machine. Then the same command is given
    again."""
    everyone = job.everyone()
    for process in everyone:
        with suppress(psutil.Error):
            process.kill()
    job.restart(signal.SIGKILL, -signal.SIGKILL)
    return Done(did=f"SIGKILL to all {len(everyone)} processes of the job; the same command again", needs_disk=True)


@fault()
def etcd_data_lost(job: Job, injection: Injection) -> Done:
    """The agent is killed, and etcd's data in the run directory are deleted. Then the same command is given again."""
    data = job.directory.etcd
    job.restart(signal.SIGKILL, -signal.SIGKILL, lambda: shutil.rmtree(data, ignore_errors=True))
    return Done(did="SIGKILL to the agent, and etcd's data deleted; the same command again", needs_disk=True)


@fault()
def drain_killed(job: Job, injection: Injection) -> Done:
    """The drain process, which writes snapshots to disk, is killed (SIGKILL). The training must go on."""
    return _send(job.helper("drain_process", "drain process"), signal.SIGKILL, "the drain process")


@fault(lasts_s=5.0)
def drain_stopped(job: Job, injection: Injection) -> Done:
    """The drain process, which writes snapshots to disk, is stopped (SIGSTOP) for some seconds. The training must go on."""
    return _stop(job.helper("drain_process", "drain process"), "the drain process")


@fault()
def warm_killed(job: Job, injection: Injection) -> Done:
    """The warm process, from which ranks are forked, is killed (SIGKILL). The training must go on."""
    return _send(job.helper("mt-warm", "warm process"), signal.SIGKILL, "the warm process")


@fault()
def etcd_killed(job: Job, injection: Injection) -> Done:
    """The job's etcd is killed (SIGKILL). The agent starts it again, and the training must go on."""
    return _send(job.helper("etcd", "etcd of the job's own"), signal.SIGKILL, "etcd")


@fault(lasts_s=5.0)
def etcd_stopped(job: Job, injection: Injection) -> Done:
    """The job's etcd is stopped (SIGSTOP) for some seconds. The training must go on."""
    return _stop(job.helper("etcd", "etcd of the job's own"), "etcd")
