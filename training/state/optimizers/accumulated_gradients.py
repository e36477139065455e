"""Gradients in a rank's state: a loop may keep them from one step of the Session to the next, and accumulate into them.

Most loops drop their gradients right after or right before a snapshot, before the next pass. So a snapshot leaves out a gradient that an
optimizer has used, if the loop is known to drop such gradients. The proof: after the previous snapshot, the parameter had another gradient
tensor when its optimizer stepped next. All other gradients are saved. Gradients of zero are saved too: an optimizer skips a parameter whose
gradient is None, but not one whose gradient is zero.

No snapshot is taken while wrappers accumulate gradients internally.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from itertools import chain
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ....resilience.errors import SnapshotError
from ..modules.module_source import Modules
from ..tensors.finite_check import finite, sums
from ..tensors.fsdp_groups import by_fsdp, groups
from ..tensors.in_place import Nested, local, put
from ..values.value_source import Values
from .optimizers import Optimizers

_NONE, _LEFT, _SUM = range(3)
"""The three states of a parameter's gradient: it does not exist, the loop drops it, or a snapshot saves it."""


class Halfway(SnapshotError):
    """No snapshot of this step is possible, but another step can have one."""


class Accumulation:
    def __init__(
        self,
        models: Collection[Modules],
        optimizers: Collection[Optimizers],
        others: Collection[Values],
        tell: Callable[[str], Any],
    ) -> None:
        self._models, self._optimizers, self._others, self._tell = models, optimizers, others, tell
        self._stepped: dict[int, tuple[torch.optim.Optimizer, Any]] = {}
        """By id, each optimizer that has stepped since the last boundary (the moment between two steps), and whether a GradScaler told it
        to change nothing (a number, perhaps on a device)."""
        self._crossed = self._stepped
        """The content of `_stepped` for the step before the last boundary."""
        self._taken: frozenset[int] = frozenset()
        """The ids of the parameters whose gradients optimizers used in the step before the last boundary."""
        self._dropped: set[int] = set()
        """The ids of the parameters that had another gradient tensor than in the snapshot when the optimizer stepped next."""
        self._carried: set[int] = set()
        """The ids of the parameters that once kept the same gradient tensor until the next step: the loop accumulates into it."""
        self._left: dict[int, weakref.ref[torch.Tensor]] = {}
        """The gradients at the last snapshot, by the ids of their parameters."""
        self.ends = False
        """Whether the training ends at this boundary, so that the loop accumulates no more gradients."""
        self.doubtful = False
        """Whether the gradients may contain NaN or Inf of an earlier step."""
        self._told = False
        self._hook = register_optimizer_step_pre_hook(self._before)

    def _before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._stepped[id(optimizer)] = optimizer, getattr(optimizer, "found_inf", 0)
        for group in optimizer.param_groups if self._left else ():
            for parameter in group["params"]:
                if left := self._left.pop(id(parameter), None):
                    same = parameter.grad is not None and left() is parameter.grad
                    (self._carried if same else self._dropped).add(id(parameter))

    def release(self) -> None:
        """Notice no further steps, and let go of the optimizers. Called when the loop has ended."""
        self._hook.remove()
        self._stepped, self._crossed = {}, {}

    def crossed(self) -> bool:
        """Record that the loop has reached a boundary. Return whether an optimizer has stepped since the previous boundary."""
        stepped = (optimizer for optimizer, _ in self._stepped.values())
        self._taken = frozenset(id(parameter) for optimizer in stepped for parameter in _parameters_of(optimizer))
        self._crossed, self._stepped = self._stepped, {}
        return bool(self._crossed)

    def held_back(self) -> bool:
        """Return whether an optimizer of the Session changed nothing in the step before the last boundary, and no harm was done: the
        parameters are finite. A wrapper's step calls the optimizer in it, which has the same parameters."""
        changed = (optimizer for optimizer, found in self._crossed.values() if not bool(found))
        used = {id(parameter) for optimizer in changed for parameter in _parameters_of(optimizer)}
        parts = [_parameters_of(optimizer) for source in self._optimizers for _, _, optimizer in source.parts()]
        if not any(part and used.isdisjoint(map(id, part)) for part in parts):
            return False
        return self._parameters_finite()

    def finite(self) -> bool:
        """Return whether the parameters, buffers, gradients and the optimizers' states are known to be finite."""
        parts = [optimizer for source in self._optimizers for _, _, optimizer in source.parts()]
        parameters = chain(*map(_parameters_of, parts))
        gradients = (_values(_parts(each.grad)) for each in parameters if each.grad is not None)
        states = (each for optimizer in parts for state in optimizer.state.values() for each in state.values())
        with torch.no_grad(), suppress(SnapshotError, RuntimeError, NotImplementedError, TypeError):
            moments = (local(each) for each in states if torch.is_tensor(each))
            modules = chain(*(model.tensors().values() for model in self._models))
            return self._parameters_finite() and finite(sums(chain(modules, gradients, moments)))
        return False

    def _parameters_finite(self) -> bool:
        with torch.no_grad(), suppress(SnapshotError):  # if a model can't be read, nothing is known about it
            judged = [model.judged(model.tensors()) for model in self._models]
            return finite(sums(chain(*judged, (each for _, each in self._others_parameters()))))
        return True

    def collect(self) -> Nested:
        """Return the gradients to save. Raises Halfway if a snapshot can't contain them."""
        found = bytearray()
        kept: dict[str, Any] = {}
        hidden = next(_kept_by_wrappers(self._models), "")
        self._left = {}
        for name, parameter in self._parameters():
            kind = self._kind(parameter)
            found.append(kind)
            gradient = parameter.grad
            if gradient is not None:
                self._left[id(parameter)] = weakref.ref(gradient)
            if kind == _SUM and gradient is not None:
                if _fits(parameter):
                    kept[str(len(found) - 1)] = _parts(gradient)
                else:
                    hidden = hidden or name
        if self.doubtful and not self.ends and not finite(sums(map(_values, kept.values()))):
            raise Halfway("the gradients contain NaN or Inf")
        if hidden and not self.ends:
            if not self._told:
                self._told = True
                self._tell(
                    f"no snapshot is taken while gradients accumulate in {hidden}. After a fault, the ranks return to an earlier step"
                )
            raise Halfway(f"gradients accumulate in {hidden}")
        return {"found": bytes(found), "sums": kept} if any(found) else {}

    def _kind(self, parameter: torch.Tensor) -> int:
        if parameter.grad is None:
            return _NONE
        key = id(parameter)
        if key not in self._taken or key in self._carried:
            return _SUM
        return _LEFT if key in self._dropped or not _fits(parameter) else _SUM

    def restore(self, kept: Nested) -> None:
        """Restore the gradients from `kept`. Raises RuntimeError if a wrapper has sums that can't be removed."""
        _forget_sums(self._models)
        for other in self._others:
            other.collect()  # this updates the list of its present tensors
        for model in self._models:
            model.trained_attributes(anew=True)
        parameters = [parameter for _, parameter in self._parameters()]
        found, sums = (kept["found"], kept["sums"]) if kept else (bytes(len(parameters)), {})
        for number, (parameter, kind) in enumerate(zip(parameters, found, strict=True)):
            if kind == _NONE:
                parameter.grad = None
            elif kind == _SUM:
                _fill(parameter, sums[str(number)])
        self._left = {}

    def _parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the parameters of the models, those that only optimizers have, and those among the script's values. A parameter may be
        yielded twice."""
        for model in self._models:
            yield from model.named()[0].items()
            yield from (("an attribute of a module", each) for each in model.trained_attributes())
        yield from self._others_parameters()

    def _others_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the parameters that are not of the models."""
        for optimizer in self._optimizers:
            yield from optimizer.orphans()
        for other in self._others:
            yield from (("a value of the session", parameter) for parameter in other.trained)


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _fits(parameter: torch.Tensor) -> bool:
    """Whether a snapshot can store the parameter's gradient: it is sparse, or has the parameter's shape and placements."""
    gradient = parameter.grad
    assert gradient is not None
    if gradient.layout is torch.sparse_coo:
        return True
    same = gradient.layout is torch.strided and gradient.shape == parameter.shape
    return same and getattr(gradient, "placements", None) == getattr(parameter, "placements", None)


