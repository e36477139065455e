"""Faults of nodes: lost, with or without their buddy, cut off, behind a bad link, or with a wrong clock. Of agents: the leader's."""

from __future__ import annotations

from ..judgement.plan import Injection
from ..live import clock
from ..live.agent import Agent, NotThere
from ..live.job import Job
from ..live.network import Network
from .processes import kill_agent
from .registry import Done, Fault, Need, fault

_RATE, _LATE_S, _SHARE = "2mbit", 0.1, 0.1
_AHEAD_S = 300.0


@fault(Need.NODES, parts_nodes=True)
def leader_killed(job: Job, injection: Injection) -> Done:
    """The agent that leads is killed (SIGKILL): another must lead. The killed agent's command is then given again."""
    done = kill_agent(job, _agent(job, job.cluster.leader()))
    return Done(did=f"{done.did} (it led)", needs_copy=True)


@fault(Need.NODES, of_a_node=True, lasts_s=5.0, parts_nodes=True)
def node_lost(job: Job, injection: Injection) -> Done:
    """A node loses its power: all its processes are killed at once. If the node has a network namespace, its link is cut first, so nothing
    on the network tells of the loss. Some seconds later, the node's command is given there again."""
    return _off(job, [job.agent(injection.node)])


@fault(Need.NODES, of_a_node=True, lasts_s=5.0, parts_nodes=True)
def node_and_buddy_lost(job: Job, injection: Injection) -> Done:
    """A node and the node that holds copies of its snapshots lose their power together. Some seconds later, the commands of both nodes are
    given again, and the job starts from disk. If the node only stands by, the first node that trains is lost instead."""
    record = job.record or {}
    members = [*record.get("members", ())]
    if not members:
        raise NotThere("no node trains")
    agent = job.agent(injection.node)
    agent = agent if agent.name in members else _agent(job, members[0])
    half = (members.index(agent.name) + len(members) // 2) % len(members)
    holder = record["holders"].get(agent.name, members[half])
    return _off(job, [agent, _agent(job, holder)])


def _agent(job: Job, name: str) -> Agent:
    """Return the agent of the node that has this name. Raises NotThere if it has ended."""
    return job.agent(job.cluster.names.index(name) + 1)


def _off(job: Job, agents: list[Agent]) -> Done:
    """Let nodes lose their power. agents: theirs, which run."""
    hosts = job.cluster.hosts
    for agent in agents:
        if isinstance(hosts, Network):
            hosts.link(agent.name, up=False)
        agent.kill_everyone()
        agent.away = True

    def end() -> None:
        for agent in agents:
            if isinstance(hosts, Network):
                hosts.link(agent.name, up=True)
            if agent.away:
                agent.process.wait()
                job.start(agent)

    names = " and ".join(agent.name for agent in agents)
    return Done(did=f"{names} lost", end=end, needs_disk=len(agents) > 1, needs_copy=len(agents) == 1)


@fault(Need.NETWORK, of_a_node=True, lasts_s=8.0, parts_nodes=True)
def network_cut(job: Job, injection: Injection) -> Done:
    """A node is cut off from the network for some seconds. The node must end its ranks before others go on without it."""
    network, name = job.cluster.network, job.agent(injection.node).name
    network.link(name, up=False)
    return Done(did=f"{name} cut off from the network", end=lambda: network.link(name, up=True))


@fault(Need.NETWORK, of_a_node=True, lasts_s=8.0, parts_nodes=True)
def network_cut_one_way(job: Job, injection: Injection) -> Done:
    """For some seconds, nothing that a node sends arrives. What others send to it does."""
    network, name = job.cluster.network, job.agent(injection.node).name
    network.lose(name, 1.0, received=False)
    return Done(did=f"all that {name} sends is lost", end=lambda: network.lose(name, 0.0))


@fault(Need.NETWORK, of_a_node=True, lasts_s=8.0, harmless=True, parts_nodes=True)
def network_lossy(job: Job, injection: Injection) -> Done:
    """A node's link loses a tenth of all frames, both ways, for some seconds. Nothing may restart because of the lost frames."""
    network, name = job.cluster.network, job.agent(injection.node).name
    network.lose(name, _SHARE)
    return Done(did=f"the link of {name} loses {_SHARE:.0%} of its frames", end=lambda: network.lose(name, 0.0))


@fault(Need.NETWORK, of_a_node=True, lasts_s=8.0, harmless=True, parts_nodes=True, slows_steps=True)
def network_slow(job: Job, injection: Injection) -> Done:
    """A node's link has 2 Mbit/s, both ways, for some seconds. Nothing may restart because of the slow link, unless a node stands by."""
    network, name = job.cluster.network, job.agent(injection.node).name
    network.shape(name, _RATE)
    return Done(did=f"the link of {name} has {_RATE}", end=lambda: network.even(name))


@fault(Need.NETWORK, Need.DELAYS, of_a_node=True, lasts_s=8.0, harmless=True, parts_nodes=True)
def network_delayed(job: Job, injection: Injection) -> Done:
    """Each frame to and from a node comes 0.1 s later, for some seconds. Nothing may restart because of the delay."""
    network, name = job.cluster.network, job.agent(injection.node).name
    network.delay(name, _LATE_S)
    return Done(did=f"frames to and from {name} come {_LATE_S:g} s later", end=lambda: network.even(name))


def _clock(ahead_s: float) -> Fault:
    word = "ahead" if ahead_s > 0 else "back"

    def strike(job: Job, injection: Injection) -> Done:
        agent = job.agent(injection.node)
        clock.put(agent.place.clock, ahead_s)
        did = f"the clock of {agent.name or 'the machine'} set {word} by {abs(ahead_s):g} s"
        return Done(did=did, end=lambda: clock.put(agent.place.clock, 0.0))

    strike.__name__ = f"clock_{word}"
    strike.__doc__ = (
        f"A node's clock of the day is set {word} by {abs(ahead_s):g} s, and right again some seconds later. Nothing "
        "may restart because of it."
    )
    return strike


for _ahead_s in (_AHEAD_S, -_AHEAD_S):
    fault(Need.CLOCK, of_a_node=True, lasts_s=6.0, harmless=True, parts_nodes=True)(_clock(_ahead_s))
