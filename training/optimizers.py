"""Optimizers as sources of state: torch's own, other people's, and Megatron's wrappers around them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from itertools import chain
from typing import Any, TypeAlias

import torch

from ..checkpoint.tensors import Piece
from ..resilience.errors import LayoutError
from .contained import Contained
from .live import Nested, fits, local, misfit, put
from .optimizer_groups import Groups
from .optimizer_nests import framework, further, load_declared, nested, put_further, state_of
from .ordinary import only

_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, bool, int, float, str, type(None)))
"""What a parameter's state mostly is."""


def inner_optimizers(thing: Any) -> list[Any]:
    """Megatron's wrappers down to what holds a torch optimizer: a ChainedOptimizer's parts, or the wrapper itself, or a stub."""
    if hasattr(thing, "chained_optimizers"):
        return [inner for part in thing.chained_optimizers for inner in inner_optimizers(part)]
    holds = isinstance(getattr(thing, "optimizer", None), torch.optim.Optimizer) and hasattr(thing, "param_groups")
    return [thing] if holds or getattr(thing, "is_stub_optimizer", False) else []


Part: TypeAlias = tuple[str, Any, torch.optim.Optimizer]


class Optimizers:
    """Any torch optimizer, or Megatron's (chained, mixed precision, distributed): its state by parameter, its own fp32 copies of the
    parameters where they are not views of the model's, the values of its groups, and the loss scaler. Of an optimizer of other people's,
    its attributes too; and all of that of the optimizers within it."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing
        self.wrappers = [thing] if isinstance(thing, torch.optim.Optimizer) else inner_optimizers(thing)
        self.parameters: list[Callable[[], Mapping[str, torch.Tensor]]] = []
        """Each gives the parameters of a model of the session, by name: groups that come on the way are made of them."""
        self._groups: dict[str, Groups] = {}
        """Of each part; none until the loop begins."""

    def parts(self) -> Iterable[Part]:
        """Name, wrapper (or the optimizer itself), torch optimizer; a stub (a rank with no parameters) has none."""
        for index, wrapper in enumerate(self.wrappers):
            inner = wrapper if isinstance(wrapper, torch.optim.Optimizer) else wrapper.optimizer
            if inner is not None:
                yield str(index), wrapper, inner
                for name, within in nested(inner, str(index), []):
                    yield name, within, within

    @property
    def by_parameter(self) -> bool:
        """All of the state belongs to parameters, so that it has places in another parallel layout as well."""
        parts = list(self.parts())
        apart = _apart(parts)
        return all(
            name.isdigit() and not further(inner, Contained(parameters_of(inner), apart), state_of(inner))
            for name, _, inner in parts
        )

    def steady(self, collected: Nested) -> list[torch.Tensor]:
        """What in `collected` only an optimizer's step writes: its own copies of the parameters, and its state."""
        states = (state for part in collected.values() for state in (part["main"], *part["state"].values()))
        return [value for state in states for value in state.values() if torch.is_tensor(value)]

    def collect(self) -> Nested:
        kept: Nested = {}
        met: set[int] = set()
        parts = list(self.parts())
        apart = _apart(parts)
        for name, wrapper, inner in parts:
            held = state_of(inner)
            states = {} if id(held) in met else held
            met.add(id(held))
            kept[name] = self._collect(wrapper, inner, states, Contained(parameters_of(inner), apart))
            if changed := self._groups_of(name, inner).changed():
                kept[name]["members"] = changed
        return kept

    def _groups_of(self, name: str, inner: torch.optim.Optimizer) -> Groups:
        if name not in self._groups:
            self._groups[name] = Groups(inner, lambda: {k: v for ask in self.parameters for k, v in ask().items()})
        return self._groups[name]

    def _collect(
        self, wrapper: Any, inner: torch.optim.Optimizer, held: Mapping[Any, Any], contained: Contained
    ) -> Nested:
        named = contained.parameters
        groups = [{k: v for k, v in group.items() if k != "params"} for group in inner.param_groups]
        kept: Nested = {"groups": contained.down(groups, "groups"), "state": {}, "main": {}}
        states = [held.get(parameter, {}) for parameter in named.values()]
        if not framework(inner) or not _PLAIN.issuperset(
            map(type, chain.from_iterable(state.values() for state in states))
        ):
            states = [contained.down(dict(state), f"state/{key}") for key, state in zip(named, states, strict=True)]
        kept["state"] = dict(zip(named, states, strict=True))
        if wrapper is not inner:
            kept["main"] = {key: only(local(parameter), key) for key, parameter in named.items()}
        scaler = getattr(wrapper, "grad_scaler", None)
        if scaler is not None:
            kept["scaler"] = scaler.state_dict()
        if more := further(inner, contained, held):
            kept["further"] = more
        if contained.strides:
            kept["strides"] = contained.strides
        return kept

    def follow(self, described: Nested) -> None:
        """Make the groups that have come on the way, as a snapshot of another layout has them. Raises LayoutError where that cannot be."""
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
            for parameter in groups.make(len(part["groups"]), part.get("members", {})):
                for _, _, each in parts:  # they may have the groups in common
                    state_of(each).pop(parameter, None)
        for name, wrapper, inner in parts:
            part = described[name]
            for key, parameter in parameters_of(inner):
                if key not in part["state"] or (wrapper is not inner and key not in part["main"]):
                    raise LayoutError(f"the snapshot's optimizer has no parameter {key}; another model or optimizer")
                if key in part["main"]:
                    fits(f"optimizer {key}", local(parameter), part["main"][key])
        met: set[int] = set()
        for name, _, inner in parts:
            if id(state_of(inner)) not in met:
                for key, parameter in parameters_of(inner):
                    _make_room(f"optimizer {key}", inner, parameter, described[name]["state"][key])
            met.add(id(state_of(inner)))

    def restore(self, kept: Nested) -> None:
        parts = list(self.parts())
        load_declared([(inner, kept[name].get("further", {})) for name, _, inner in parts])
        apart = _apart(parts)
        for name, wrapper, inner in parts:
            self._restore(wrapper, inner, kept[name], Contained(parameters_of(inner), apart))

    def _restore(self, wrapper: Any, inner: torch.optim.Optimizer, kept: Nested, contained: Contained) -> None:
        contained.strides = kept.get("strides", {})
        contained.as_they_lie = framework(inner) and not contained.strides
        for number, (group, values) in enumerate(zip(inner.param_groups, kept["groups"], strict=True)):
            parameters = group.pop("params")
            made = dict(contained.up(group, values, f"groups/{number}", _device(parameters)))
            group.clear()
            group.update({"params": parameters, **made})
        for key, parameter in parameters_of(inner):
            if kept["state"][key]:
                contained.up(inner.state[parameter], kept["state"][key], f"state/{key}", parameter.device)
            if key in kept["main"]:
                put(local(parameter), kept["main"][key])
        put_further(inner, kept.get("further", {}), contained)
        if "scaler" in kept:
            wrapper.grad_scaler.load_state_dict(kept["scaler"])


