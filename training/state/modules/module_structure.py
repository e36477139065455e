"""The structure of modules when the training loop begins, and its later changes, which belong to the training state.

A restarted script builds its modules as at the beginning. Each snapshot records the later changes that a new process can repeat: buffers
that were added, removed or resized, parameters of another shape, `requires_grad`, train and eval mode. Only the script can build modules
that were added, removed or replaced. Only the processes that have such modules can restore the snapshot: a rewind in place puts the same
module objects back.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch.nn import Module, ParameterDict, ParameterList

from ....checkpoint.format.tensor_table import Piece
from ....resilience.text import formatting
from ..tensors.in_place import Nested
from .module_tensors import join, named_modules

_PARTS = ("_parameters", "_modules", "_buffers", "_forward_hooks", "_forward_pre_hooks")
_COUNTS = ("_size", "_keys")
"""Attributes, besides `_PARTS`, in which a ParameterList and a ParameterDict count their members."""
_ABSENT, _NONE, _STRIDES = "absent", "None", "strides"

Shapes: TypeAlias = dict[str, str]
"""The dtype and shape of each parameter or buffer, by name, with its strides if they are unusual. A missing tensor has `_ABSENT` or
`_NONE`."""


class Objects:
    """The objects that make up the modules at one moment."""

    def __init__(self, modules: Iterable[Module], chunks: Sequence[Module]) -> None:
        self.chunks = list(chunks)
        self.made = [(module, type(module), [dict(getattr(module, part)) for part in _PARTS]) for module in modules]
        self.counted = [
            (module, name, copy.copy(vars(module)[name]))
            for module, _, _ in self.made
            if isinstance(module, (ParameterList, ParameterDict))
            for name in _COUNTS
            if name in vars(module)
        ]

    def __eq__(self, other: object) -> bool:
        """Whether both consist of the same objects. Buffers and hooks are ignored: scripts replace buffers, and no other object refers to
        them."""
        return isinstance(other, Objects) and self._ids == other._ids

    __hash__ = None  # type: ignore[assignment]

    @cached_property
    def _ids(self) -> list[Any]:
        held = ([(name, id(each)) for part in parts[:2] for name, each in part.items()] for _, _, parts in self.made)
        return [(id(module), kind, ids) for (module, kind, _), ids in zip(self.made, held, strict=True)]


class Outline:
    def __init__(self, chunks: list[Module]) -> None:
        self._chunks, self._number = chunks, len(chunks)
        self.modules = named_modules(chunks)
        self._kinds = self._kinds_now()
        self._shapes = self._shapes_now()
        self._flags = {name: each.requires_grad for name, each in self._flagged().items()}
        self._hidden = {name for name in self._shapes if not self._persists(name)}
        self._modes = {name: module.training for name, module in self.modules.items()}
        self.began = self.now = Objects(self.modules.values(), chunks)
        """`began`: the objects at the beginning, or objects that have since replaced them. `now`: the present objects."""

    def look(self) -> str:
        """Read the modules again. Return the change since the loop began that a new process could not repeat; empty if there is none."""
        self.modules = named_modules(self._chunks)
        now, self.now = self._kinds_now(), Objects(self.modules.values(), self._chunks)
        if len(self._chunks) != self._number:
            return f"the list of models has {formatting.count(len(self._chunks), 'member')} and had {self._number}"
        if now == self._kinds:
            self.began = self.now
            return ""
        shapes = self._shapes_now()
        for name in (*self._kinds, *now):
            before = self._kinds.get(name, "a buffer" if name in self._shapes else "")
            after = now.get(name, "a buffer" if name in shapes else "")
            if before != after:
                became = f"is {after}, and was {before}" if before and after else "is new" if after else "is gone"
                return f"{name or 'the module itself'} {became}"
        return "their order has changed"

    def changes(self) -> Nested:
        """Return the changes since the loop began, as plain values; empty if there are none."""
        shapes = self._shapes_now()
        changed = {
            name: [self._shapes.get(name, _ABSENT), shapes.get(name, _ABSENT), self._persists(name)]
            for name in (*self._shapes, *(name for name in shapes if name not in self._shapes))
            if self._shapes.get(name) != shapes.get(name)
        }
        flags = {
            n: each.requires_grad for n, each in self._flagged().items() if each.requires_grad != self._flags.get(n)
        }
        modes = {n: m.training for n, m in self.modules.items() if m.training != self._modes.get(n)}
        told = {"tensors": changed, "requires_grad": flags, "training": modes}
        return {key: value for key, value in told.items() if value}

    def put_back(self, objects: Objects) -> None:
        """Put exactly these objects back into the modules, and nothing else."""
        self._chunks[:] = objects.chunks
        for module, kind, parts in objects.made:
            if type(module) is not kind:
                module.__class__ = kind
            for part, before in zip(_PARTS, parts, strict=True):
                live = getattr(module, part)
                live.clear()
                live.update(before)
            for name in (*module._parameters, *module._buffers, *module._modules):
                module.__dict__.pop(name, None)  # a computed weight (prune, weight_norm) would hide the parameter
        for module, name, count in objects.counted:
            vars(module)[name] = copy.copy(count)
        self.modules = named_modules(self._chunks)

    def may_change(self, told: Nested) -> set[str]:
        """Return the names of the tensors that `follow` sets: those that changed in this run, and those in `told` that began alike in both
        runs."""
        said = {name for name, (began, *_) in told.get("tensors", {}).items() if self._began(name) == began}
        now = self._shapes_now()
        return said | {name for name in (*self._shapes, *now) if self._shapes.get(name) != now.get(name)}

    def follow(self, told: Nested, described: Mapping[str, Piece]) -> None:
        """Set tensors, flags and modes as recorded in `told`. Set all others to what they were when the loop began."""
        for name in self.may_change(told):
            wanted = told.get("tensors", {}).get(name, [_ABSENT, self._began(name), name not in self._hidden])
            self._make(name, wanted[1], bool(wanted[2]), described.get(name))
        for name, each in self._flagged().items():
            wanted_flag = told.get("requires_grad", {}).get(name, self._flags.get(name))
            if wanted_flag is not None and wanted_flag != each.requires_grad:
                each.requires_grad_(wanted_flag)
        for name, module in self.modules.items():
            module.training = told.get("training", {}).get(name, self._modes.get(name, module.training))

    # -- inside ---------------------------------------------------------------------------------------------------------

    def _began(self, name: str) -> str:
        return self._shapes.get(name, _ABSENT)

    def _make(self, name: str, wanted: str, persists: bool, piece: Piece | None) -> None:
        path, _, key = name.rpartition(".")
        module = self.modules.get(path)
        if module is None:  # the module and its tensors no longer exist
            return
        live = module._parameters.get(key) if key in module._parameters else module._buffers.get(key)
        if wanted == _ABSENT:
            module._buffers.pop(key, None)
            module._non_persistent_buffers_set.discard(key)
        elif live is not None and piece is not None and shape_of(live) != wanted:
            live.data, live.grad = _room(piece, live.device, wanted), None
        elif wanted == _NONE or (live is None and piece is not None):  # tied tensors: only the first name has a piece
            there = (
                None
                if wanted == _NONE or piece is None
                else _room(piece, _device(module, self._tensors("_parameters")), wanted)
            )
            module.__dict__.pop(key, None)
            module.register_buffer(key, there, persistent=persists)

    def _kinds_now(self) -> dict[str, str]:
        """Return, by name, the structure that only the script can build: modules, parameters, and names that share one tensor."""
        kinds = {name: f"a {type(m).__module__}.{type(m).__qualname__}" for name, m in self.modules.items()}
        first: dict[int, str] = {}
        for name, each in (parameters := self._tensors("_parameters")).items():
            one = first.setdefault(id(each), name)
            kinds[name] = "a parameter" if one == name else f"the parameter {one}"
        for name, each in self._tensors("_buffers").items():
            if (one := first.setdefault(id(each), name)) != name:
                kinds[name] = f"the {'parameter' if one in parameters else 'buffer'} {one}"
        return kinds

    def _tensors(self, part: str) -> dict[str, torch.Tensor]:
        """Return the `_parameters` or the `_buffers` of all modules, by name."""
        return {
            join(path, key): each
            for path, module in self.modules.items()
            for key, each in getattr(module, part).items()
            if each is not None
        }

    def _flagged(self) -> dict[str, torch.Tensor]:
        """Return the tensors whose `requires_grad` can be set."""
        return self._tensors("_parameters") | {
            name: each for name, each in self._tensors("_buffers").items() if each.is_leaf
        }

    def _shapes_now(self) -> Shapes:
        shapes = {name: shape_of(each) for name, each in self._tensors("_parameters").items()}
        for path, module in self.modules.items():
            shapes |= {join(path, key): _NONE if b is None else shape_of(b) for key, b in module._buffers.items()}
        return shapes

    def _persists(self, name: str) -> bool:
        path, _, key = name.rpartition(".")
        return path not in self.modules or key not in self.modules[path]._non_persistent_buffers_set


def shape_of(tensor: torch.Tensor) -> str:
    said = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
    return said if _lies_in_order(tensor) else f"{said} {_STRIDES} {tuple(tensor.stride())}"


def same_shape(one: str, other: str) -> bool:
    """Whether two shapes differ at most in their strides."""
    return one.partition(f" {_STRIDES} ")[0] == other.partition(f" {_STRIDES} ")[0]


def _lies_in_order(tensor: torch.Tensor) -> bool:
    """Whether the tensor is contiguous. The answer is also True if no new tensor can get its strides, such as those of an expanded
    tensor."""
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return True
    dense = sorted(zip(tensor.stride(), tensor.shape, strict=True))
    size = 1
    for stride, length in dense:
        if length > 1 and stride != size:
            return True
        size *= length
    return False


def _device(module: Module, parameters: Mapping[str, torch.Tensor]) -> torch.device:
    """Return the device on which a module computes, for the module's new buffers."""
    tensors: list[Any] = [*module.parameters(), *module.buffers(), *parameters.values()]
    return tensors[0].device if tensors else torch.device("cpu")


def _room(piece: Piece, device: torch.device, wanted: str) -> torch.Tensor:
    _, _, strides = wanted.partition(f" {_STRIDES} ")
    dtype = getattr(torch, piece.dtype)
    if not strides:
        return torch.zeros(piece.shape, dtype=dtype, device=device)
    numbers = [int(each) for each in strides.strip("(),").split(",")]
    return torch.empty_strided(piece.shape, numbers, dtype=dtype, device=device).zero_()
