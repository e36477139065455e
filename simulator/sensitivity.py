"""The same cluster under other figures: restart time x interval of snapshots x rate of faults."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

from .faults import Model
from .life import played
from .setting import Setting

RESTARTS_S = (30.0, 60.0, 120.0, 300.0)
"""From the decision to the first step: what process groups and model are given is what makes up the difference."""
INTERVALS_S = (0.0, 60.0, 600.0)
"""Of snapshots in memory; 0: as the program itself chooses it."""
RATES = (1.0, 3.0, 10.0)
SMALL = 64
"""Nodes that stand for all: each has the faults of as many as it stands for, so that a table does not take hours. What hangs on the number
of nodes is in the restart time, which is given."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    restart_s: float
    interval_s: float
    rate: float
    effective: float


def table(
    setting: Setting,
    model: Model,
    restarts_s: Sequence[float] = RESTARTS_S,
    intervals_s: Sequence[float] = INTERVALS_S,
    rates: Sequence[float] = RATES,
    told: Callable[[float], None] = lambda share: None,
) -> list[Cell]:
    """One run each. told: hears what share of them is done."""
    found, all_of_them = [], list(product(restarts_s, intervals_s, rates))
    for count, (restart_s, interval_s, rate) in enumerate(all_of_them):
        run, faults = varied(setting, model, restart_s, interval_s, rate)
        effective = played(run, faults).effective
        found.append(Cell(restart_s=restart_s, interval_s=interval_s, rate=rate, effective=effective))
        told((count + 1) / len(all_of_them))
    return found


def varied(setting: Setting, model: Model, restart_s: float, interval_s: float, rate: float) -> tuple[Setting, Model]:
    """The setting and its faults with those figures. What of a restart cannot be made shorter stays; the days are as many fewer as the
    faults are more, and the spares as many more."""
    nodes = min(SMALL, setting.nodes)
    costs = setting.costs
    more_s = restart_s - costs.restart_s(nodes, nodes * setting.per_node)
    build_s = max(0.0, costs.build_all_s(nodes * setting.per_node) + more_s)
    every = max(1, round(interval_s / costs.step_s)) if interval_s else setting.snapshots.every_steps
    run = replace(
        setting,
        nodes=nodes,
        spares=math.ceil(setting.spares * rate),
        sizes=(),
        days=max(setting.days / rate, min(setting.days, 1.0)),
        rate=rate * setting.rate,
        costs=replace(costs, build_s=build_s, build_per_rank_s=0.0),
        snapshots=replace(setting.snapshots, every_steps=every),
    )
    times = setting.nodes / nodes
    sources = (replace(s, per_1000_node_days=s.per_1000_node_days * times) for s in model.sources)
    return run, replace(model, sources=tuple(sources))
