"""What an optimizer holds in Python's containers, as plain values and tensors; and put back into the very same containers and tensors.

What belongs to others is only pointed at: a parameter, or its id, by its place in the groups. What is no state (functions, the model
itself) stays where it is. A tensor that is held twice is saved once, and how it lies in memory is told: products depend on it.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable
from functools import cached_property
from types import ModuleType
from typing import Any

import torch

from .live import put, update
from .models import Modules
from .ordinary import only

HERE, _SET = "\0here", "\0set"
"""In the place of what stays where it is."""
_PARAMETER, _ID, _SAME = "\0parameter ", "\0id ", "\0same "
_NO_STATE = (
    torch.device,
    torch.dtype,
    torch.Event,
    torch.Stream,
    torch.optim.Optimizer,
    torch.utils.hooks.RemovableHandle,
    logging.Logger,
    threading.Thread,
    type(threading.Lock()),
    ModuleType,
)
"""Nested optimizers are parts of their own."""
_VALUES = ("builtins", "collections", "numpy", "numpy.random", "random", "datetime", "decimal", "fractions")
"""Modules whose objects are values."""
_SIMPLE = frozenset((bool, float, str, type(None)))


class Contained:
    """Of one optimizer, for one pass down or up."""

    def __init__(self, parameters: Iterable[tuple[str, torch.Tensor]], apart: Collection[int] = ()) -> None:
        """parameters: by their places in the groups. apart: ids of containers that are kept by themselves."""
        self.apart = apart
        self.parameters = dict(parameters)
        self.strides: dict[str, list[int]] = {}
        """Of tensors that are not row-major, by path."""
        self.as_they_lie = False
        """Nobody has told that: a live tensor lies as it does."""
        self._paths: dict[int, str] = {}
        """Of tensors, by id: where they were met first."""
        self._made: dict[str, torch.Tensor] = {}
        self._filled: set[int] = set()
        self.left: list[str] = []
        """Where objects stay that only their owner knows."""

    def down(self, value: Any, path: str, *, lenient: bool = False) -> Any:
        """As plain values and live tensors, as far as it can be; the rest as it is, for `walk.Form` to take or to refuse by name. lenient:
        the rest, too, stays where it is, and so do functions."""
        kind = type(value)
        if isinstance(value, torch.Tensor):
            return self._pointed(value, path)
        if kind is int:
            return _ID + self._places[value] if value in self._places else value
        if kind in (set, frozenset) and not self._places.keys().isdisjoint(value):
            return {_SET: sorted(self.down(each, path) for each in value)}
        if kind in (list, tuple) and _SIMPLE.issuperset(map(type, value)):  # thousands of names
            return value
        if kind is list or kind is tuple:
            return kind([self.down(each, f"{path}/{n}", lenient=lenient) for n, each in enumerate(value)])
        if id(value) in self.apart:
            return HERE
        if kind in (dict, OrderedDict, defaultdict):
            made = OrderedDict if kind is OrderedDict else dict
            return made(
                (key, self.down(each, f"{path}/{key}", lenient=lenient))
                for key, each in zip(map(self._key, value), value.values(), strict=True)
            )
        if isinstance(value, torch.nn.Module):
            theirs = any(id(parameter) in self._places for parameter in value.parameters())
            return HERE if theirs else Modules([value]).tensors()
        if isinstance(value, _NO_STATE) or (callable(value) and lenient):
            return HERE
        if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
            return dict(value.state_dict())
        if lenient and kind.__module__ not in _VALUES:
            self.left.append(path)
            return HERE
        return value

    def up(self, live: Any, kept: Any, path: str, device: torch.device) -> Any:
        """`kept` into `live`, where that is of its kind; gives what belongs there. device: of new tensors."""
        if isinstance(kept, torch.Tensor):
            self._made[path] = self._tensor(live, kept, self.strides.get(path), device)
            return self._made[path]
        if type(kept) is str and kept.startswith("\0"):
            return live if kept == HERE else self._found(kept)
        if isinstance(live, torch.nn.Module):
            for name, tensor in Modules([live]).tensors().items():
                put(tensor, kept[name])
            return live
        if hasattr(live, "load_state_dict"):
            live.load_state_dict(kept)
            return live
        if type(kept) is dict and _SET in kept:
            return (type(live) if isinstance(live, frozenset) else set)(map(self._found, kept[_SET]))
        if type(kept) in (dict, OrderedDict):
            return self._dict(live, kept, path, device)
        if type(kept) is list or type(kept) is tuple:
            olds = list(live) if isinstance(live, (list, tuple)) else []
            olds += [None] * (len(kept) - len(olds))
            new = [self.up(olds[n], each, f"{path}/{n}", device) for n, each in enumerate(kept)]
            if type(live) is list is type(kept):
                live[:] = new
                return live
            return type(kept)(new)
        holder = {"it": live}
        update(holder, {"it": kept})
        return holder["it"]

    # -- inside ---------------------------------------------------------------------------------------------------------

    @cached_property
    def _places(self) -> dict[int, str]:
        """By id."""
        return {id(parameter): place for place, parameter in self.parameters.items()}

    def _pointed(self, tensor: torch.Tensor, path: str) -> Any:
        if id(tensor) in self._places:
            return _PARAMETER + self._places[id(tensor)]
        first = self._paths.setdefault(id(tensor), path)
        if first != path:
            return _SAME + first
        here = only(tensor, path)
        if not here.is_contiguous() and 0 not in here.stride():
            self.strides[path] = list(here.stride())
        return here

    def _found(self, kept: Any) -> Any:
        """What a text points at; what is none is meant itself."""
        for sign, where in ((_SAME, self._made), (_PARAMETER, self.parameters), (_ID, self.parameters)):
            if type(kept) is str and kept.startswith(sign):
                found = where[kept.removeprefix(sign)]
                return id(found) if sign == _ID else found
        return kept

    def _tensor(self, live: Any, kept: torch.Tensor, strides: list[int] | None, device: torch.device) -> torch.Tensor:
        if (
            isinstance(live, torch.Tensor) and id(live) not in self._filled
        ):  # it may have come to be held twice meanwhile
            self._filled.add(id(live))
            here = only(live, "")
            lies = self.as_they_lie or (here.is_contiguous() if strides is None else [*here.stride()] == strides)
            if (here.shape, here.dtype) == (kept.shape, kept.dtype) and lies:
                put(here, kept)
                return live
        where = live.device if isinstance(live, torch.Tensor) else device
        lying = list(kept.stride()) if strides is None else strides
        return torch.empty_strided(kept.shape, lying, dtype=kept.dtype, device=where).copy_(kept)

    def _dict(self, live: Any, kept: dict[Any, Any], path: str, device: torch.device) -> Any:
        held: Any = live if isinstance(live, dict) else type(kept)()
        new = [
            (place, self.up(held.get(place), each, f"{path}/{key}", device))
            for key, each in kept.items()
            for place in (self._found(key),)
        ]
        held.clear()
        held.update(new)
        return held

    def _key(self, key: Any) -> Any:
        if type(key) is int and key in self._places:
            return _ID + self._places[key]
        return _PARAMETER + self._places[id(key)] if id(key) in self._places else key
