"""Pack an optimizer's contents like any other value, with three exceptions. Parameters, the Session's modules, and the ids of both become
references. Values that are not training state stay in place, such as functions, or a model that the Session does not know. Tensors are
filled in place, and a new tensor gets the memory layout of its parameter.

A tensor that is not row-major is also saved as one tensor, so that its name identifies it in other layouts. The snapshot records its
strides, and also which tensors share memory (`shared_storage.py`).
"""

from __future__ import annotations

import logging
import threading
import types
from collections import defaultdict
from collections.abc import Collection, Mapping
from types import ModuleType
from typing import Any

import numpy as np
import torch

from ....checkpoint.arena.staging import refuse
from ....checkpoint.format.pytree import Tagged
from ....checkpoint.format.tensor_table import Piece
from ....resilience.errors import LayoutError, SnapshotError
from ...warm.side_effects import installed, module_file
from ..modules.module_source import Modules
from ..tensors.in_place import fits, local, misfit, put
from ..tensors.tensor_subclasses import only
from ..values import type_adapters
from ..values.array_views import Unsavable, address
from ..values.class_adapters import NotFound
from ..values.kind import has_state_dict, is_source
from ..values.packing import Packing
from ..values.session_parts import Parts
from ..values.trail import called
from ..values.unpacking import Unpacking
from .hybrid_optimizer import stepped_copy
from .shared_storage import Lying, Memories, Told

HERE = Tagged(("here", ""))
"""Marks a value that is not saved and stays as it is."""
_STAYS = (
    torch.Event,
    torch.Stream,
    torch.optim.Optimizer,
    torch.utils.hooks.RemovableHandle,
    logging.Logger,
    threading.Thread,
    type(threading.Lock()),
    ModuleType,
)
"""Types whose values stay as they are. Nested optimizers are saved as parts of their own."""
_VALUES = ("builtins", "collections", "numpy", "numpy.random", "random", "datetime", "decimal", "fractions")
"""Python modules whose objects are packed, not left in place."""
_KINDS = frozenset(each for kind in (*type_adapters.CHANGELESS, *type_adapters.CHANGING) for each in kind.types)
"""Types whose objects are packed whatever their module, such as torch's dtypes and generators."""
FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, type)


