"""What the agent itself can be told: the section `agent` of the configuration."""

from __future__ import annotations

from dataclasses import dataclass

from ..resilience.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class AgentPolicy:
    observe: bool = False
    """Judge and tell everything, and do nothing about it."""
    warm: bool = True
    """Keep a warm process to fork the next gang from."""
    warm_wait_s: float = 60.0
    """How long a start waits for a warm process that is still importing, before it is cold."""
    metrics_port: int = 9464
    """Port of /metrics; 0 takes a free one."""
    last_snapshot: bool = False
    """Take a snapshot before leaving on Ctrl-C or SIGTERM."""
    stop_grace_s: float = 60.0
    """How long the ranks may take to reach a boundary for that snapshot, and the drain process to write it."""
    lease_ttl_s: int = 10
    """Life of this agent's lease in etcd, renewed at a third of it."""

    def __post_init__(self) -> None:
        if not 0 <= self.metrics_port < 65536:
            raise UsageError(f"agent.metrics_port is {self.metrics_port}; a port is 0 to 65535")
        if self.lease_ttl_s < 2:
            raise UsageError(f"agent.lease_ttl_s is {self.lease_ttl_s}; etcd keeps no lease shorter than 2 s")
        if self.stop_grace_s < 0:
            raise UsageError(f"agent.stop_grace_s is {self.stop_grace_s}; it cannot be negative")
