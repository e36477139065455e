"""Collect and restore the state of one torch optimizer, or of a wrapper around one. Collecting and restoring use the same sequence of
values."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch

from ..tensors.in_place import Nested, local, put
from ..values.session_parts import Parts
from .hybrid_optimizer import renew_copies
from .nested_optimizers import framework, further, put_further, state_of
from .optimizer_packing import OptimizerPacking, OptimizerUnpacking, device_of
from .shared_storage import Memories

_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, bool, int, float, str, type(None)))
"""The types of most values in a parameter's state."""


def collect_part(
    wrapper: Any,
    inner: torch.optim.Optimizer,
    held: Mapping[Any, Any],
    packing: OptimizerPacking,
    aside: Mapping[str, torch.Tensor],
) -> Nested:
    """Return the state of one part (one torch optimizer, perhaps with a wrapper). held: the states of its parameters. aside: parameters in
    no group, by name."""
    groups = [{k: v for k, v in group.items() if k != "params"} for group in inner.param_groups]
    kept: Nested = {
        "groups": [packing.pack(group, f".param_groups[{n}]") for n, group in enumerate(groups)],
        "state": {},
        "main": {},
    }
    more, named = further(inner, packing), packing.parameters
    states = {key: held.get(parameter, {}) for key, parameter in named.items()}
    states |= {key: held[parameter] for key, parameter in aside.items() if parameter in held}
    within = chain.from_iterable(state.values() for state in states.values())
    if not framework(inner) or not _PLAIN.issuperset(map(type, within)):
        told = {k: dict(state) if isinstance(state, Mapping) else state for k, state in states.items()}
        states = {key: packing.pack(state, f".state[parameter {key}]") for key, state in told.items()}
    if left := {key: states.pop(key) for key in aside if key in states}:
        kept["aside"] = left
    kept["state"] = states
    if (scaler := getattr(wrapper, "grad_scaler", None)) is not None:
        kept["scaler"] = scaler.state_dict()
    elif scaler := _numbers_of_deepspeed_s_scaler(wrapper):
        kept["scaler"] = scaler
    kept |= {"further": more} if more else {}
    packing.shared_memories = packing.lying.shared({} if framework(inner) else named)
    if packing.shared_memories or not framework(inner):
        kept["shared"] = [*packing.shared_memories.values()]
    return kept | ({"strides": packing.strides} if packing.strides else {})


def restore_part(
    wrapper: Any,
    inner: torch.optim.Optimizer,
    kept: Nested,
    packing: OptimizerPacking,
    apart: Mapping[str, Any],
    modules: Parts,
    memories: Memories,
    aside: Mapping[str, torch.Tensor],
) -> None:
    """Restore one part in the sequence of `collect_part`, which numbers the values. kept: its "state" is None if an earlier part has the
    same state. packing: packs the part's present contents. aside: parameters in no group, by name."""
    strides, named = kept.get("strides", {}), packing.parameters
    as_they_lie = framework(inner) and not strides
    unpacking = OptimizerUnpacking("the optimizer", {**apart, **named}, strides, as_they_lie, modules, memories)
    for group, values in zip(inner.param_groups, kept["groups"], strict=True):
        parameters = group.pop("params")
        unpacking.device = device_of(parameters)
        made = dict(unpacking.unpack(values, group))
        group.clear()
        group.update({"params": parameters, **made})
    unpacking.device = device_of([*named.values()])
    put_further(inner, kept.get("further", {}), further(inner, packing), unpacking)
    for key, parameter in named.items():
        unpacking.device = parameter.device
        if kept["state"]:
            state = unpacking.unpack(kept["state"][key], state_of(inner).get(parameter))
            if not (isinstance(state, dict) and not state):
                inner.state[parameter] = state
        if key in kept["main"]:
            put(local(parameter), kept["main"][key])
    for key, parameter in aside.items():
        unpacking.device = parameter.device
        if key in kept.get("aside", {}):
            inner.state[parameter] = unpacking.unpack(kept["aside"][key], state_of(inner).get(parameter))
        elif kept["state"]:
            state_of(inner).pop(parameter, None)
    if "scaler" in kept and getattr(wrapper, "grad_scaler", None) is not None:
        wrapper.grad_scaler.load_state_dict(kept["scaler"])
    elif "scaler" in kept:
        vars(wrapper.loss_scaler).update(kept["scaler"])
    renew_copies(inner)


def _numbers_of_deepspeed_s_scaler(wrapper: Any) -> Nested:
    """Return the attributes of DeepSpeed's loss scaler that are numbers: its whole state. The result is empty if there is none."""
    attributes = getattr(getattr(wrapper, "loss_scaler", None), "__dict__", {})
    return {name: value for name, value in attributes.items() if type(value) in (bool, int, float)}
