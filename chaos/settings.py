"""In what the configuration of a campaign differs from that of an ordinary run."""

from __future__ import annotations

from collections.abc import Mapping

from .judgement.plan import Plan
from .rank import injector

_WAITS = {
    "hang.floor_s": "5",
    "hang.confirm_s": "2",
    "hang.idle_s": "8",
    "hang.busy_s": "15",
    "hang.start_s": "120",
    "hang.teardown_s": "20",
}
"""A campaign does not wait for minutes before it calls a silence a hang, as a training may. If etcd has lost its data, no agent knows how
long first steps take, and an agent that starts then would wait `hang.start_s` (30 minutes) for a rank that hangs in them."""
_START = "hang.start_s"
_STARTS = 3.0
"""For how many times the time to the first step a campaign waits, at least, for what a start of the ranks may come before."""
_SPIKES = {"spikes.baseline_steps": "16", "spikes.patience_steps": "4", "ladder.distance_steps": "8"}
_SPIKES |= {"ladder.skip_steps": "4", "ladder.same_fault_steps": "30"}
"""A campaign is short, and does not wait for hundreds of steps before it calls a loss diverged."""
_SEVERAL = {"copies.every_s": "2", "quarantine.faults": "1000000"}
"""Nodes copy their snapshots to each other early, and none is put into quarantine because the plan strikes it often."""


def patience_s(least_s: float, start_s: float) -> float:
    """Return for how long to wait. least_s: if starts are fast. start_s: how long the run without faults took to its first step."""
    return max(least_s, _STARTS * start_s)


def quick(plan: Plan, steps: int, start_s: float) -> list[str]:
    """Return the options of `mt-resilient run` for a short training with many faults. steps: how many the training has. start_s: how long
    the run without faults took to the first one."""
    budget = 3 + 2 * len(plan.injections)
    budgets = dict.fromkeys(("recovery.max_without_progress", "recovery.max_mismatches"), str(budget))
    spikes = _SPIKES if any(each.fault == injector.SPIKE for each in plan.injections) else {}
    # A job that starts from disk computes again, held up, what came after. So snapshots there are as close together as faults.
    durable = {"snapshots.durable_every_steps": str(max(1, steps // max(10, len(plan.injections))))}
    waits = {**_WAITS, _START: f"{patience_s(float(_WAITS[_START]), start_s):g}"}
    return _set({**waits, **budgets, **durable, **spikes})


def several(nodes: int) -> list[str]:
    """Return the options of `mt-resilient run` for so many nodes."""
    return _set(_SEVERAL) if nodes > 1 else []


def _set(values: Mapping[str, str]) -> list[str]:
    return [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
