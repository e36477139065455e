"""What the effective training time comes to, where a formula can say it: one kind of fault, constant costs, spares enough. Pure.

All times are seconds by the wall clock; faults come at random, at a constant rate.
"""

from __future__ import annotations

import math


def first_order(per_s: float, recovery_s: float, interval_s: float, stall_s: float, late_s: float = 0.0) -> float:
    """Share of the time spent on steps that count: 1 / (1 + rate x (recovery + interval / 2) + stall / interval), the first-order model of
    Young (CACM 17(9), 1974), as Meta has it for clusters ("Revisiting Reliability", arXiv:2410.21680). Good while faults are rare next to
    what one of them costs.

    per_s: faults a second; recovery_s: from a fault to the first step, its detection included; interval_s: computed between two snapshots;
    stall_s: what one takes; late_s: computed until a snapshot can be gone back to.
    """
    return 1 / (1 + per_s * (recovery_s + late_s + interval_s / 2) + stall_s / interval_s)


def complete(per_s: float, recovery_s: float, interval_s: float, stall_s: float) -> float:
    """The same by Daly's complete model (FGCS 22, 2006, equation 20: wall clock = M e^(R/M) (e^((T + stall)/M) - 1) x steps / T), in which
    recoveries can fail too. Good at any rate, to zero."""
    if per_s == 0:
        return 1 / (1 + stall_s / interval_s)
    wall_s = math.exp(per_s * recovery_s) * math.expm1(per_s * (interval_s + stall_s)) / per_s
    return interval_s / wall_s
