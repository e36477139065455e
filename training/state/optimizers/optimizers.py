"""Optimizers as sources (objects that the Session saves): torch's own, third-party ones, and Megatron's wrappers around them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, TypeAlias

import torch

from ....resilience.errors import LayoutError
from ..tensors.in_place import Nested, fits, local
from ..tensors.tensor_subclasses import only
from ..values.array_views import TENSORS
from ..values.borrowed_memory import STATE, Lenders, lent_by_groups
from ..values.session_parts import Parts
from .nested_optimizers import further, inner_optimizers, load_declared, nested, state_of
from .optimizer_attributes import PutOn
from .optimizer_packing import OptimizerPacking, make_room
from .optimizer_state import collect_part, restore_part
from .param_groups import Groups, Objects
from .shared_storage import Memories

PUT_ON = "put on"

Part: TypeAlias = tuple[str, Any, torch.optim.Optimizer]


class Optimizers:
    """Any torch optimizer, or Megatron's (chained, mixed precision, distributed). A snapshot stores the state of each parameter, the values
    of the groups, and the loss scaler. The snapshot also stores parameters that no model of the Session has, and fp32 copies of parameters
    that are not views of the model's. For a third-party optimizer, the snapshot also stores the attributes. Nested optimizers are saved in
    the same way."""

    def __init__(self, thing: Any, name: str = "optimizer", lenders: Lenders | None = None) -> None:
        """name: the optimizer's name in the Session, for messages. lenders: sources whose memory its values may use."""
        self._lenders = Lenders() if lenders is None else lenders
        self._put_on = PutOn(name, self._lenders)
        self.thing, self._name = thing, name
        self.wrappers = [thing] if isinstance(thing, torch.optim.Optimizer) else inner_optimizers(thing)
        self.parameters: list[Callable[[], Mapping[str, torch.Tensor]]] = []
        """Functions that each return the parameters of one model of the Session, by name. Groups that are added during training consist of
        these parameters."""
        self._groups: dict[str, Groups] = {}
        """The groups of each part; empty until the loop begins."""
        self.bound = ""
        """The reason why no new process could restore the last collected state; empty if one could."""
        self._begun: frozenset[str] = frozenset()
        """The names of the parts in the first collected state."""
        self._lying_otherwise: dict[str, frozenset[int]] = {}
        """The addresses of memory that several tensors share now, but not in the snapshot to be restored, by part."""
        self._looked_at: list[torch.Tensor] = []
        self._orphans: frozenset[int] = frozenset()
        """The ids of the parameters in `_looked_at` that no model of the Session has."""

    def parts(self) -> Iterable[Part]:
        """Yield the name, the wrapper (or the optimizer itself) and the torch optimizer of each part. A stub (on a rank without parameters)
        has no part."""
        for index, wrapper in enumerate(self.wrappers):
            inner = wrapper if isinstance(wrapper, torch.optim.Optimizer) else wrapper.optimizer
            if inner is not None:
                yield str(index), wrapper, inner
                for name, within in nested(inner, str(index), [], Parts(self._lenders)):
                    yield name, within, within

    @property
    def by_parameter(self) -> bool:
        """Whether the whole state belongs to parameters, so that its position in another parallel layout is known."""
        parts = list(self.parts())
        apart = _apart(parts)
        own = [(name, inner) for name, wrapper, inner in parts if wrapper is inner]
        if any(self._mains(parts)[name] or self._aside(parts, state_of(inner)) for name, inner in own):
            return False
        return all(name.isdigit() and not further(inner, self._packing(name, inner, apart)) for name, _, inner in parts)

    def _packing(self, part: str, inner: torch.optim.Optimizer, apart: Mapping[str, Any]) -> OptimizerPacking:
        copied = self._lying_otherwise.get(part, ())
        return OptimizerPacking(self._called(part), dict(parameters_of(inner)), apart, Parts(self._lenders), copied)

    def _called(self, part: str) -> str:
        index, dot, within = part.partition(".")
        called = f"{self._name}.chained_optimizers[{index}]" if len(self.wrappers) > 1 else self._name
        return f"{called}{dot}{within}"

    def lent(self) -> dict[str, Any]:
        """Return the objects whose memory other sources may use: states of parameters, tensors in these states and in groups, and the
        optimizer's parameters."""
        parts = list(self.parts())
        mains = self._mains(parts)
        found: dict[str, Any] = {}
        for name, _, inner in parts:
            for key, parameter in parameters_of(inner):
                state = state_of(inner).get(parameter)
                if isinstance(state, dict) and state:
                    found[f"{STATE}{name} {key}"] = state
                    found |= {f"{STATE}{name} {key} {of}": v for of, v in state.items() if type(v) in TENSORS}
            found |= {f"{name} {what}": each for what, each in lent_by_groups(inner.param_groups).items()}
            found |= {f"{name} main {key}": parameter for key, parameter in mains[name].items()}
        return found

    def stepped(self) -> list[torch.Tensor]:
        """Return the parameters in the optimizers' groups."""
        return [parameter for _, _, inner in self.parts() for _, parameter in parameters_of(inner)]

    def wait(self, stepped: Iterable[Any], captured: Iterable[Any]) -> bool:
        """Whether an optimizer of each wrapper is in `stepped`, and none in `captured`. A wrapper and the optimizer in it may be known by
        their common list of groups."""
        yes, no = ({i for each in some for i in _ids(each)} for some in (stepped, captured))
        wrappers, found = set[str](), set[str]()
        for name, wrapper, inner in self.parts():
            ids, top = {id(wrapper), *_ids(inner)}, name.partition(".")[0]
            wrappers.add(top)
            if not ids.isdisjoint(no):
                return False
            if not ids.isdisjoint(yes):
                found.add(top)
        return found == wrappers != set()

    def steady(self, collected: Nested) -> list[torch.Tensor]:
        """Return the tensors in `collected` that only an optimizer's step writes: the optimizer's copies of the parameters, and its
        state."""
        states = (state for part in collected.values() for state in (part["main"], *part["state"].values()))
        return [v for state in states if isinstance(state, dict) for v in state.values() if torch.is_tensor(v)]

    def collect(self) -> Nested:
        kept: Nested = {}
        parts, bound = list(self.parts()), ""
        mains = self._mains(parts)
        for name, inner, _, collected in self._packed(parts):
            kept[name] = collected
            kept[name]["main"] = {key: only(local(parameter), key) for key, parameter in mains[name].items()}
            kept[name] |= {PUT_ON: told} if (told := self._put_on.collect(name, inner)) else {}
            groups = self._groups_of(name, inner)
            changes = {"members": groups.changed(), "grown": groups.grown()}
            kept[name] |= {key: told for key, told in changes.items() if told}
            bound = bound or groups.bound
        self._begun = self._begun or frozenset(kept)
        self.bound = bound or self._other_parts({*kept})
        return kept

    def _packed(self, parts: Iterable[Part]) -> Iterator[tuple[str, torch.optim.Optimizer, OptimizerPacking, Nested]]:
        met: set[int] = set()
        apart = _apart(parts)
        for name, wrapper, inner in parts:
            held, packing = state_of(inner), self._packing(name, inner, apart)
            aside = self._aside(parts, held) if wrapper is inner else {}
            yield name, inner, packing, collect_part(wrapper, inner, {} if id(held) in met else held, packing, aside)
            met.add(id(held))

    def _aside(self, parts: Iterable[Part], held: Mapping[Any, Any] | None = None) -> dict[str, torch.Tensor]:
        """Return the models' parameters that are in no group now, by name; of these, only those with a state in `held`, if it is given. The
        optimizer uses such a state once the parameter is in a group again. A DTensor is left out."""
        grouped = {id(parameter) for _, _, inner in parts for _, parameter in parameters_of(inner)}
        wanted = held and {id(each) for each, state in held.items() if not isinstance(state, dict) or state} - grouped
        asked = self.parameters if held is None or wanted else ()
        named = ((name, each) for ask in asked for name, each in ask().items() if type(each) in TENSORS)
        return {name: each for name, each in named if id(each) not in grouped and (not wanted or id(each) in wanted)}

    def _other_parts(self, now: set[str]) -> str:
        """Return the reason why a restart could not create the parts; empty if they are the same as in the first collected state."""
        for part in sorted(now ^ self._begun):
            has = "was added" if part in now else "was removed"
            return (
                f"the optimizer {self._called(part)} {has} since the loop began, and a restart can't repeat that. Create all optimizers "
                f"within {self._name} before the Session, and keep them"
            )
        return ""

    def objects(self) -> dict[str, Objects]:
        """Return all parameter groups and the parameters in them."""
        return {name: self._groups_of(name, inner).objects() for name, _, inner in self.parts()}

    def put_back(self, objects: Mapping[str, Objects]) -> None:
        """Put the recorded objects back into the groups."""
        parts = list(self.parts())
        for name, _, inner in parts:
            if name in objects:
                _forget(parts, self._groups_of(name, inner).put_back(objects[name]))

    def orphans(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the parameters that no model of the Session had at the last check and that no wrapper has created."""
        for name, wrapper, inner in self.parts() if self._orphans else ():
            if wrapper is inner:
                listed = ((f"{self._name} {name}/{key}", parameter) for key, parameter in parameters_of(inner))
                yield from (each for each in listed if id(each[1]) in self._orphans)

    def _mains(self, parts: Iterable[Part]) -> dict[str, dict[str, torch.Tensor]]:
        """Return the parameters that only the optimizer keeps, by part and position."""
        listed = [parameter for _, _, inner in parts for group in inner.param_groups for parameter in group["params"]]
        if [*map(id, listed)] != [*map(id, self._looked_at)]:
            known = {id(parameter) for ask in self.parameters for parameter in ask().values()}
            self._looked_at, self._orphans = listed, frozenset(map(id, listed)) - known
        met: set[int] = set()
        found = {}
        for name, wrapper, inner in parts:
            wanted = self._orphans - met if wrapper is inner else None
            found[name] = {key: p for key, p in parameters_of(inner) if wanted is None or id(p) in wanted}
            met.update(map(id, found[name].values()))
        return found

    def _groups_of(self, name: str, inner: torch.optim.Optimizer) -> Groups:
        if name not in self._groups:
            self._groups[name] = Groups(inner, lambda: {k: v for ask in self.parameters for k, v in ask().items()})
        return self._groups[name]

    def follow(self, described: Nested) -> None:
        """Create the groups that were added during training, from a snapshot of another layout. Raises LayoutError on failure."""
        begun = [(described.get(name, {}), self._groups_of(name, inner)) for name, _, inner in self.parts()]
        for part, groups in begun:
            if "members" in part:
                groups.make(len(part["groups"]), part["members"])

    def prepare(self, described: Nested) -> None:
        parts = list(self.parts())
        if {name for name, _, _ in parts} != described.keys():
            raise LayoutError("the snapshot holds another kind of optimizer")
        begun = [(described[name], self._groups_of(name, inner)) for name, _, inner in parts]
        for part, groups in begun:
            if not groups.made_of(part.get("members", {}), len(part["groups"])):
                _forget(parts, groups.make(len(part["groups"]), part.get("members", {})))
        for name, wrapper, inner in parts:
            part = described[name]
            for key, parameter in parameters_of(inner):
                if key not in part["state"] or (wrapper is not inner and key not in part["main"]):
                    raise LayoutError(
                        f"the snapshot's optimizer has no parameter {key}: it belongs to another model or optimizer"
                    )
                if key in part["main"]:
                    if wrapper is inner:
                        self._groups_of(name, inner).make_room(key, parameter, part["main"][key], part.get("grown", {}))
                    fits(f"optimizer {key}", local(parameter), part["main"][key])
        met: set[int] = set()
        for name, _, inner in parts:
            if id(state_of(inner)) not in met:
                for key, parameter in parameters_of(inner):
                    if isinstance(wanted := described[name]["state"][key], dict):
                        make_room(f"optimizer {key}", inner, parameter, wanted)
                self._make_room_aside(parts, inner, described[name].get("aside", {}))
            met.add(id(state_of(inner)))
        self._lying_otherwise.clear()
        if any("shared" in part for part in described.values()):
            live = {name: packing.shared_memories for name, _, packing, _ in self._packed(parts)}
            for name, shared in live.items():
                if described[name].get("shared") not in (None, [*shared.values()]):
                    self._lying_otherwise[name] = frozenset(shared)

    def _make_room_aside(self, parts: Iterable[Part], inner: torch.optim.Optimizer, wanted: Nested) -> None:
        aside = self._aside(parts) if wanted else {}
        for key, described in wanted.items():
            if key not in aside:
                raise LayoutError(f"the snapshot has the optimizer's state of {key}, which is no such parameter now")
            if isinstance(described, dict):
                make_room(f"optimizer {key}", inner, aside[key], described)

    def restore(self, kept: Nested) -> None:
        parts = list(self.parts())
        load_declared([(inner, kept[name].get("further", {})) for name, _, inner in parts])
        apart, met = _apart(parts), set[int]()
        for name, wrapper, inner in parts:
            part = kept[name] | ({"state": None} if id(state_of(inner)) in met else {})
            met.add(id(state_of(inner)))
            packing, otherwise = self._packing(name, inner, apart), self._lying_otherwise.get(name, ())
            memories = Memories(part.get("shared", ()), packing.parameters, otherwise)
            aside = self._aside(parts) if wrapper is inner else {}
            restore_part(wrapper, inner, part, packing, apart, Parts(self._lenders), memories, aside)
            self._put_on.restore(name, inner, kept[name].get(PUT_ON, {}))
        self._lying_otherwise.clear()


def parameters_of(inner: torch.optim.Optimizer) -> Iterable[tuple[str, torch.Tensor]]:
    """Yield the parameters, each with its position "group.position". In the same parallel layout, a parameter always has the same
    position."""
    for g, group in enumerate(inner.param_groups):
        yield from zip(_places(g, len(group["params"])), group["params"], strict=True)


@lru_cache
def _places(group: int, parameters: int) -> list[str]:
    return [f"{group}.{position}" for position in range(parameters)]


def _apart(parts: Iterable[Part]) -> dict[str, Any]:
    """Return the states and the groups of all parts, by fixed names that don't depend on other objects."""
    found: dict[str, Any] = {}
    for name, _, inner in parts:
        groups = enumerate(inner.param_groups)
        found |= {f"{name} state": state_of(inner), f"{name} groups": inner.param_groups}
        found |= {f"{name} group {number}": group for number, group in groups}
    return found


def _forget(parts: Iterable[Part], parameters: Iterable[torch.Tensor]) -> None:
    """Delete the states of parameters that no group contains any more. All parts are searched, because parts may share their groups."""
    for parameter in parameters:
        for _, _, inner in parts:
            state_of(inner).pop(parameter, None)


def _ids(optimizer: Any) -> tuple[int, int]:
    return id(optimizer), id(getattr(optimizer, "param_groups", optimizer))
