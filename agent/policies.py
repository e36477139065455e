"""The sections of the configuration. The module that uses a policy defines it; this module gives it its section name."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..checkpoint.durable.save_interval import SnapshotPolicy
from ..resilience.detect.hang_rules import HangPolicy
from ..resilience.detect.straggler import StragglerPolicy
from ..resilience.inprocess.fallback import RescuePolicy
from ..resilience.inprocess.loss_spike import SpikePolicy
from ..resilience.inprocess.rewind_ladder import LadderPolicy
from ..resilience.inprocess.tally import RankPolicy
from ..resilience.membership.quarantine import QuarantinePolicy
from ..resilience.membership.rank_assignment import NodesPolicy
from ..resilience.plan.escalation import RecoveryPolicy
from ..resilience.plan.resume_point import StabilityPolicy
from .buddy.buddy_client import CopiesPolicy
from .config import AgentPolicy, PreemptionPolicy
from .join.identity import ControlPolicy
from .output.hooks import HooksPolicy
from .preflight.rules import PreflightPolicy

SECTIONS: dict[str, type] = {
    "snapshots": SnapshotPolicy,
    "spikes": SpikePolicy,
    "ladder": LadderPolicy,
    "rescue": RescuePolicy,
    "recovery": RecoveryPolicy,
    "nodes": NodesPolicy,
    "copies": CopiesPolicy,
    "preflight": PreflightPolicy,
    "quarantine": QuarantinePolicy,
    "hang": HangPolicy,
    "stragglers": StragglerPolicy,
    "stability": StabilityPolicy,
    "agent": AgentPolicy,
    "preemption": PreemptionPolicy,
    "hooks": HooksPolicy,
    "control": ControlPolicy,
}


@dataclass(frozen=True, kw_only=True)
class NodePolicies:
    """The policies that this node's objects use."""

    snapshots: SnapshotPolicy
    ranks: RankPolicy
    hang: HangPolicy
    stability: StabilityPolicy
    stragglers: StragglerPolicy
    rank_log_mb: float
    """`agent.rank_log_mb`."""
    window_h: float
    """`recovery.mismatch_window_h`."""


def at_least(policy: RecoveryPolicy, restarts: str) -> RecoveryPolicy:
    """Return the policy with limits that allow at least as many restarts as torchrun's `--max-restarts`. restarts: that option's value;
    empty: not given."""
    if not restarts.isdecimal():
        return policy
    return replace(
        policy,
        same_failure_at_start=max(policy.same_failure_at_start, int(restarts) + 1),
        max_without_progress=max(policy.max_without_progress, int(restarts)),
    )