class OptimizerPacking(Packing):
    """Packs the contents of one optimizer, for one snapshot."""

    def __init__(
        self,
        name: str,
        parameters: Mapping[str, torch.Tensor],
        apart: Mapping[str, Any],
        parts: Parts,
        copied: Collection[int] = frozenset(),
    ) -> None:
        """parameters: by their positions in the groups. apart: containers that are saved separately, by name. parts: the Session's modules.
        copied: addresses of memory whose tensors are copied."""
        places = dict(zip(map(id, parameters.values()), parameters, strict=True))
        self._pointed_to = {id(each): key for key, each in apart.items()} | places
        super().__init__(name, self._pointed_to, parts=parts)
        self._places = places
        self.parameters, self._apart = parameters, apart
        self._lenient = self._strict = False
        self.strides: dict[int, list[int]] = {}
        """The strides of the tensors that are not row-major, by the tensor's number."""
        self.lying, self._copied = Lying(), copied
        self.shared_memories: dict[int, Told] = {}
        """The memory that several tensors of the optimizer share, by address; complete once all tensors are packed."""
        self.left = False
        """Whether a value was left in place that only the optimizer's own `state_dict` can save."""

    def attribute(self, value: Any, name: str, *, declares: bool) -> Any:
        """Return the packed value of an attribute. A callable stays in place, unless a snapshot can restore all of it. declares: the
        optimizer has its own `state_dict`. With a `state_dict` of the optimizer's own, objects of classes that only the optimizer knows,
        and all objects of other packages, stay in place too."""
        if isinstance(value, torch.nn.Module) and self._trains(value):
            return HERE  # the value is the model, which the script passes in again
        self._lenient = (declares or callable(value)) and not self._whole(value, declares)
        found = self.pack(value, f".{name}")
        self._lenient = False
        return found

    def _whole(self, value: Any, own: bool) -> bool:
        """Return whether a trial restores all of the value. own: accept only the script's classes and known types."""
        kind = type(value)
        if isinstance(value, FUNCTIONS) or (own and kind not in _KINDS and installed(module_file(kind))):
            return False
        trial = OptimizerPacking(self._name, self.parameters, self._apart, self._parts)
        trial._strict = True
        try:
            kept = trial.pack(value)
            sources = {**self._apart, **self.parameters}
            OptimizerUnpacking(self._name, sources, trial.strides, False, self._parts).unpack(kept, None)
        except (SnapshotError, LayoutError):
            return False
        return True

    def _pointed(self, number: int) -> Any:
        place = self._pointed_to.get(number)
        return super()._pointed(number) if place is None else Tagged(("id", place))

    def _trains(self, module: torch.nn.Module) -> bool:
        return any(id(parameter) in self._places for parameter in module.parameters())

    def _stays(self, value: Any) -> Tagged:
        if self._hashing:
            raise Unsavable(
                f"among its keys is a {type(value).__qualname__} that the Session does not know: give it to the Session"
            )
        return HERE

    def _elements(self, value: Any) -> Any:
        if type(value) is np.ndarray:
            return super()._elements(value)
        here = only(value, called(self._at))
        refuse(called(self._at), here)
        if not here.is_contiguous() and 0 not in here.stride():
            self.strides[len(self.met)] = list(here.stride())
        self.lying.note(len(self.met), here)
        self._number(value)
        return here.detach().clone() if self._copied and address(here) in self._copied else here

    def _other(self, kind: type, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._elements(value)
        if isinstance(value, torch.nn.Module) and (part := self._parts.said(value)):
            return part
        if self._strict and (isinstance(value, _STAYS) or is_source(kind)):
            raise Unsavable("it is not a plain value")
        if isinstance(value, torch.nn.Module):
            if self._trains(value):
                return self._stays(value)
            self._number(value)
            return Tagged(("module", Modules([value]).tensors()))
        if isinstance(value, _STAYS) or (self._lenient and callable(value)):
            return self._stays(value)
        if has_state_dict(kind):
            self._number(value)
            return Tagged(("state_dict", self._down(dict(value.state_dict()))))
        if kind is defaultdict:  # the live mapping has its factory, which often has no name
            self._number(value)
            return self._mapping(dict, dict(value))
        if self._lenient and kind not in _KINDS and kind.__module__ not in _VALUES:
            self.left = True
            return self._stays(value)
        return super()._other(kind, value)


class OptimizerUnpacking(Unpacking):
    """Unpacks the contents of one optimizer, for one restore."""

    def __init__(
        self,
        name: str,
        sources: Mapping[str, Any],
        strides: Mapping[int, list[int]],
        as_they_lie: bool,
        parts: Parts,
        memories: Memories | None = None,
    ) -> None:
        """sources, parts: the parameters and containers, and the modules, as in `OptimizerPacking`. as_they_lie: the snapshot has no
        strides, so a live tensor keeps its own. memories: the memory that several tensors share."""
        super().__init__(name, sources, parts=parts)
        self._strides, self._as_they_lie = strides, as_they_lie
        self._memories = Memories((), {}) if memories is None else memories
        self.device = torch.device("cpu")
        """The device on which new tensors are created."""

    def _free(self, live: Any, kind: type) -> bool:
        return super()._free(live, kind) or (kind is dict and super()._free(live, defaultdict))

    def _elements(self, kept: Any, live: Any) -> Any:
        if type(kept) is np.ndarray:
            return super()._elements(kept, live)
        strides, where = self._strides.get(len(self.made)), self.device
        if self._memories.has(len(self.made)):
            hint = None if id(live) in self._taken else live
            found = self._memories.place(len(self.made), kept, hint, where)
            put(only(found, self._name), kept)
            return self._own(found)
        if isinstance(live, torch.Tensor):
            where, here = live.device, only(live, self._name)
            lies = self._as_they_lie or (here.is_contiguous() if strides is None else [*here.stride()] == strides)
            free = id(live) not in self._taken and self._memories.may_fill(here)
            if free and (here.shape, here.dtype) == (kept.shape, kept.dtype) and lies:
                put(here, kept)
                return self._own(live)
        lying = list(kept.stride()) if strides is None else strides
        return self._own(torch.empty_strided(kept.shape, lying, dtype=kept.dtype, device=where).copy_(kept))

    def _tagged(self, tag: str, content: Any, live: Any) -> Any:
        device = tag == "torch.device" and isinstance(live, torch.device)  # its number may differ in this process
        if tag == "here" or device:
            return live
        if tag not in ("module", "state_dict"):
            return super()._tagged(tag, content, live)
        if not (isinstance(live, torch.nn.Module) if tag == "module" else has_state_dict(type(live))):
            raise NotFound(f"an object with a {tag} does not exist any more")
        self._own(live)
        if tag == "module":
            for name, tensor in Modules([live]).tensors().items():
                put(tensor, content[name])
        else:
            live.load_state_dict(self._up(content, None))
        return live


def device_of(parameters: list[torch.Tensor]) -> torch.device:
    return parameters[0].device if parameters else torch.device("cpu")


def make_room(where: str, inner: torch.optim.Optimizer, parameter: torch.Tensor, described: Mapping[str, Any]) -> None:
    """Give the state of one parameter the entries in `described`: delete other entries, create entries that a fresh optimizer does not have
    yet."""
    if not isinstance(inner.state.get(parameter, {}), dict):
        del inner.state[parameter]
    state, own, stepped = inner.state[parameter], local(parameter), stepped_copy(inner, parameter).detach()
    for key in set(state) - set(described):
        del state[key]
    for key, piece in described.items():
        if not isinstance(piece, Piece):
            continue
        if torch.is_tensor(state.get(key)):
            here = local(state[key])
            if here.shape == own.shape:  # a tensor of another shape may have grown during training
                fits(f"{where} {key}", here, piece)
            if not misfit("", here, piece):
                continue
        # Moments are where the parameter is stepped. torch keeps `step`, a scalar, on the CPU unless the optimizer is fused or capturable.
        away = any(g.get("fused") or g.get("capturable") for g in inner.param_groups) or piece.shape
        device = stepped.device if away else torch.device("cpu")
        dtype = getattr(torch, piece.dtype)
        alike = tuple(own.shape) == piece.shape  # then the state is also a DTensor if the parameter is one
        state[key] = (
            torch.zeros_like(stepped, dtype=dtype) if alike else torch.zeros(piece.shape, dtype=dtype, device=device)
        )
    if not state:
        inner.state.pop(parameter, None)