def _parts(gradient: torch.Tensor) -> Any:
    if gradient.layout is not torch.sparse_coo:
        return local(gradient)
    # Copies, because backward resizes them, which torch forbids while another tensor reads them.
    indices, values = gradient._indices(), gradient._values()
    return {"indices": indices.clone(), "values": values.detach().clone(), "coalesced": gradient.is_coalesced()}


def _values(part: Any) -> torch.Tensor:
    return part["values"] if isinstance(part, dict) else part


def _fill(parameter: torch.Tensor, kept: Any) -> None:
    if isinstance(kept, dict):
        content = (kept[part].to(parameter.device) for part in ("indices", "values"))
        parameter.grad = torch.sparse_coo_tensor(*content, parameter.shape, is_coalesced=kept["coalesced"] or None)
        return
    gradient = parameter.grad
    if gradient is None or not _fits(parameter) or gradient.layout is not torch.strided or gradient.dtype != kept.dtype:
        gradient = torch.zeros_like(parameter.detach(), dtype=kept.dtype)
    put(local(gradient), kept)
    parameter.grad = gradient


# -- what wrappers keep ------------------------------------------------------------------------------------------------------


def _kept_by_wrappers(models: Collection[Modules]) -> Iterator[str]:
    """Yield the names of wrappers with internal sums. DistributedDataParallel records in its reducer which parameters the passes under
    `no_sync` used. FSDP2 has sums besides the parameters (torch.distributed.fsdp, `FSDPParam`: `unsharded_accumulated_grad`, or the
    gradient of `_unsharded_param`)."""
    for module in (each for model in models for each in model.modules):
        if isinstance(module, DistributedDataParallel):
            if _notes_use(module):
                yield "DistributedDataParallel(find_unused_parameters=True) under no_sync"
        elif any(gradient is not None for each in _sharded(module) for gradient in _unsharded(each)):
            yield "FSDP under set_requires_gradient_sync(False)"


