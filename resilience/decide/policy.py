"""The policies that the controller applies when it decides."""

from __future__ import annotations

from dataclasses import dataclass

from ..inprocess.rewind_ladder import LadderPolicy
from ..membership.quarantine import QuarantinePolicy
from ..membership.rank_assignment import NodesPolicy
from ..plan.escalation import RecoveryPolicy


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The policies of all judgements."""

    recovery: RecoveryPolicy = RecoveryPolicy()
    ladder: LadderPolicy = LadderPolicy()
    """The ranks' own policy. The controller needs it to report their rewinds."""
    nodes: NodesPolicy = NodesPolicy()
    quarantine: QuarantinePolicy = QuarantinePolicy()
    lease_s: float = 0.0
    """Seconds that the agents' leases last; 0: not known."""
    observe: bool = False
    """Report what the program would do, and do nothing."""
