"""Optimizers as sources of state: torch's own and Megatron's wrappers around them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import chain
from typing import Any

import torch

from ..checkpoint.tensors import Piece
from ..resilience.errors import LayoutError
from .live import Nested, fits, local, plain, put, update, whole


def inner_optimizers(thing: Any) -> list[Any]:
    """Megatron's wrappers down to what holds a torch optimizer: a ChainedOptimizer's parts, or the wrapper itself, or a stub."""
    if hasattr(thing, "chained_optimizers"):
        return [inner for part in thing.chained_optimizers for inner in inner_optimizers(part)]
    holds = isinstance(getattr(thing, "optimizer", None), torch.optim.Optimizer) and hasattr(thing, "param_groups")
    return [thing] if holds or getattr(thing, "is_stub_optimizer", False) else []


class Optimizers:
    """Any torch optimizer, or Megatron's (chained, mixed precision, distributed): its state by parameter, its own fp32 copies of the
    parameters where they are not views of the model's, the scalars of its groups, and the loss scaler."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing
        self.wrappers = [thing] if isinstance(thing, torch.optim.Optimizer) else inner_optimizers(thing)
        self._groups = 0
        """How many a start of the script makes; 0: it has not come to its loop yet."""

    def parts(self) -> Iterable[tuple[str, Any, torch.optim.Optimizer]]:
        """Name, wrapper (or the optimizer itself), torch optimizer; a stub (a rank with no parameters) has none."""
        for index, wrapper in enumerate(self.wrappers):
            inner = wrapper if isinstance(wrapper, torch.optim.Optimizer) else wrapper.optimizer
            if inner is not None:
                yield str(index), wrapper, inner

    def steady(self, collected: Nested) -> list[torch.Tensor]:
        """What in `collected` only an optimizer's step writes: its own copies of the parameters, and its state."""
        states = (state for part in collected.values() for state in (part["main"], *part["state"].values()))
        return [value for state in states for value in state.values() if torch.is_tensor(value)]

    def _counted(self) -> int:
        return sum(len(inner.param_groups) for _, _, inner in self.parts())

    def collect(self) -> Nested:
        began, self._groups = self._groups, self._counted()
        if 0 < began < self._groups:
            print(
                "mt-resilient: the optimizer has got further parameter groups since its start: a restart cannot go back to what is "
                "kept from here on, since it makes fewer. Make all groups at the start (with a learning rate of 0, say)",
                file=sys.stderr,
                flush=True,
            )
        return {name: self._collect(wrapper, inner) for name, wrapper, inner in self.parts()}

    def _collect(self, wrapper: Any, inner: torch.optim.Optimizer) -> Nested:
        groups = [{k: v for k, v in group.items() if k != "params"} for group in inner.param_groups]
        named = dict(parameters_of(inner))
        states = [inner.state.get(parameter, {}) for parameter in named.values()]
        kept: Nested = {"groups": [plain(group) for group in groups], "state": {}, "main": {}}
        if not (
            all(type(state) is dict for state in states)
            and whole(chain(named.values(), *(state.values() for state in states)))
        ):
            states = [{k: local(v) if torch.is_tensor(v) else v for k, v in state.items()} for state in states]
            named = {key: local(parameter) for key, parameter in named.items()}
        kept["state"] = dict(zip(named, states, strict=True))
        if wrapper is not inner:
            kept["main"] = named
        scaler = getattr(wrapper, "grad_scaler", None)
        if scaler is not None:
            kept["scaler"] = scaler.state_dict()
        return kept

    def prepare(self, described: Nested) -> None:
        for name, wrapper, inner in self.parts():
            if name not in described:
                raise LayoutError("the snapshot holds another kind of optimizer")
            part = described[name]
            there, here = len(part["groups"]), len(inner.param_groups)
            if there != here:
                raise LayoutError(
                    f"the optimizer has {here} parameter groups now, and had {there} in the snapshot: another model or optimizer; or the "
                    "script adds groups while it trains, and should make them all at its start (with a learning rate of 0, say)"
                )
            for key, parameter in parameters_of(inner):
                if key not in part["state"] or (wrapper is not inner and key not in part["main"]):
                    raise LayoutError(f"the snapshot's optimizer has no parameter {key}; another model or optimizer")
                if key in part["main"]:
                    fits(f"optimizer {key}", local(parameter), part["main"][key])
                _make_room(f"optimizer {key}", inner, parameter, part["state"][key])

    def restore(self, kept: Nested) -> None:
        for name, wrapper, inner in self.parts():
            self._restore(wrapper, inner, kept[name])

    def _restore(self, wrapper: Any, inner: torch.optim.Optimizer, kept: Nested) -> None:
        for group, values in zip(inner.param_groups, kept["groups"], strict=True):
            update(group, values)
        for key, parameter in parameters_of(inner):
            if kept["state"][key]:
                update(inner.state[parameter], kept["state"][key])
            if key in kept["main"]:
                put(local(parameter), kept["main"][key])
        if "scaler" in kept:
            wrapper.grad_scaler.load_state_dict(kept["scaler"])


def parameters_of(inner: torch.optim.Optimizer) -> Iterable[tuple[str, torch.Tensor]]:
    """Parameters by place: group.position. The same layout gives the same places."""
    for g, group in enumerate(inner.param_groups):
        yield from zip(_places(g, len(group["params"])), group["params"], strict=True)


@lru_cache
def _places(group: int, parameters: int) -> list[str]:
    return [f"{group}.{position}" for position in range(parameters)]


def _make_room(where: str, inner: torch.optim.Optimizer, parameter: torch.Tensor, described: Mapping[str, Any]) -> None:
    """Bring the state of one parameter into the form `described`: drop what is not in it, make what a fresh optimizer does not have yet."""
    state = inner.state[parameter]
    for key in set(state) - set(described):
        del state[key]
    for key, piece in described.items():
        if not isinstance(piece, Piece):
            continue
        if torch.is_tensor(state.get(key)):
            fits(f"{where} {key}", local(state[key]), piece)
        else:  # moments live with their parameter; torch keeps `step`, a scalar, on the CPU unless it is fused or capturable
            here = any(g.get("fused") or g.get("capturable") for g in inner.param_groups) or piece.shape
            device = parameter.device if here else torch.device("cpu")
            dtype = getattr(torch, piece.dtype)
            alike = tuple(local(parameter).shape) == piece.shape  # and so of its kind, should it be a DTensor
            state[key] = (
                torch.zeros_like(parameter.detach(), dtype=dtype)
                if alike
                else torch.zeros(piece.shape, dtype=dtype, device=device)
            )
    if not state:
        inner.state.pop(parameter, None)