def _forget_sums(models: Collection[Modules]) -> None:
    for module in (each for model in models for each in model.modules):
        if isinstance(module, DistributedDataParallel):
            if _notes_use(module):
                raise RuntimeError(
                    "DistributedDataParallel has recorded which parameters were used under no_sync, and can't undo that"
                )
        else:
            for each in _sharded(module):
                each.unsharded_accumulated_grad = None
                if hasattr(each, "_unsharded_param"):
                    each._unsharded_param.grad = None


def _notes_use(module: DistributedDataParallel) -> bool:
    """Whether the last pass was under `no_sync`, so that the wrapper records which parameters the pass used."""
    return module.find_unused_parameters and not module.require_forward_param_sync


def _unsharded(parameter: Any) -> tuple[Any, Any]:
    """Return FSDP2's accumulated gradients: first the one in the dtype of the reduction, then the one in the parameter's dtype."""
    return parameter.unsharded_accumulated_grad, getattr(getattr(parameter, "_unsharded_param", None), "grad", None)


def _sharded(module: torch.nn.Module) -> list[Any]:
    """Return the FSDP2 parameters of the module itself. The list is empty if it has none."""
    parameters = (each for fsdp in by_fsdp([module]) for group in groups(fsdp) for each in group.fsdp_params)
    return [each for each in parameters if hasattr(each, "unsharded_accumulated_grad")]
