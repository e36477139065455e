"""Faults for which one more restart can help, or no longer can, and why. Pure.

NaN     The ranks have tried every remedy in place. A variable of the script that no rewind restores may hold a NaN. New processes begin
        without it, so they get one attempt.
hang    A rank has hung again at the place of the script where it hung before, and no snapshot lies in between. The second time, the agent
        had waited for a multiple of the first silence (`hang_rules.patient`), so a third attempt would hardly end otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..diagnose.root_cause import Verdict
from ..model.cause import Cause
from ..model.incident import Incident
from ..model.signals import OWN_WORK

SAME_NAN_STEPS = 200
"""A NaN at most this many steps after one for which new processes started is the same fault, as `ladder.same_fault_steps` has it."""


def may_begin_anew(verdict: Verdict, restarts: Sequence[Incident], reached: int, kept: int) -> bool:
    """Whether new processes can begin from a kept state, and have not been tried yet against this NaN."""
    tried = [i for i in restarts if i.cause == Cause.NON_FINITE]
    return (
        kept >= 0
        and verdict.cause is Cause.NON_FINITE
        and not any(reached - i.step_at_fault <= SAME_NAN_STEPS for i in tried)
    )


def hung_there_before(verdict: Verdict, restarts: Sequence[Incident]) -> Incident | None:
    """Return the last incident if it was the same hang of the same nodes, in the script's own code."""
    before = restarts[-1] if restarts else None
    own = any(f":{place}:" in verdict.signature for place in OWN_WORK)
    same = before and (before.signature, before.nodes) == (verdict.signature, verdict.nodes)
    return before if same and own and verdict.cause is Cause.RANK_HUNG else None
