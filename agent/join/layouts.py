"""Agrees with the job's other agents on the layout for each number of nodes that cannot hold the script's own layout."""

from __future__ import annotations

from functools import partial

from ...resilience.membership.rank_assignment import NodesPolicy
from ...resilience.model.node import Spec
from ...resilience.store.codec import loads
from ...resilience.store.seat import Seat
from ..launch.layout_adviser import simumax
from ..launch.megatron_layout import Fit, fitting
from ..launch.torchrun import Launch


def agreed(seat: Seat, launch: Launch, spec: Spec, policy: NodesPolicy) -> Fit:
    """Return the numbers of nodes that can hold a layout, and the layouts that are not the script's own. If another agent has registered,
    or snapshots may have such a layout, both come from the job's description in etcd: SimuMax may answer differently each time. Raises
    StoreUnavailable."""
    if entry := seat.store.get(seat.keys.spec):
        known = loads(Spec, entry.value)
        same = (known.command, known.ranks, known.asked) == (spec.command, spec.ranks, spec.asked)
        trained = bool(policy.simumax_model and known.layouts)
        if same and (trained or seat.store.range(seat.keys.nodes, limit=1)):
            return Fit(numbers=known.sizes, layouts=known.layouts)
    return fitting(launch, spec.asked, partial(simumax, policy) if policy.simumax_model else None)
