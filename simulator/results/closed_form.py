"""The effective training time by a formula, for one kind of fault, constant costs and enough spares. Pure.

All times are seconds by the wall clock; faults come at random, at a constant rate.
"""

from __future__ import annotations

import math


def first_order(per_s: float, recovery_s: float, interval_s: float, stall_s: float, late_s: float = 0.0) -> float:
    """Return the share of time spent on steps that count: 1 / (1 + rate x (recovery + interval / 2) + stall / interval). This is the
    first-order model of Young (CACM 17(9), 1974), as Meta has it for clusters ("Revisiting Reliability", arXiv:2410.21680). It is accurate
    as long as the time between two faults is much longer than the time that a fault costs.

    per_s: faults per second; recovery_s: from a fault to the first step, its detection included; interval_s: seconds between two snapshots;
    stall_s: the cost of a snapshot; late_s: seconds from a snapshot until it can be restored.
    """
    return 1 / (1 + per_s * (recovery_s + late_s + interval_s / 2) + stall_s / interval_s)


def complete(per_s: float, recovery_s: float, interval_s: float, stall_s: float) -> float:
    """Return the same share by Daly's complete model (FGCS 22, 2006, equation 20: wall clock = M e^(R/M) (e^((T + stall)/M) - 1) x steps /
    T), in which recoveries can fail too. It is accurate at any fault rate, zero included."""
    if per_s == 0:
        return 1 / (1 + stall_s / interval_s)
    wall_s = math.exp(per_s * recovery_s) * math.expm1(per_s * (interval_s + stall_s)) / per_s
    return interval_s / wall_s
