"""The objects that `--json` and hooks give to other programs. `scripts/dashboards` makes their JSON schemas (docs/schemas/). Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..model.generation import GenerationRecord, Quarantine
from ..model.incident import Incident
from ..model.node import NodeStatus
from ..model.request import Request
from ..model.types import NodeId


@dataclass(frozen=True, kw_only=True)
class StatusObject:
    """`mt-resilient status --json`."""

    job: str
    directory: str
    """The run directory."""
    running: bool
    """Whether an agent runs, here or on another node."""
    finished: bool
    mood: str
    """Whether a person must act: good, info, warn or bad."""
    words: str
    """What the job does, in one sentence."""
    act: str
    """What a person should do now."""
    state: str | None
    """`mt_resilient_state` of the metrics. null: not known."""
    step: int | None
    total: int | None
    """Number of steps after which the loop ends. null: not known."""
    step_s: float | None
    """Seconds that a step takes."""
    loss: float | None
    up_s: float | None
    """Seconds since the present agent started; null: none runs here."""
    snapshots: dict[str, int] = field(default_factory=dict)
    """By tier: the newest step that the whole job can restore; -1: none."""
    at_risk: dict[str, int] = field(default_factory=dict)
    """By loss: number of steps that would be computed again if it happened now."""
    doing: str = ""
    generation: GenerationRecord | None = None
    """This and what follows is etcd's; empty or null while no agent runs, or etcd does not answer."""
    leader: str | None = None
    roles: dict[str, str] = field(default_factory=dict)
    """By node: what it does in the job."""
    quarantine: dict[NodeId, Quarantine] = field(default_factory=dict)
    orders: tuple[Request, ...] = ()
    """Orders that are not done yet."""
    nodes: dict[NodeId, NodeStatus] = field(default_factory=dict)
    incidents: tuple[Incident, ...] = ()
