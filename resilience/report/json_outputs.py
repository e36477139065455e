"""The objects that `--json` and hooks give to other programs. `scripts/dashboards` makes their JSON schemas (docs/schemas/). Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..model.generation import GenerationRecord, Quarantine
from ..model.incident import Incident
from ..model.node import NodeStatus
from ..model.request import Request
from ..model.types import NodeId
from ..text import formatting
from . import explain
from .needs import NOTHING, Needs, needs


@dataclass(frozen=True, kw_only=True)
class IncidentObject:
    """An incident, in `mt-resilient explain --json` and in what hooks get."""

    number: str
    """The number by which `mt-resilient explain` takes it."""
    result: str
    """What became of it, as in the metrics (`mt_resilient_recoveries_total`); `under way` while it is open."""
    needs: Needs
    lost_steps: int
    seconds: float
    """The sum of `incident.phases_s`."""
    incident: Incident


def incident_object(number: str, incident: Incident) -> IncidentObject:
    return IncidentObject(
        number=number,
        result="under way" if incident.open else explain.result(incident),
        needs=needs(incident),
        lost_steps=incident.lost_steps,
        seconds=round(sum(incident.phases_s.values()), 3),
        incident=incident,
    )


@dataclass(frozen=True, kw_only=True)
class HookObject:
    """What a hook gets (`hooks.on_incident`)."""

    event: str
    """`began`, or `over`. An incident that is over when it is first known has `over` alone."""
    text: str
    """One sentence for people."""
    job: str
    node: str
    """The node whose agent leads."""
    directory: str
    """That agent's run directory."""
    incident: IncidentObject


def hook_object(incident: Incident, job: str, node: str, directory: str) -> HookObject:
    told = incident_object(incident.id.lstrip("0"), incident)
    outcome = f"{incident.plan}" if incident.open else explain.outcome(incident)
    act = "" if told.needs.act == NOTHING else f" To do: {told.needs.act}."
    text = formatting.printable(f"{job}: {incident.summary}; {outcome}.{act}")
    event = "began" if incident.open else "over"
    return HookObject(event=event, text=text, job=job, node=node, directory=directory, incident=told)


@dataclass(frozen=True, kw_only=True)
class SnapshotObject:
    """A snapshot, in `mt-resilient snapshots ls --json`."""

    name: str
    step: int
    generation: int
    ranks: int | None
    """null, as in the next two fields: the snapshot is damaged, of another version, or was deleted just now."""
    bytes: int | None
    written_s: float | None
    """Wall-clock time."""
    certified: bool
    yours: tuple[str, ...]
    """`ordered` if a person ordered it, `kept` if a person keeps it from being deleted."""
    place: str
    problem: str = ""
    """Why another version of the program must read it."""


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
    """good, info, warn or bad."""
    urgency: str
    """Whether a person must act: act now, look by day, or no action."""
    words: str
    """What the job does, in one sentence."""
    act: str
    """What a person should do, the most urgent first. Empty: nothing."""
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
    """By what is lost (a rank, a node, all nodes): number of steps that would be computed again if it were lost now."""
    doing: str = ""
    generation: GenerationRecord | None = None
    """This field and all that follow come from etcd, and are empty or null while no agent runs, or etcd does not answer."""
    leader: str | None = None
    roles: dict[str, str] = field(default_factory=dict)
    """By node: what it does in the job."""
    quarantine: dict[NodeId, Quarantine] = field(default_factory=dict)
    orders: tuple[Request, ...] = ()
    """Operators' orders that are not carried out yet."""
    nodes: dict[NodeId, NodeStatus] = field(default_factory=dict)
    incidents: tuple[Incident, ...] = ()
