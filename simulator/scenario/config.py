"""What is simulated: a cluster, its costs, and the program's policies."""

from __future__ import annotations

from dataclasses import dataclass

from ...checkpoint.durable.save_interval import CopiesPolicy, SnapshotPolicy
from ...resilience.decide.policy import Policy
from ...resilience.detect.hang_rules import HangPolicy
from ...resilience.errors import UsageError
from ...resilience.inprocess.loss_spike import SpikePolicy
from ...resilience.membership.rank_assignment import MOST_NODES
from ...resilience.store.write_rates import pace
from .costs import Costs
from .faults import DAY_S


@dataclass(frozen=True, kw_only=True)
class Setting:
    nodes: int
    per_node: int = 8
    """Number of devices, and of ranks, on each node."""
    spares: int = 0
    """Number of further nodes that stand by."""
    sizes: tuple[int, ...] = ()
    """Numbers of nodes with which the job may continue when no spare is left; empty: only with all."""
    days: float = 54.0
    rate: float = 1.0
    """Factor on the model's fault rate."""
    stands_for: float = 1.0
    """Number of nodes that each member represents; it has the faults of all of them. A spare represents only itself, so it has one in so
    many faults."""
    lease_ttl_s: int = 0
    """Seconds that the agents' leases last; 0: chosen by the number of agents."""
    seed: int = 0
    costs: Costs = Costs()
    snapshots: SnapshotPolicy = SnapshotPolicy()
    copies: CopiesPolicy = CopiesPolicy()
    policy: Policy = Policy()
    hang: HangPolicy = HangPolicy()
    spikes: SpikePolicy = SpikePolicy()

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= MOST_NODES:
            raise UsageError(f"{self.nodes} nodes cannot be simulated; 1 to {MOST_NODES} can")
        if self.per_node < 1:
            raise UsageError(f"a node of {self.per_node} GPUs cannot be simulated; give 1 or more with --per-node")
        if not 0 <= self.spares <= MOST_NODES:
            raise UsageError(f"{self.spares} spares cannot be simulated; 0 to {MOST_NODES} can")
        if not 0 < self.days <= 3660:
            raise UsageError(f"{self.days:g} days cannot be simulated; more than 0 and up to 3660 can")
        if not 0 <= self.rate <= 1e6:
            raise UsageError(f"a rate of {self.rate:g} cannot be simulated; 0 (no faults) to 1e6 can")

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node

    @property
    def lease_s(self) -> int:
        """Longest time in seconds from a node's loss until its lease expires."""
        return self.lease_ttl_s or pace(self.nodes + self.spares).lease_ttl_s

    @property
    def lasts_s(self) -> float:
        return self.days * DAY_S
