"""Worlds to judge: a healthy job on node `a`, and what may be different about it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mt_resilient.resilience.model.cluster_state import World
from mt_resilient.resilience.model.generation import GenerationRecord
from mt_resilient.resilience.model.incident import Incident
from mt_resilient.resilience.model.node import Ack, AckKind, NodeRecord, NodeStatus, Spec
from mt_resilient.resilience.model.signals import Mismatch, RankExit
from mt_resilient.resilience.model.state_machine import Phase
from mt_resilient.resilience.model.types import Generation, NodeId, Rank, Step

A, B = NodeId("a"), NodeId("b")
NOW = 2000.0


def record(
    phase: Phase = Phase.RUN, number: int = 1, members: tuple[str, ...] = ("a",), **fields: Any
) -> GenerationRecord:
    """Opened 100 s ago, launched 90 s ago."""
    ours = {NodeId(node): f"agent-{node}" for node in members}
    times = {"opened_s": NOW - 100, "launched_s": NOW - 90 if phase is not Phase.GATHER else 0.0}
    return GenerationRecord(number=Generation(number), phase=phase, **{"members": ours, **times, **fields})


def node(name: str = "a", instance: str | None = None) -> NodeRecord:
    return NodeRecord(instance=instance or f"agent-{name}", host=name, pid=4, ranks=2)


def status(generation: int = 1, **fields: Any) -> NodeStatus:
    return NodeStatus(generation=Generation(generation), at_s=NOW - 1, **fields)


def ack(kind: AckKind, generation: int = 1, name: str = "a", port: int = 0) -> Ack:
    return Ack(kind=kind, generation=Generation(generation), instance=f"agent-{name}", at_s=NOW - 1, port=port)


def gone(rank: int = 0, at_s: float = NOW - 0.5, code: int | None = -9, **fields: Any) -> RankExit:
    return RankExit(rank=Rank(rank), at_s=at_s, code=code, **fields)


def mismatch(onset: int = 8, generation: int = 1, wrong: tuple[int, ...] = (1,), **fields: Any) -> Mismatch:
    """A parameter of three replicas."""
    found: dict[str, Any] = {
        "agreed": onset - 1,
        "tensors": ("model/w",),
        "count": 1,
        "ranks": (0, 1, 2),
        "at_s": NOW - 1,
    }
    found |= {"wrong": tuple(map(Rank, wrong))}
    return Mismatch(generation=Generation(generation), onset=Step(onset), **{**found, **fields})


def incident(ident: int = 1, generation: int = 1, rung: int = 2, at: int = 10, **fields: Any) -> Incident:
    """A restart of the worker group after a kill at step `at`."""
    story = {
        "cause": "rank_killed",
        "summary": "rank 0 on a was killed by signal 9",
        "at_s": NOW - 101,
        "started": True,
    }
    return Incident(
        id=f"{ident:04d}",
        generation=Generation(generation),
        rung=rung,
        step_at_fault=Step(at),
        **{**story, "signature": "rank_killed:-9:", **fields},
    )


def world(**changes: Any) -> World:
    """One node whose ranks have been attached and are training in generation 1, but for `changes`; for as many nodes as are members."""
    healthy: dict[str, Any] = {
        "spec": Spec(command=("torchrun", "train.py")),
        "record": record(),
        "nodes": {A: node()},
        "status": {A: status(min_step=10, max_step=10, alive=2)},
        "acks": {A: ack(AckKind.RUNNING)},
        "incidents": (),
        "requests": (),
    }
    told = {**healthy, **changes}
    if "spec" not in changes and told["record"]:
        told["spec"] = replace(told["spec"], sizes=(max(1, len(told["record"].members)),))
    return World(**told)
