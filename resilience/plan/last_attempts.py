"""Faults for which one more restart can help, or no longer can, and why. Pure.

NaN     The ranks have tried every remedy in place. A variable of the script that no rewind restores may hold a NaN. New processes begin
        without it, so they get one attempt.
hang    A rank has hung again after the same step and at the same place. In the script's own code, the agent waited the second time for a
        multiple of the first silence (`hang_rules.patient`). So a third attempt would probably hang too, unless on another node.
        A rank whose device finishes nothing is not in the script's own code: its signature says `device`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from ..diagnose.root_cause import Verdict
from ..model.cause import Cause
from ..model.incident import Incident
from ..model.signals import OWN_WORK

SAME_NAN_STEPS = 200
"""If new processes were started because of a NaN, a NaN at most this many steps later is the same fault. The number is the default of
`ladder.same_fault_steps`."""


def may_begin_anew(verdict: Verdict, restarts: Sequence[Incident], reached: int, kept: int) -> bool:
    """Whether new processes can begin from a kept state, and have not been tried yet against this NaN."""
    tried = [i for i in restarts if i.cause == Cause.NON_FINITE]
    return (
        kept >= 0
        and verdict.cause is Cause.NON_FINITE
        and not any(reached - i.step_at_fault <= SAME_NAN_STEPS for i in tried)
    )


def hung_again(verdict: Verdict, restarts: Sequence[Incident], reached: int, most: int, nodes: int) -> str:
    """Return why another restart would not help: the last restarts answered the same hang after the same step, and there were as many of
    them as can help. (Even if snapshots were taken in between, the job came no further.) Empty: another restart may help. most: how many
    restarts can help if the rank waits for other ranks, or if the node may be at fault (one node is blamed, and others are alive). In all
    other cases, one restart can help. nodes: how many nodes are alive."""
    if verdict.cause is not Cause.RANK_HUNG or reached < 0:
        return ""
    here = verdict.signature, verdict.nodes, reached
    same = [*takewhile(lambda each: (each.signature, each.nodes, each.step_at_fault) == here, reversed(restarts))]
    own = any(f":{place}:" in verdict.signature for place in OWN_WORK) and not (len(verdict.nodes) == 1 and nodes > 1)
    if len(same) < (1 if own else most):
        return ""
    return f"the same hang after the same step as in incident {int(same[0].id)} ({same[0].summary})"
