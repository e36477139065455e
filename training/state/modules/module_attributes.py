"""Plain attributes of modules and parameters, which torch's state_dict leaves out: `self.calls += 1` in a forward pass, a moving average, a
generator, the `p` of a dropout that the script lowers. Objects inside hooks are included.

A snapshot stores an immutable value (a number, a text, a device) only if the value has changed since the loop began. A snapshot always
stores other values that can be packed and rebuilt. Values that can't be packed and rebuilt, such as functions without a name, stay as the
script made them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import repeat
from operator import is_
from typing import Any

import torch
from torch.nn import Module

from ....checkpoint.format.pytree import Tagged
from ....resilience.errors import LayoutError, SnapshotError
from ...attach.rank_stderr import say
from ..values.borrowed_memory import Lenders, Loans
from ..values.kind import class_of
from ..values.session_parts import Parts
from ..values.type_adapters import is_bound
from ..values.value_source import Known, Packed
from . import attribute_rules
from .attribute_beginnings import Beginnings
from .attribute_rules import (
    Owner,
    is_constant,
    is_fixed,
    is_made_late,
    is_remade,
    is_scripts_function,
    is_scripts_object,
    is_told,
    is_value,
    looked_at,
    owner_of,
    same,
)
from .foreign_objects import Foreigners
from .graph_tensors import WithoutGraph, is_in_graph
from .hooks import Hooks, hooks_of_modules
from .unsaved_parts import Reports, moves, note, why_unsaved

_HOOKS, _GONE, _REMOVED = "..hooks", "..gone", "..removed"
"""Keys besides the modules' paths and the parameters' names (which begin with one dot). Torch allows no name that begins with a dot."""
_ABSENT: Any = object()
_NOTHING: tuple[int, list[str], list[Any]] = (-1, [], [])


class Attributes:
    def __init__(self, modules: Mapping[str, Module], lenders: Lenders, name: str = "") -> None:
        """Record the attributes as the loop begins. lenders: sources (saved objects) whose memory they may use. name: for messages."""
        self._lenders, self._name = lenders, name
        self._modules: dict[str, tuple[Module, Owner]] = {}
        self._parameters: dict[str, torch.Tensor] = {}
        """The parameters of these modules. Each key is a dot and the parameter's full name."""
        self._hooks = Hooks()
        self._calm: dict[str, tuple[int, list[str], list[Any]]] = {}
        """For each module with nothing to record: the number of its attributes, and the names and values to compare. Modules with a tensor
        that has a graph are left out: the reference would keep a step's activations in memory."""
        self._stays: dict[str, Any] = {}
        """Parts that no snapshot stores, by attribute and number."""
        self._known = Known(lenders, self._stays)
        self._packed = Packed(name or "a module", self._known, watches=True)
        self._without_graph = WithoutGraph()
        self._foreign = Foreigners(lambda called: Packed(called, self._known))
        self._keeps: dict[tuple[str, str, type], bool] = {}
        self._beginnings = Beginnings(lenders, self._foreign)
        self._gifted: set[str] = set()
        """The names of the parameters that already had attributes when first seen."""
        self._gone: dict[str, list[str]] = {}
        """The names of attributes that existed when first seen and that the script has deleted, by path."""
        self._dropped: set[tuple[str, str]] = set()
        """Attributes that snapshots do not contain, or no longer contain."""
        self._reports = Reports()
        self.look(modules)

    def look(self, modules: Mapping[str, Any]) -> None:
        """Read the modules again, because some may be new."""
        kinds: dict[str, Any] = {path: type(each) for path, each in modules.items()}
        self._modules = {path: (each, owner) for path, each in modules.items() if (owner := owner_of(kinds[path]))}
        self._parameters = {
            f".{path}.{name}" if path else f".{name}": each
            for path, (module, _) in self._modules.items()
            for name, each in module._parameters.items()
            if each is not None
        }
        loans = Loans(self._lenders)
        fresh = {path: each for path, (each, _) in self._modules.items() if each not in self._beginnings}
        for path, (thing, owner) in self._things():
            if thing not in self._beginnings:
                note(self._stays, path, dict(looked_at(thing, owner)))
            self._beginnings.add(thing, owner, loans)
        for parameter in self._parameters.values():  # a parameter without attributes now: every later attribute is new
            self._beginnings.add_new(parameter)
        self._gifted = {name for name, each in self._parameters.items() if self._beginnings.of(each).kept}
        for path, module in fresh.items():
            self._say_what_is_lost(path, module)
        note(self._stays, _HOOKS, self._hooks.add(hooks_of_modules(fresh)))
        self._calm.clear()
        self._gone.clear()

    def _say_what_is_lost(self, path: str, module: Module) -> None:
        for name, value in attribute_rules.every(module).items():
            if id(value) not in self._lenders.names and (why := attribute_rules.why_lost(value)):
                self._drop(path, name, why)

    def collect(self) -> Any:
        """Return the attributes to record. The result is empty if there are none."""
        told, self._without_graph = {}, WithoutGraph()
        if self._foreign.look():
            self._calm.clear()
        for path, (module, owner) in self._modules.items():
            held, (count, names, values) = vars(module), self._calm.get(path, _NOTHING)
            if len(held) == count and all(map(is_, map(held.get, names, repeat(_ABSENT)), values)):
                continue
            met = self._without_graph.met
            if found := self._found(path, module, owner):
                told[path] = found
                continue
            own = attribute_rules.every(module)
            if met == self._without_graph.met and not attribute_rules.slots_of(class_of(module)):
                self._calm[path] = len(held), [*own], [*own.values()]
        for name, parameter in self._with_attributes():
            if found := self._found(name, parameter, Owner.PARAMETER):
                told[name] = found
        if self._gone:
            told[_GONE] = dict(self._gone)
        if removed := self._hooks.gone():
            told[_REMOVED] = removed
        if found := self._in_hooks():
            told[_HOOKS] = found
        self._lenders.sharing.note(self._name, self._shareable(told), model=True)
        if not told:
            self._packed.trained = []
            self._packed.begin()
            return {}
        try:
            return Tagged(("", self._packed.pack(told)))
        except SnapshotError:  # a value has changed to one that can't be saved
            for path, found in told.items():
                for name, value in list(found.items()):
                    if why := self._against(path, name, value):
                        del found[name]
                        self._keeps[path, name, type(value)] = False  # otherwise each snapshot would try again
                        self._drop(path, name, why, " any more")
            return Tagged(("", self._packed.pack(told)))

    def _shareable(self, told: Mapping[str, Mapping[str, Any]]) -> dict[int, str]:
        """Return the names of the recorded values that can change, by id. Third-party objects present when the loop began are left out."""
        return {
            id(value): self._called(path, name)
            for path, found in told.items()
            if path[:2] != ".."
            for name, value in found.items()
            if not is_constant(value) and id(value) not in self._foreign.changed
        }

    @property
    def trained(self) -> list[torch.Tensor]:
        """Return the tensors in the last collected attributes that may have gradients."""
        return self._packed.trained

    def restore(self, kept: Any) -> None:
        on_tensors = {name: self._parameters[name] for name in (kept[1] if kept else ()) if name in self._parameters}
        things = dict(self._things()) | {name: (each, Owner.PARAMETER) for name, each in on_tensors.items()}
        live = {path: dict(looked_at(thing, owner)) for path, (thing, owner) in things.items()}
        live[_HOOKS] = self._hooks.objects()
        told = self._packed.unpack(kept[1], live) if kept else {}
        in_hooks, gone = told.pop(_HOOKS, {}), told.pop(_GONE, {})
        self._hooks.restore(told.pop(_REMOVED, {}))
        if lost := told.keys() - things.keys():
            raise LayoutError(f"the snapshot holds attributes of {min(lost).lstrip('.')}, which this run does not have")
        if missing := in_hooks.keys() - self._hooks.objects().keys():
            say(
                f"{self._name}: the hook {min(missing)} is not registered in this run. Its state in the snapshot is not restored"
            )
        self._calm.clear()
        for path, (thing, owner) in things.items():
            self._put(path, thing, owner, told.get(path, {}), gone.get(path, ()))
        self._foreign.put_back({id(value) for found in told.values() for value in found.values()})

    def _put(self, path: str, thing: Any, owner: Owner, told: Mapping[str, Any], gone: Sequence[str]) -> None:
        began = self._beginnings.of(thing)
        made = {name: value for name, value in began.made.items() if (path, name) not in self._dropped}
        wanted = {name: value for name, value in {**made, **told}.items() if name not in gone}
        too_many = []
        for name, value in looked_at(thing, owner):
            came = name not in wanted and name not in began.names
            kept = (is_constant(value) and is_told(value)) or self._keeps.get((path, name, type(value)))
            if name in gone or (came and kept):
                too_many.append(name)
        attribute_rules.change(thing, wanted, too_many)

    def _things(self) -> Iterator[tuple[str, tuple[Any, Owner]]]:
        yield from self._modules.items()
        yield from ((name, (each, Owner.PARAMETER)) for name, each in self._with_attributes())

    def _with_attributes(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the parameters that have or had attributes, each with its name."""
        gifted = any(map(vars, self._parameters.values()))
        for name, each in self._parameters.items() if gifted or self._gifted else ():
            if vars(each) or name in self._gifted:
                yield name, each

    def _found(self, path: str, thing: Any, owner: Owner) -> dict[str, Any]:
        began, ids = self._beginnings.of(thing).made, self._beginnings.of(thing).ids
        now = dict(looked_at(thing, owner))
        if gone := self._beginnings.gone(thing):
            self._gone[path] = gone
        else:
            self._gone.pop(path, None)
        found = {}
        for name, value in now.items():
            bare, why = self._without_graph.of(thing, name, value)
            if why:
                self._drop(path, name, why)
            elif self._tells(path, name, bare, began.get(name, began), type(thing)):
                found[name] = bare
            elif (
                id(value) != ids.get(name)
                and not (is_fixed(value) or id(value) in self._lenders.names)
                and (why := why_unsaved(value))
            ):
                self._reports.not_kept((type(thing), name), self._called(path, name), why)
        return found

    def _in_hooks(self) -> dict[str, Any]:
        found = {}
        for place, held in self._hooks.objects().items():
            value, why = self._without_graph.of(self, "", held)
            if why:
                self._drop(_HOOKS, place, why)
            elif value is not None and self._is_kept(_HOOKS, place, value, object):
                found[place] = value
        return found

    def _tells(self, path: str, name: str, value: Any, began: Any, of: type) -> bool:
        if is_constant(value):
            if same(value, began):
                return False
            if not (is_told(value) or is_remade(value, began)):
                why = "it is a function without a name in a module. Define it with def in a module, not as a lambda or inside a function"
                self._drop(path, name, why, told=is_scripts_function(value))
            return is_told(value) and self._keeps.get((path, name, type(value)), True)
        if value is began and id(value) not in self._foreign.changed:
            return False
        return self._is_kept(path, name, value, of)

    def _is_kept(self, path: str, name: str, value: Any, of: type) -> bool:
        if isinstance(value, torch.Tensor) and is_in_graph(value):
            return False
        place = path, name, type(value)
        if place not in self._keeps:
            self._keeps[place] = (
                is_value(type(value), of)
                or is_scripts_object(value)
                or self._beginnings.is_foreign(value, of)
                or is_made_late(value)
                or moves(value)
                or is_bound(value)
                or (isinstance(value, Module) and Parts(self._lenders).said(value) is not None)
            )
            if self._keeps[place] and (why := self._against(path, name, value)):
                self._keeps[place] = False
                self._drop(path, name, why)
        return self._keeps[place]

    def _against(self, path: str, name: str, value: Any) -> str:
        """Return the reason why a snapshot could not restore the value unchanged; empty if it could."""
        if is_made_late(value) and id(value) not in self._lenders.names:
            return f"its {type(value).__qualname__} was created after the Session. Create it before, and give it to the Session"
        if self._beginnings.is_foreign(value, object) and (why := self._foreign.against(value)):
            return why
        return self._packed.why_not(value, self._called(path, name))

    def _called(self, path: str, name: str) -> str:
        parts = (self._name, "" if path == _HOOKS else path.lstrip("."), name)
        return ".".join(filter(None, parts))

    def _drop(self, path: str, name: str, why: str, any_more: str = "", told: bool = True) -> None:
        self._dropped.add((path, name))
        if told:
            key = (type(self._modules[path][0]), name) if path in self._modules else (path, name)
            self._reports.not_kept(key, self._called(path, name), why, any_more)
