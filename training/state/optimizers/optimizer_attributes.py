"""Attributes that a script adds to one of torch's optimizers, such as `optimizer.global_step`. For any optimizer, the state also contains
the objects that its step hooks change, and changed `defaults`, which new groups get."""

from __future__ import annotations

import functools
import types
from typing import Any

from torch.optim import Optimizer

from ....checkpoint.format.pytree import Tagged
from ....resilience.errors import SnapshotError
from ..modules.attribute_rules import is_private, why_lost
from ..modules.hooks import OF_OPTIMIZERS, Hooks, hooks_of_optimizer
from ..modules.unsaved_parts import Reports
from ..values.borrowed_memory import Lenders
from ..values.kind import class_of, is_source
from ..values.value_source import Known, Packed
from .nested_optimizers import framework, of_every_optimizer
from .optimizer_packing import FUNCTIONS

_GONE, _REMOVED = "..gone", "..removed"
"""Keys besides the attributes' names: for the names of deleted attributes, and for the names of removed hooks."""


class PutOn:
    def __init__(self, name: str, lenders: Lenders) -> None:
        """name: the optimizer's name. lenders: sources whose memory the attributes' values may use."""
        self._name = name
        self._packed = Packed(name, Known(lenders))
        self._reports = Reports()
        self._kept: dict[tuple[str, str, type], bool] = {}
        """Whether a snapshot can store the attribute, by part (one torch optimizer), attribute name and type."""
        self._began: dict[str, set[str]] = {}
        self._defaults: dict[str, dict[str, Any]] = {}
        """The names of the attributes (`_began`) and the `defaults` when first seen, by part."""
        self._hooks: dict[str, Hooks] = {}
        """The hooks of each part."""

    def collect(self, part: str, optimizer: Optimizer) -> Any:
        """Return the packed attributes; empty if there are none."""
        if part not in self._began and not framework(optimizer):
            self._say_what_is_lost(optimizer)
        held = _put_on(optimizer)
        gone = sorted(self._began.setdefault(part, {*held}) - vars(optimizer).keys())
        hooks = self._hooks_of(part, optimizer)
        held |= self._changed_defaults(part, optimizer)
        held |= {place: value for place, value in hooks.objects().items() if value is not None}
        removed = hooks.gone()
        held |= ({_GONE: gone} if gone else {}) | ({_REMOVED: removed} if removed else {})
        if not held:
            return {}
        told = {name: value for name, value in held.items() if self._can_be_kept(part, name, value)}
        try:
            return Tagged(("", self._packed.pack(told))) if told else {}
        except SnapshotError:  # a value has changed to one that can't be saved
            for name, value in list(told.items()):
                del self._kept[part, name, type(value)]
                if not self._can_be_kept(part, name, value):
                    del told[name]
            return Tagged(("", self._packed.pack(told)))

    def restore(self, part: str, optimizer: Optimizer, kept: Any) -> None:
        if self._changed_defaults(part, optimizer):
            optimizer.defaults = dict(self._defaults[part])
        live, hooks = _put_on(optimizer), self._hooks_of(part, optimizer)
        told = self._packed.unpack(kept[1], live | hooks.objects()) if kept else {}
        told = {name: value for name, value in told.items() if not name.startswith(OF_OPTIMIZERS)}
        hooks.restore(told.pop(_REMOVED, {}))
        gone, began = told.pop(_GONE, ()), self._began.setdefault(part, {*live})
        for name, value in live.items():
            came = name not in told and name not in began
            if name in gone or (came and self._kept.get((part, name, type(value)))):
                delattr(optimizer, name)
        vars(optimizer).update(told)

    def _say_what_is_lost(self, optimizer: Optimizer) -> None:
        for name, value in vars(optimizer).items():
            if isinstance(value, types.FunctionType) and (why := why_lost(value)):
                self._reports.not_kept((id(optimizer), name), f"{self._name}.{name}", why)

    def _hooks_of(self, part: str, optimizer: Optimizer) -> Hooks:
        if part not in self._hooks:
            self._hooks[part] = Hooks(hooks_of_optimizer(optimizer))
        return self._hooks[part]

    def _changed_defaults(self, part: str, optimizer: Optimizer) -> dict[str, Any]:
        """Return the `defaults` if they have changed, otherwise an empty dict."""
        now = getattr(optimizer, "defaults", {})
        began = self._defaults.setdefault(part, dict(now))
        same = now.keys() == began.keys() and all(now[key] is began[key] for key in now)
        return {} if same else {"defaults": dict(now)}

    def _can_be_kept(self, part: str, name: str, value: Any) -> bool:
        place = part, name, type(value)
        if place not in self._kept:
            why = self._packed.why_not(value, f"{self._name}.{name}")
            self._kept[place] = not why
            if why:
                self._reports.not_kept(place, f"{self._name}.{name}", why)
        return self._kept[place]


def _put_on(optimizer: Optimizer) -> dict[str, Any]:
    if not type(optimizer).__module__.startswith("torch.optim."):
        return {}
    known = of_every_optimizer()
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in known
        and (name[:1] != "_" or is_private(type(optimizer), name, value))
        and not (_is_function(value) or is_source(class_of(value)))
    }


def _is_function(value: Any) -> bool:
    """Whether the value is a function without state that training changes, such as the functions that schedulers set."""
    if isinstance(value, types.MethodType):
        return is_source(class_of(value.__self__))
    return isinstance(value, (*FUNCTIONS, functools.partial))
