"""The ranks' own word at each boundary: a tiny all-reduce on the CPU that completes during the next step.

Row of this rank → MAX over all ranks → `Tally`, the same on every rank. It travels on a group of its own, so that it never meets the
script's collectives.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..resilience.boundary import ROW, Tally, row, tally
from ..resilience.signals import Order


class Sentinel:
    def __init__(self) -> None:
        """Collective: every rank makes its sentinel at the same place of its program."""
        self._group: Any = None
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo")
        # Made once and kept: gloo's threads would have to wait for the GIL to free a tensor that only they still hold, and whoever
        # destroys the group meanwhile, holding the GIL, waits for them (met with torch 2.13).
        self._rows = [torch.zeros(ROW, dtype=torch.float64) for _ in range(2)]
        self._options = dist.AllreduceOptions()
        self._options.reduceOp = dist.ReduceOp.MAX
        self._turn = 0
        self._work: Any = None
        self._pending = False

    def contribute(self, *, step: int, finite: bool, staged: bool, order: Order) -> None:
        """This rank's row for `step`. Returns at once."""
        self._turn ^= 1
        mine = self._rows[self._turn]
        mine.numpy()[:] = row(step, finite, staged, order)
        if self._group is not None:
            # The group's own method: the checks and logging of dist.all_reduce cost half of the contribution (measured).
            self._work = self._group.allreduce([mine], self._options)
        self._pending = True

    def take(self) -> Tally | None:
        """The tally of the last contribution, waiting for it where it is not there yet; None where none is due."""
        if not self._pending:
            return None
        if self._work is not None:
            self._work.wait()
            self._work = None
        self._pending = False
        return tally(self._rows[self._turn].tolist())
