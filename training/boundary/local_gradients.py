"""Measures the norm of each rank's own gradient before the ranks' gradients are reduced. The norms show which rank deviated when a step
went wrong.

After the reduction, a bit that flipped on one rank affects all ranks, and its origin can no longer be found. So the norm of each bucket or
parameter is computed right before the reduction, and stays on its device. Nothing is copied, waited for or compared until a step is found
wrong. The gradients are only read.

Megatron's buckets are measured where Megatron's own check would run (`check_grads`, up to 0.11 `check_for_nan_in_grad`; right before the
collective), and instead of it. If a bucket group has neither method, Megatron's own check stays. Megatron's check raises an exception on
the one rank that sees a NaN, while its peers already wait in the collective. A session judges the same figures on all ranks instead. With
`--observe`, Megatron's check stays too, and Megatron's settings decide whether it is called.
Without Megatron, a hook measures each parameter's gradient after its accumulation; DistributedDataParallel reduces later. (A communication
hook of DistributedDataParallel would have to do the reduction itself. Such a hook would divide where DistributedDataParallel multiplies,
which gives other bits on three ranks.) A step may have several backward passes, and DistributedDataParallel reduces after each of them
unless the script uses `no_sync`. After a later pass, a gradient therefore contains the reduced gradient of earlier passes, which is equal
on all ranks. So two norms of each gradient are kept: after the step's first backward pass, and after its last.

Without Megatron, sharded parameters are not measured: their gradient is reduced before it is accumulated. Without Megatron, parameters on
devices are not measured either: such hooks take 16 us of host time per parameter (H200). A pass over Megatron's buckets takes 1.2 ms for
4.2 GB, the memory's bandwidth.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable
from statistics import median
from typing import Any

import torch

from ...resilience.inprocess.loss_spike import Finding
from ...resilience.ipc.board_events import RANKS_NAMED
from ...resilience.model.cause import Kind
from ...resilience.model.types import Rank
from ..state.tensors.in_place import whole
from .allreduce import Sentinel

CHECKS = ("check_grads", "check_for_nan_in_grad")
"""Names of Megatron's own check, in any of its versions."""
_KEPT = 64
"""Number of steps whose norms are kept."""
_LEAST = 8
"""The least number of earlier steps from which the usual norm is computed."""
_FACTOR = 10.0
"""A rank deviates if its norm is more than this many times the least norm of all ranks. Norms are in units of the rank's usual norm, and
the least norm counts as at least 1."""


class OwnGradients:
    def __init__(self, chunks: Iterable[torch.nn.Module], noted: bool, observes: bool = False) -> None:
        """noted: there are other ranks to compare with. observes: Megatron's own check stays; otherwise it is replaced in any case."""
        self._now: dict[Any, torch.Tensor] = {}
        self._first: dict[Any, torch.Tensor] = {}
        self._steps: deque[tuple[int, list[torch.Tensor], list[torch.Tensor]]] = deque(maxlen=_KEPT)
        """The step, and the norms after its first and its last backward pass."""
        self._noted, self._observes = noted, observes
        for chunk in chunks:
            groups = [*getattr(chunk, "bucket_groups", []), *getattr(chunk, "expert_parallel_bucket_groups", [])]
            for group in groups:
                self._instead_of_the_check(group)
            if noted and not groups:
                self._behind_each(chunk)

    def _instead_of_the_check(self, group: Any) -> None:
        name = next((name for name in CHECKS if hasattr(type(group), name)), None)
        if name is None:
            return
        original = getattr(group, name)
        if not self._observes:
            group.ddp_config.check_for_nan_in_grad = self._noted  # so that the check is called

        def note() -> None:
            for index, bucket in enumerate(group.buckets if self._noted else ()):
                self._now[id(group), index] = _norm_of(bucket.grad_data)

        def check(check_for_nan_or_inf: bool = True, check_for_large: bool = False) -> None:
            if check_for_large:
                original(False, True)
            note()

        def check_as_before(*asked: bool, **named: bool) -> None:
            note()
            original(*asked, **named)

        setattr(group, name, check_as_before if self._observes else check)

    def _behind_each(self, chunk: torch.nn.Module) -> None:
        for parameter in chunk.parameters():
            on_host = parameter.device.type == "cpu" and type(parameter).__name__ != "FlatParameter"
            if parameter.requires_grad and on_host and whole([parameter]):
                parameter.register_post_accumulate_grad_hook(self._note)

    def _note(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None and parameter.grad.layout is torch.strided:
            self._now[id(parameter)] = norm = _norm_of(parameter.grad.detach())  # create_graph gives it a graph
            self._first.setdefault(id(parameter), norm)

    def stepped(self, step: int) -> None:
        """Record that step `step` is done."""
        if self._now:
            self._steps.append((step, list({**self._now, **self._first}.values()), list(self._now.values())))
            self._now, self._first = {}, {}

    def went_back(self, step: int) -> None:
        self._now, self._first = {}, {}
        while self._steps and self._steps[-1][0] > step:
            self._steps.pop()

    def times_usual(self, step: int, *, first: bool = False) -> float:
        """Return this rank's norm at that step, in units of its usual earlier norm. Return inf if the norm was not finite, 0 if it is
        unknown. first: after the step's first backward pass, otherwise after its last."""
        of = {at: math.hypot(*map(float, norms[not first])) for at, *norms in self._steps if at <= step}
        if step not in of:
            return 0.0
        if not math.isfinite(of[step]):
            return math.inf
        before = [norm for at, norm in of.items() if at < step and math.isfinite(norm)]
        usual = median(before) if len(before) >= _LEAST else 0.0
        return of[step] / usual if usual > 0 else 0.0


def culprits(finding: Finding, own: OwnGradients, sentinel: Sentinel, rank: int, world: int) -> tuple[Rank, ...]:
    """Return the ranks whose own gradient deviated at the onset, ascending. Return an empty tuple if they are more than `RANKS_NAMED`, or
    more than half of all ranks. A loss spike may originate in the step before the onset, so that step is examined first. Collective, but
    only in the rare case that a step is wrong, with a few numbers. Must be called before the ranks go back."""
    steps = range(finding.onset - (finding.kind is Kind.LOSS_SPIKE), finding.onset + 1)
    for step, first in itertools.product(steps, (False, True)):
        mine = own.times_usual(step, first=first)
        least, worst = sentinel.extremes(mine)
        out = mine > _FACTOR * max(1.0, least) if math.isfinite(worst) else mine == math.inf
        found: list[Rank] = []
        while len(found) <= RANKS_NAMED:
            ahead = out and (not found or rank > found[-1])
            (next_one,) = sentinel.greatest(-rank if ahead else -math.inf)
            if next_one == -math.inf:
                break
            found.append(Rank(int(-next_one)))
        if found:
            return tuple(found) if len(found) <= min(RANKS_NAMED, world // 2) else ()
    return ()


def _norm_of(gradient: torch.Tensor) -> torch.Tensor:
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient.resolve_conj())
    wide = gradient.dtype is torch.float64  # torch refuses to narrow float64 here
    return torch.linalg.vector_norm(gradient, dtype=None if wide else torch.float32)
