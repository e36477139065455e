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
_SPIKES = {"spikes.baseline_steps": "16", "spikes.patience_steps": "4", "ladder.distance_steps": "8"}
_SPIKES |= {"ladder.skip_steps": "4", "ladder.same_fault_steps": "30"}
"""A campaign is short, and does not wait for hundreds of steps before it calls a loss diverged."""
_SEVERAL = {"copies.every_s": "2", "quarantine.faults": "1000000"}
"""Nodes copy their snapshots to each other early, and none is put into quarantine because the plan strikes it often."""


def quick(plan: Plan, steps: int) -> list[str]:
    """Return the options of `mt-resilient run` for a short training with many faults. steps: how many the training has."""
    budget = 3 + 2 * len(plan.injections)
    budgets = dict.fromkeys(("recovery.max_without_progress", "recovery.max_mismatches"), str(budget))
    spikes = _SPIKES if any(each.fault == injector.SPIKE for each in plan.injections) else {}
    # A job that starts from disk computes again, held up, what came after. So snapshots there are as close together as faults.
    durable = {"snapshots.durable_every_steps": str(max(1, steps // max(10, len(plan.injections))))}
    return _set({**_WAITS, **budgets, **durable, **spikes})


def several(nodes: int) -> list[str]:
    """Return the options of `mt-resilient run` for so many nodes."""
    return _set(_SEVERAL) if nodes > 1 else []


def _set(values: Mapping[str, str]) -> list[str]:
    return [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
