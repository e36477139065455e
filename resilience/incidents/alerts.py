"""Findings that need no recovery. Each finding is reported once, as an incident on rung 0 that is closed when the finding is gone. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from ..model.cause import Cause
from ..model.cluster_state import World
from ..model.incident import Incident
from ..model.node import NodeStatus
from ..model.signals import Complaint, Shortage, Straggler
from ..model.types import NodeId, Step
from ..plan.escalation import OBSERVE
from ..text import sentences
from .lifecycle import next_id

T = TypeVar("T")


def _news(
    world: World, cause: Cause, seen: Mapping[str, T], tell: Callable[[str, str, T], Incident]
) -> tuple[Incident, ...]:
    """Return new incidents, and incidents that are now closed. seen: findings by signature; tell: makes an incident from its number, its
    signature and a finding."""
    known = {incident.signature: incident for incident in world.incidents if incident.cause == cause}
    over = [replace(i, open=False) for i in known.values() if i.open and i.signature not in seen]
    fresh = [(signature, found) for signature, found in seen.items() if signature not in known]
    return (*over, *(tell(next_id(world, n), signature, found) for n, (signature, found) in enumerate(fresh)))


def cut_off_told(world: World, away: Sequence[NodeId], unseen: bool) -> tuple[Incident, ...]:
    """Return incidents of members that are only cut off from etcd. An incident is closed when the member reaches etcd, or no longer trains.
    unseen: no node reports whether they train."""
    record = world.present

    def tell(ident: str, signature: str, node: NodeId) -> Incident:
        said = world.status.get(node)
        return Incident(
            id=ident,
            generation=record.number,
            cause=Cause.CUT_OFF,
            rung=OBSERVE,
            summary=sentences.cut_off(node, unseen),
            plan=sentences.left_alone(unseen),
            at_s=said.at_s if said else record.launched_s,
            step_at_fault=said.max_step if said else record.resume_step,
            started=True,
            nodes=(node,),
            signature=signature,
        )

    told_s = {node: world.status[node].at_s if node in world.status else 0 for node in away}
    seen = {f"{Cause.CUT_OFF}:{record.members[node]}:{at_s}": node for node, at_s in told_s.items()}
    return _news(world, Cause.CUT_OFF, seen, tell)


def frozen_told(world: World) -> tuple[Incident, ...]:
    """Return incidents of parameters that do not change. An incident is closed when they change again."""

    def tell(ident: str, signature: str, status: NodeStatus) -> Incident:
        return Incident(
            id=ident,
            generation=status.generation,
            cause=Cause.FROZEN,
            rung=OBSERVE,
            summary=f"no parameter has changed since step {status.frozen}",
            evidence=("the learning rate is not 0, and all fingerprints of the parameters are the same",),
            plan="the program does nothing. Check the optimizer, the gradients and the learning rate",
            at_s=status.at_s,
            step_at_fault=status.max_step,
            started=True,
            signature=signature,
        )

    seen: dict[str, NodeStatus] = {}
    for status in world.uncalm_statuses():
        if status.frozen >= 0:
            seen.setdefault(f"{Cause.FROZEN}:{status.frozen}", status)
    return _news(world, Cause.FROZEN, seen, tell)


def stragglers_told(world: World) -> tuple[Incident, ...]:
    """Return incidents of ranks that have become slow. An incident is closed when the rank is no longer slow, or gone."""
    record = world.present

    def tell(ident: str, signature: str, seen: tuple[NodeId, Straggler]) -> Incident:
        node, found = seen
        return Incident(
            id=ident,
            generation=record.number,
            cause=Cause.STRAGGLER,
            rung=OBSERVE,
            summary=sentences.straggler(found, node),
            evidence=sentences.straggling(found),
            plan="the program does nothing; the other ranks wait for this rank at each step",
            at_s=found.at_s,
            step_at_fault=found.step,
            started=True,
            signature=signature,
        )

    slow = {
        f"{Cause.STRAGGLER}:{status.generation}:{found.rank}:{found.step}": (node, found)
        for node, status in world.uncalm().items()
        if status.generation == record.number
        for found in status.stragglers
    }
    return _news(world, Cause.STRAGGLER, slow, tell)


def _present(world: World) -> dict[NodeId, NodeStatus]:
    """Return the statuses with something rare of nodes that are here or train, since the job was last started. etcd also keeps the last
    status of each node that has gone."""
    first = world.spec.first_generation if world.spec else 0
    here = world.nodes.keys() | {*world.members}
    return {node: told for node, told in world.uncalm().items() if node in here and told.generation >= first}


def shortages_told(world: World, observe: bool) -> tuple[Incident, ...]:
    """Return incidents of memory that runs out. An incident is closed when the memory no longer runs out."""
    asked = "the agent asks for snapshots on disk while the shortage lasts, so that little is lost if the kernel kills a rank"

    def tell(ident: str, signature: str, seen: tuple[NodeId, NodeStatus, Shortage]) -> Incident:
        node, status, found = seen
        return Incident(
            id=ident,
            generation=status.generation,
            cause=Cause.MEMORY_SHORT,
            rung=OBSERVE,
            would=OBSERVE if observe else None,
            summary=sentences.shortage(found, node),
            evidence=sentences.growth(found),
            plan=sentences.would(asked) if observe else asked,
            at_s=found.at_s,
            step_at_fault=status.max_step,
            started=status.max_step >= 0,
            signature=signature,
        )

    short = {
        f"{Cause.MEMORY_SHORT}:{node}:{status.shortage.at_s}": (node, status, status.shortage)
        for node, status in _present(world).items()
        if status.shortage
    }
    return _news(world, Cause.MEMORY_SHORT, short, tell)


def complaints_told(world: World) -> tuple[Incident, ...]:
    """Return incidents of what devices report about themselves. Each such incident is closed from the start, because it needs no
    recovery."""

    def tell(ident: str, signature: str, seen: tuple[NodeId, NodeStatus, Complaint]) -> Incident:
        node, status, found = seen
        return Incident(
            id=ident,
            generation=status.generation,
            cause=Cause.DEVICE_SICK,
            rung=OBSERVE,
            summary=sentences.complaint(found, node),
            plan="the program does nothing while the training continues. Check the device when the job can spare it",
            at_s=found.at_s,
            step_at_fault=Step(found.step),
            started=found.step >= 0,
            signature=signature,
            open=False,
        )

    sick = {
        f"{Cause.DEVICE_SICK}:{node}:{found.at_s}:{found.device}:{found.words}": (node, status, found)
        for node, status in _present(world).items()
        for found in status.complaints
    }
    return _news(world, Cause.DEVICE_SICK, sick, tell)
