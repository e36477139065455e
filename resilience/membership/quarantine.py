"""Which nodes are shut out of the job for a while: the entries that are in force, and what makes one. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import UsageError
from ..model.cluster_state import World
from ..model.generation import Quarantine
from ..model.types import NodeId
from . import rank_assignment


@dataclass(frozen=True, kw_only=True)
class QuarantinePolicy:
    hardware_faults: int = 2
    """So many faults that its hardware is blamed for shut a node out. One flipped bit is bad luck (Llama 3: 6 in 54 days of 16,384
    GPUs)."""
    faults: int = 3
    """And so many that have struck it, whatever was to blame: most nodes have none in a month, and a few lemons have most of all
    faults (StepFun; Meta, arXiv:2410.21680, section 4)."""
    within_h: float = 24.0
    """Hours that faults are counted over."""
    lasts_h: float = 24.0
    """Hours that it lasts."""

    def __post_init__(self) -> None:
        for name in ("hardware_faults", "faults"):
            if getattr(self, name) < 1:
                raise UsageError(f"quarantine.{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("within_h", "lasts_h"):
            if getattr(self, name) <= 0:
                raise UsageError(f"quarantine.{name} is {getattr(self, name)}; it must be more than 0")


def readmitted(by: str, now: float) -> Quarantine:
    """A node's entry, once somebody has it back. now: wall-clock seconds."""
    return Quarantine(reason=f"readmitted by {by}", until_s=now, readmitted_s=now)


def in_force(world: World, now: float) -> dict[NodeId, Quarantine]:
    """By node, in the order of their names, whether the nodes are there or not. now: wall-clock seconds."""
    nodes = sorted(world.quarantine, key=rank_assignment.natural)
    return {node: world.quarantine[node] for node in nodes if now < world.quarantine[node].until_s}