def parameters_of(inner: torch.optim.Optimizer) -> Iterable[tuple[str, torch.Tensor]]:
    """Parameters by place: group.position. The same layout gives the same places."""
    for g, group in enumerate(inner.param_groups):
        yield from zip(_places(g, len(group["params"])), group["params"], strict=True)


@lru_cache
def _places(group: int, parameters: int) -> list[str]:
    return [f"{group}.{position}" for position in range(parameters)]


def _apart(parts: Iterable[Part]) -> set[int]:
    """Ids of what each of them keeps as state and groups, under whatever name others have it."""
    held = ([state_of(inner), inner.param_groups, *inner.param_groups] for _, _, inner in parts)
    return {id(each) for some in held for each in some}


def _device(parameters: list[torch.Tensor]) -> torch.device:
    return parameters[0].device if parameters else torch.device("cpu")


def _make_room(where: str, inner: torch.optim.Optimizer, parameter: torch.Tensor, described: Mapping[str, Any]) -> None:
    """Bring the state of one parameter into the form `described`: drop what is not in it, make what a fresh optimizer does not have yet."""
    state, own = inner.state[parameter], local(parameter)
    for key in set(state) - set(described):
        del state[key]
    for key, piece in described.items():
        if not isinstance(piece, Piece):
            continue
        if torch.is_tensor(state.get(key)):
            here = local(state[key])
            if here.shape == own.shape:  # of another shape, it is not the parameter's: it may have grown since
                fits(f"{where} {key}", here, piece)
            if not misfit("", here, piece):
                continue
        # Moments live with their parameter; torch keeps `step`, a scalar, on the CPU unless it is fused or capturable.
        away = any(g.get("fused") or g.get("capturable") for g in inner.param_groups) or piece.shape
        device = parameter.device if away else torch.device("cpu")
        dtype = getattr(torch, piece.dtype)
        alike = tuple(own.shape) == piece.shape  # and so of its kind, should it be a DTensor
        state[key] = (
            torch.zeros_like(parameter.detach(), dtype=dtype)
            if alike
            else torch.zeros(piece.shape, dtype=dtype, device=device)
        )
    if not state:
        inner.state.pop(parameter, None)
