"""Faults of processes: killed, stopped, or told to end."""

from __future__ import annotations

import signal
from contextlib import suppress
from itertools import pairwise

import psutil

from ..judgement.plan import Injection
from ..live.agent import Agent, NotThere
from ..live.job import Job
from .registry import Done, fault


def _send(process: psutil.Process, number: signal.Signals, name: str) -> Done:
    process.send_signal(number)
    return Done(did=f"{number.name} to {name} (process {process.pid})")


def stop(*processes: psutil.Process, name: str) -> Done:
    """Stop processes until the fault is over. name: what people call them."""
    for process in processes:
        process.send_signal(signal.SIGSTOP)

    def end() -> None:
        for process in processes:
            with suppress(psutil.Error):
                process.send_signal(signal.SIGCONT)

    return Done(did=f"SIGSTOP to {name}", end=end)


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
    agents = {agent.pid for agent in job.agents}
    above = job.rank(0).parents()  # beginning with its own parent, which may be a wrapper of the script
    launcher = next((child for child, parent in pairwise(above) if parent.pid in agents), None)
    if launcher is None:
        raise NotThere("torchrun has ended")
    return _send(launcher, signal.SIGKILL, "torchrun")


@fault(of_a_node=True, parts_nodes=True)
def agent_killed(job: Job, injection: Injection) -> Done:
    """The agent (mt-resilient run) is killed (SIGKILL). The agent's ranks must die with it. The killed agent's command is then given
    again."""
    return kill_agent(job, job.agent(injection.node))


def kill_agent(job: Job, agent: Agent) -> Done:
    pid = agent.pid
    job.restart(signal.SIGKILL, -signal.SIGKILL, only=agent)
    did = f"SIGKILL to {agent} (process {pid}); the same command again"
    return Done(did=did, needs_disk=not agent.name, needs_copy=bool(agent.name))


@fault(of_a_node=True, lasts_s=3.0, parts_nodes=True)
def agent_stopped(job: Job, injection: Injection) -> Done:
    """The agent is stopped (SIGSTOP) for some seconds, as by a debugger or a frozen virtual machine."""
    agent = job.agent(injection.node)
    return stop(psutil.Process(agent.pid), name=str(agent))


@fault(parts_nodes=True)
def agent_terminated(job: Job, injection: Injection) -> Done:
    """Every running agent of the job gets SIGTERM, as from a scheduler that ends the job. Each agent must end in order, with exit code 143.
    The same command is then given again."""
    told = " and ".join(str(agent) for agent in job.agents if agent.running)
    job.restart(signal.SIGTERM, 128 + signal.SIGTERM)
    return Done(did=f"SIGTERM to {told}; the same command again", needs_disk=True)


@fault(parts_nodes=True)
def everything_killed(job: Job, injection: Injection) -> Done:
    """All agents, their helpers and all ranks are killed at once (SIGKILL), as by a power failure. The same command is then given again."""
    killed = sum(agent.kill_everyone() for agent in job.agents if agent.running)
    job.restart(signal.SIGKILL, -signal.SIGKILL)
    return Done(did=f"SIGKILL to all {killed} processes of the job; the same command again", needs_disk=True)


@fault(of_a_node=True, goes_on=True)
def drain_killed(job: Job, injection: Injection) -> Done:
    """The drain process, which writes snapshots to disk, is killed (SIGKILL). The training must go on."""
    return _send(
        job.agent(injection.node).helper("drain_process", "drain process"), signal.SIGKILL, "the drain process"
    )


@fault(of_a_node=True, lasts_s=5.0, goes_on=True)
def drain_stopped(job: Job, injection: Injection) -> Done:
    """The drain process, which writes snapshots to disk, is stopped (SIGSTOP) for some seconds. The training must go on."""
    return stop(job.agent(injection.node).helper("drain_process", "drain process"), name="the drain process")


@fault(of_a_node=True, goes_on=True)
def warm_killed(job: Job, injection: Injection) -> Done:
    """The warm process, from which ranks are forked, is killed (SIGKILL). The training must go on."""
    return _send(job.agent(injection.node).helper("mt-warm", "warm process"), signal.SIGKILL, "the warm process")
