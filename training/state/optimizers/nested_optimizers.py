"""Optimizers inside optimizers (Lookahead, SAM, ZeRO's local one), and the state that an optimizer keeps in its own attributes.

torch's optimizers keep their whole state by parameter, and frameworks' wrappers keep no state. Any other optimizer may keep state anywhere,
so its attributes belong to the training state.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch.optim import Optimizer

from ...warm.side_effects import is_scripts
from ..modules.attribute_rules import WRAPPERS, is_by_name
from ..modules.attribute_sources import members, search
from ..tensors.in_place import Nested
from ..values.session_parts import Parts
from ..values.unpacking import Unpacking
from .optimizer_packing import HERE, OptimizerPacking

_FRAMEWORKS = ("torch", *WRAPPERS)
_CLOSED = ("megatron", "apex", "deepspeed")
"""Frameworks whose optimizers manage their inner optimizers themselves."""
_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))
_LEVELS = 4
"""The deepest nesting inside an attribute that is searched."""
_SCALES = "_scales"
"""The attribute in which TransformerEngine's FusedAdam keeps the scales of moments in 16 bits, by parameter. Its steps need a scale for
each such moment."""


def inner_optimizers(thing: Any) -> list[Any]:
    """Return Megatron's wrappers that contain a torch optimizer: the parts of a ChainedOptimizer, the wrapper itself, or a stub. A script's
    class with the same attributes is ignored, because it may keep more state than its optimizer."""
    if not any(each.__module__.partition(".")[0] in _CLOSED for each in type(thing).__mro__):
        return []
    if hasattr(thing, "chained_optimizers"):
        return [inner for part in thing.chained_optimizers for inner in inner_optimizers(part)]
    holds = isinstance(getattr(thing, "optimizer", None), torch.optim.Optimizer) and hasattr(thing, "param_groups")
    return [thing] if holds or getattr(thing, "is_stub_optimizer", False) else []


def nested(outer: Optimizer, name: str, met: list[Optimizer], labels: Parts) -> Iterator[tuple[str, Optimizer]]:
    """Yield the optimizers inside `outer`, each with a name that a restart does not change. met: all optimizers found so far."""
    met.append(outer)
    if _package(outer) in _CLOSED:
        return
    for place, each in held_by(outer, Optimizer, labels):
        if not any(each is other for other in met):
            if not (_is_face_of(outer, each) and framework(each)):
                yield f"{name}.{place}", each
            yield from nested(each, f"{name}.{place}", met, labels)


def held_by(optimizer: Optimizer, kind: type, labels: Parts) -> Iterator[tuple[str, Any]]:
    """Yield the objects of this class in the optimizer's attributes, each with its path."""
    for attribute, value in vars(optimizer).items():
        if attribute not in of_every_optimizer():
            for keys, each in search(value, lambda each: isinstance(each, kind), _inside, _LEVELS):
                yield labels.join(attribute, keys), each


def state_of(optimizer: Optimizer) -> Any:
    """Return the optimizer's state by parameter; empty for a wrapper without a state."""
    return getattr(optimizer, "state", {})


def framework(optimizer: Optimizer) -> bool:
    """Whether the optimizer belongs to torch or a framework, so that its attributes contain no training state."""
    return _package(optimizer) in _FRAMEWORKS


def further(optimizer: Optimizer, packing: OptimizerPacking) -> Nested:
    """Return the optimizer's state besides its groups and the states of parameters; empty if there is none."""
    found = {"loose": packing.pack(_loose(optimizer), ".state"), "attributes": _attributes(optimizer, packing)}
    if packing.left:
        said = optimizer.state_dict().items()
        found["declared"] = {key: value for key, value in said if key not in ("state", "param_groups")}
    return {key: value for key, value in found.items() if value}


def _loose(optimizer: Optimizer) -> dict[Any, Any]:
    """Return the entries of the optimizer's state whose keys are not parameters."""
    state = state_of(optimizer)
    if _TENSORS.issuperset(map(type, state)):
        return {}
    return {key: value for key, value in state.items() if not torch.is_tensor(key)}


def _attributes(optimizer: Optimizer, packing: OptimizerPacking) -> Nested:
    """Return the attributes that are training state, by name."""
    if framework(optimizer):
        averager = vars(optimizer).get("averager")  # PostLocalSGDOptimizer's
        steps = {"averager": {"step": averager.step}} if hasattr(averager, "step") else {}
        scales = _scales_of(optimizer)
        return steps | ({_SCALES: packing.pack(scales, f".{_SCALES}")} if scales else {})
    declares = type(optimizer).state_dict is not Optimizer.state_dict
    own = [(name, value) for name, value in vars(optimizer).items() if name not in of_every_optimizer()]
    found = {name: packing.attribute(value, name, declares=declares) for name, value in own}
    return {name: value for name, value in found.items() if value is not HERE}


def _scales_of(optimizer: Optimizer) -> dict[torch.Tensor, Any]:
    return vars(optimizer).get(_SCALES, {}) if _package(optimizer) == "transformer_engine" else {}


def put_further(optimizer: Optimizer, kept: Nested, now: Nested, unpacking: Unpacking) -> None:
    """Restore what `further` returned, and delete attributes that the script has added since. now: what `further` returns before the
    restore."""
    before = _loose(optimizer)
    loose = unpacking.unpack(kept.get("loose", {}), dict(before))
    for key in before.keys() - loose.keys():
        del optimizer.state[key]
    state_of(optimizer).update(loose)
    live, attributes = vars(optimizer), kept.get("attributes", {})
    if framework(optimizer):
        if "averager" in attributes:
            live["averager"].step = attributes["averager"]["step"]
        if _SCALES in attributes:
            live[_SCALES] = unpacking.unpack(attributes[_SCALES], live[_SCALES])
        else:
            _scales_of(optimizer).clear()
        return
    for name in now.get("attributes", {}).keys() - attributes.keys():
        del live[name]
    for name, value in attributes.items():
        live[name] = unpacking.unpack(value, live.get(name))


def load_declared(kept: Sequence[tuple[Optimizer, Nested]]) -> None:
    """Load the entries of the optimizers' own `state_dict`. The dicts of states and the lists of groups stay the same objects."""
    shared = [(each, {k: vars(each)[k] for k in ("state", "param_groups") if k in vars(each)}) for each, _ in kept]
    for optimizer, more in kept:
        if "declared" in more:
            optimizer.load_state_dict({**optimizer.state_dict(), **more["declared"]})
    for optimizer, own in shared:
        vars(optimizer).update(own)


def _is_face_of(outer: Optimizer, inner: Optimizer) -> bool:
    """Whether `outer` keeps every state that `inner` keeps."""
    return state_of(outer) is state_of(inner) and outer.param_groups is inner.param_groups


def _inside(value: Any) -> Collection[tuple[Any, Any]]:
    """Return the members of a container, or the attributes of a script's object, with their keys."""
    kind: Any = type(value)
    apart = isinstance(value, (dict, list, tuple, torch.nn.Module, Optimizer)) or is_by_name(kind)
    return members(value) if apart or not is_scripts(kind.__module__) else getattr(value, "__dict__", {}).items()


def _package(optimizer: Optimizer) -> str:
    return type(optimizer).__module__.partition(".")[0]


@cache
def of_every_optimizer() -> frozenset[str]:
    return frozenset(vars(torch.optim.SGD([torch.zeros(1, device="cpu")], 0.1))) | {"_opt_called"}
