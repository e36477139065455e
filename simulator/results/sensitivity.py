"""Simulates the same cluster with each combination of restart time, snapshot interval and fault rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

from ..engine.run import played
from ..scenario.config import Setting
from ..scenario.faults import Model, few_enough

RESTARTS_S = (30.0, 60.0, 120.0, 300.0)
"""Seconds from a rank's fault to the first step. The time to build process groups and model is set so that the total is this."""
INTERVALS_S = (0.0, 60.0, 600.0)
"""Seconds between snapshots in memory; 0: as the program itself chooses."""
RATES = (1.0, 3.0, 10.0)
SMALL = 64
"""Number of simulated nodes that represent all nodes, so that a table does not take hours. Each simulated node has the faults of all nodes
that it represents; a simulated spare has only its own. The given restart time and the leases already include what depends on the number of
nodes. The job waits for a missing node and does not shrink: one of so few nodes is a larger part of the training than one of all nodes."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    restart_s: float
    interval_s: float
    rate: float
    effective: float


@dataclass(frozen=True, kw_only=True)
class Run:
    restart_s: float
    interval_s: float
    rate: float
    setting: Setting
    model: Model


def runs(
    setting: Setting,
    model: Model,
    restarts_s: Sequence[float] = RESTARTS_S,
    intervals_s: Sequence[float] = INTERVALS_S,
    rates: Sequence[float] = RATES,
) -> list[Run]:
    """Return the runs of a table. A restart time that is too short becomes the shortest possible one. Raises UsageError."""
    shortest_s = round(_shortest_s(setting), 1)
    found = []
    for restart_s, interval_s, rate in product(
        dict.fromkeys(max(shortest_s, restart_s) for restart_s in restarts_s), intervals_s, rates
    ):
        run, faults = varied(setting, model, restart_s, interval_s, rate)
        few_enough(faults, run.nodes + run.spares, run.lasts_s, run.rate)
        found.append(Run(restart_s=restart_s, interval_s=interval_s, rate=rate, setting=run, model=faults))
    return found


def table(runs: Sequence[Run], told: Callable[[float], None] = lambda share: None) -> list[Cell]:
    """Return the cells of a table. told: called after each run with the share of runs done."""
    found = []
    for count, run in enumerate(runs, 1):
        effective = played(run.setting, run.model).effective
        found.append(Cell(restart_s=run.restart_s, interval_s=run.interval_s, rate=run.rate, effective=effective))
        told(count / len(runs))
    return found


def _shortest_s(setting: Setting) -> float:
    """Return the seconds of a restart of the `SMALL` nodes with nothing to build."""
    nodes = min(SMALL, setting.nodes)
    return replace(setting.costs, build_s=0.0, build_per_rank_s=0.0).restart_s(nodes, nodes * setting.per_node)


def varied(setting: Setting, model: Model, restart_s: float, interval_s: float, rate: float) -> tuple[Setting, Model]:
    """Return the setting and its faults with these figures. With `rate` times the faults, a run has `rate` times fewer days (but at least
    one day, if the setting has one) and `rate` times more spares."""
    nodes = min(SMALL, setting.nodes)
    times = setting.nodes / nodes
    costs = setting.costs
    every = max(1, round(interval_s / costs.step_s)) if interval_s else setting.snapshots.every_steps
    run = replace(
        setting,
        nodes=nodes,
        spares=math.ceil(setting.spares * rate),
        sizes=setting.sizes if nodes == setting.nodes else (),
        days=max(setting.days / rate, min(setting.days, 1.0)),
        rate=rate * setting.rate,
        stands_for=times,
        lease_ttl_s=setting.lease_s,
        costs=replace(costs, build_s=max(0.0, restart_s - _shortest_s(setting)), build_per_rank_s=0.0),
        snapshots=replace(setting.snapshots, every_steps=every),
    )
    sources = (replace(s, per_1000_node_days=s.per_1000_node_days * times) for s in model.sources)
    return run, replace(model, sources=tuple(sources))
