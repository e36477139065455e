"""The nodes in quarantine (which must not train for a while): the entries in force, and the policy for new entries. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import UsageError
from ..model.cluster_state import World
from ..model.generation import Quarantine
from ..model.types import NodeId
from . import rank_assignment


@dataclass(frozen=True, kw_only=True)
class QuarantinePolicy:
    """When a node is put into quarantine, that is, does not train for a while. A node goes into quarantine only if the
    job can continue without it."""

    hardware_faults: int = 2
    """A node is put into quarantine after this many faults of its own hardware: its replica differed from all others.

    One flipped bit is bad luck (Llama 3: 6 in 54 days of 16,384 GPUs)."""
    faults: int = 3
    """A node is put into quarantine after this many faults that struck it first: a killed rank, a hung rank or a lost agent. Fewer are
    enough at the start of a job that has trained before. Two faults in a row are enough if the second one came before the first step. One
    fault before the first step is enough on a node that has never trained.

    Most nodes have none in a month, and a few have most of all faults (StepFun; Meta, arXiv:2410.21680, section 4)."""
    within_h: float = 24.0
    """Number of hours in which `hardware_faults` and `faults` are counted."""
    lasts_h: float = 24.0
    """Number of hours that a quarantine lasts. `mt-resilient readmit` ends it earlier."""

    def __post_init__(self) -> None:
        for name in ("hardware_faults", "faults"):
            if getattr(self, name) < 1:
                raise UsageError(f"quarantine.{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("within_h", "lasts_h"):
            if getattr(self, name) <= 0:
                raise UsageError(f"quarantine.{name} is {getattr(self, name)}; it must be more than 0")


def readmitted(by: str, now: float) -> Quarantine:
    """Return the entry that ends a node's quarantine, because `by` readmits the node. now: wall-clock seconds."""
    return Quarantine(reason=f"readmitted by {by}", until_s=now, readmitted_s=now)


def in_force(world: World, now: float) -> dict[NodeId, Quarantine]:
    """Return the quarantines in force, by node and sorted by name. Absent nodes are included. now: wall-clock seconds."""
    nodes = sorted(world.quarantine, key=rank_assignment.natural)
    return {node: world.quarantine[node] for node in nodes if now < world.quarantine[node].until_s}
