"""The agent's own configuration: the sections `agent` and `preemption`."""

from __future__ import annotations

import math
import signal
from dataclasses import dataclass

from ..resilience.errors import UsageError
from ..resilience.store.write_rates import MOST_PER_S, pace, paced

ALONE_S = 10
"""Lifetime in seconds of the lease of a node that trains alone. No other node could take over the job, so no decision depends on this
lease."""


@dataclass(frozen=True, kw_only=True)
class AgentPolicy:
    """The agent of each node."""

    observe: bool = False
    """Detect and report everything, and change nothing. Short: `--observe`."""
    warm: bool = True
    """After the first step, keep a process that has run the script's imports. The agent forks the next ranks from it
    ([starts.md](starts.md)). Short for false: `--no-warm`."""
    warm_wait_s: float = 60.0
    """How long a start waits for the warm process while that is still importing. After this time, the start is cold."""
    metrics_port: int = 9464
    """Port of `/metrics`. The default: if another program has that port, the agent takes the next free one. 0: any free one. Short:
    `--metrics-port`."""
    rank_log_mb: float = 0.0
    """The most MB of a rank's output in one generation that the agent keeps, in `logs/ranks/`. 0: it keeps nothing, and the ranks print
    directly, as under torchrun. With any other value, the ranks print through the agent ([what differs](limits.md#what-ranks-print))."""
    last_snapshot: bool = False
    """Take a snapshot before the job ends on Ctrl-C, too. Short: `--last-snapshot`."""
    changed_arguments: bool = False
    """Continue the job although the script or its arguments are not those that the job was started with. Short: `--changed-arguments`."""
    stop_grace_s: float = 60.0
    """How long the ranks may take to reach a boundary for the last snapshot before the job ends. The write to disk may take as long again.
    After a scheduler's signal `preemption.budget_s` holds instead."""
    lease_ttl_s: int = 0
    """Lifetime of the agent's lease in etcd: at least 2 s, or 0. A node without power or network goes unnoticed for this long. 0: a job of
    one node has 10 s, one of up to 300 nodes 3 s, up to 1,000 5 s, up to 7,500 10 s, up to 11,000 15 s, and a larger one 30 s.

    The agent renews the lease after a third of its lifetime (`write_rates.pace`)."""

    def lease_s(self, nodes: int) -> int:
        """Return the lifetime of the lease in seconds. nodes: the expected number of nodes, spares included."""
        return self.lease_ttl_s or (pace(nodes).lease_ttl_s if nodes > 1 else ALONE_S)

    def bearable(self, nodes: int) -> None:
        """Raise UsageError if this number of nodes would send etcd more operations per second than it can process."""
        asked = paced(nodes, self.lease_s(nodes)).operations_per_s(nodes)
        if self.lease_ttl_s < pace(nodes).lease_ttl_s and asked > MOST_PER_S and self.lease_ttl_s:
            raise UsageError(
                f"agent.lease_ttl_s is {self.lease_ttl_s}: {nodes} nodes would ask {asked:.0f} operations a second of etcd, which "
                f"can do about {MOST_PER_S}; nothing was started. Remove this key: the lease is then {pace(nodes).lease_ttl_s} s"
            )

    def __post_init__(self) -> None:
        if not 0 <= self.metrics_port < 65536:
            raise UsageError(f"agent.metrics_port is {self.metrics_port}; a port is 0 to 65535")
        if not 0 <= self.rank_log_mb < math.inf:
            raise UsageError(f"agent.rank_log_mb is {self.rank_log_mb}; it cannot be negative")
        if self.lease_ttl_s == 1 or self.lease_ttl_s < 0:
            raise UsageError(f"agent.lease_ttl_s is {self.lease_ttl_s}; etcd keeps no lease shorter than 2 s")
        if self.stop_grace_s < 0:
            raise UsageError(f"agent.stop_grace_s is {self.stop_grace_s}; it cannot be negative")


@dataclass(frozen=True, kw_only=True)
class PreemptionPolicy:
    """A scheduler's signal takes the machine away. The ranks take a last snapshot and exit. A preemption does not count as a fault."""

    signals: str = "SIGTERM,SIGUSR1,SIGUSR2"
    """Signals to the agent that announce a preemption, separated by commas. Possible are SIGTERM, SIGUSR1, SIGUSR2,
    SIGHUP and SIGXCPU. Empty: none.

    Kubernetes and Slurm send SIGTERM. Slurm also sends the signal that its `--signal` names."""
    budget_s: float = 25.0
    """Time from a preemption's signal until the job has exited. Half of it is for the ranks to reach a boundary, the rest for the disk.

    By default, Kubernetes and Slurm kill the processes 30 s after SIGTERM."""

    def __post_init__(self) -> None:
        _ = self.numbers
        if self.budget_s <= 0:
            raise UsageError(f"preemption.budget_s is {self.budget_s}; it must be more than 0")

    @property
    def numbers(self) -> frozenset[signal.Signals]:
        """Return the signals as numbers. Raises UsageError for a name that is not allowed."""
        return frozenset(_signal(name.strip()) for name in self.signals.split(",") if name.strip())


def _signal(name: str) -> signal.Signals:
    if name not in _PREEMPTING:
        raise UsageError(f"preemption.signals has {name!r}; it may have {', '.join(_PREEMPTING)}")
    return signal.Signals[name]


_PREEMPTING = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGXCPU")
"""Signals that schedulers send before they end a job. SIGINT is not among them, because it is a user's Ctrl-C."""
