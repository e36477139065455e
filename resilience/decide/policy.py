"""What the controller decides by."""

from __future__ import annotations

from dataclasses import dataclass

from ..inprocess.rewind_ladder import LadderPolicy
from ..membership.quarantine import QuarantinePolicy
from ..membership.rank_assignment import NodesPolicy
from ..plan.escalation import RecoveryPolicy


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Each judgement's own policy."""

    recovery: RecoveryPolicy = RecoveryPolicy()
    ladder: LadderPolicy = LadderPolicy()
    """The ranks', whose rewinds it tells of."""
    nodes: NodesPolicy = NodesPolicy()
    quarantine: QuarantinePolicy = QuarantinePolicy()
    lease_s: float = 0.0
    """How long the agents' leases live; 0: not known."""
    observe: bool = False
    """Tell what would be done, and do nothing."""
