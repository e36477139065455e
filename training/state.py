"""What the training state is, and how it is put back: live tensors by name, and the small things beside them.

Restoring copies into the *live* tensors: Megatron's parameters, gradient buffers and optimizer shards are views of each other, and a
tensor that is replaced instead of filled would silently leave them behind. It also keeps clear of the load paths of others (a native
Adam that shares one `step` among all parameters; weight-decay groups swapped between pipeline stages; both met in Megatron).

A source is anything given to `Session(name=source)`: a module, or a list of them; an optimizer, plain or Megatron's; an object
with `state_dict` and `load_state_dict`; or a mutable mapping of plain values.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any, Protocol

import torch

from ..resilience.errors import LayoutError
from . import device

Nested = dict[str, Any]


class Source(Protocol):
    def collect(self) -> Nested:
        """Live tensors and plain values, nested; the caller copies the tensors before anything changes them."""
        ...

    def restore(self, kept: Nested) -> None:
        """Put back what `collect` gave. Tensors in `kept` are views of a snapshot: copy, don't keep them."""
        ...


def source_of(name: str, thing: Any) -> Source:
    """The adapter for `thing`. Raises TypeError naming it when there is none."""
    if isinstance(thing, torch.nn.Module):
        return Modules([thing])
    if isinstance(thing, (list, tuple)) and thing and all(isinstance(m, torch.nn.Module) for m in thing):
        return Modules(thing)
    if hasattr(thing, "collect") and hasattr(thing, "restore"):
        return thing
    if isinstance(thing, torch.optim.Optimizer) or _inner_optimizers(thing):
        return Optimizers(thing)
    if type(thing).__name__ == "OptimizerParamScheduler":
        # Megatron's own load adds the steps to those that are counted already.
        return Values(vars(thing))
    if hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict"):
        return Stateful(thing)
    if isinstance(thing, MutableMapping):
        return Values(thing)
    raise TypeError(
        f"Session({name}=…): {type(thing).__name__} is no module, no optimizer, no mapping and has no state_dict"
    )


def _fill(where: str, live: torch.Tensor, kept: torch.Tensor) -> None:
    if live.shape != kept.shape or live.dtype != kept.dtype:
        raise LayoutError(
            f"{where}: the snapshot holds {kept.dtype} {tuple(kept.shape)}, this run has {live.dtype} {tuple(live.shape)}; "
            "it was taken with another model or another parallel layout"
        )
    with torch.no_grad():
        live.copy_(kept)


class Modules:
    """Parameters and buffers, the non-persistent ones too, of one module or of the chunks of a pipeline stage."""

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        self.chunks = list(chunks)

    def tensors(self) -> dict[str, torch.Tensor]:
        live: dict[str, torch.Tensor] = {}
        for index, chunk in enumerate(self.chunks):
            prefix = f"chunk{index}." if len(self.chunks) > 1 else ""
            for name, tensor in (*chunk.named_parameters(), *chunk.named_buffers()):
                live[prefix + name] = tensor.detach()
        return live

    def collect(self) -> Nested:
        return dict(self.tensors())

    def restore(self, kept: Nested) -> None:
        live = self.tensors()
        if live.keys() != kept.keys():
            odd = sorted(live.keys() ^ kept.keys())[:3]
            raise LayoutError(
                f"the model's tensors are not those of the snapshot: {', '.join(odd)} …; another model or layout"
            )
        for name, tensor in live.items():
            _fill(name, tensor, kept[name])


def _inner_optimizers(thing: Any) -> list[Any]:
    """Megatron's wrappers down to what holds a torch optimizer: a ChainedOptimizer's parts, or the wrapper itself, or a stub."""
    if hasattr(thing, "chained_optimizers"):
        return [inner for part in thing.chained_optimizers for inner in _inner_optimizers(part)]
    holds = isinstance(getattr(thing, "optimizer", None), torch.optim.Optimizer) and hasattr(thing, "param_groups")
    return [thing] if holds or getattr(thing, "is_stub_optimizer", False) else []


class Optimizers:
    """Any torch optimizer, or Megatron's (chained, mixed precision, distributed): its state by parameter, its own fp32 copies of the
    parameters where they are not views of the model's, the scalars of its groups, and the loss scaler."""

    def __init__(self, thing: Any) -> None:
        self.wrappers = [thing] if isinstance(thing, torch.optim.Optimizer) else _inner_optimizers(thing)

    def parts(self) -> Iterable[tuple[str, Any, torch.optim.Optimizer]]:
        """Name, wrapper (or the optimizer itself), torch optimizer; a stub (a rank with no parameters) has none."""
        for index, wrapper in enumerate(self.wrappers):
            inner = wrapper if isinstance(wrapper, torch.optim.Optimizer) else wrapper.optimizer
            if inner is not None:
                yield str(index), wrapper, inner

    def collect(self) -> Nested:
        return {name: self._collect(wrapper, inner) for name, wrapper, inner in self.parts()}

    def _collect(self, wrapper: Any, inner: torch.optim.Optimizer) -> Nested:
        groups = [{k: v for k, v in group.items() if k != "params"} for group in inner.param_groups]
        kept: Nested = {"groups": [_plain(group) for group in groups], "state": {}, "main": {}}
        for key, parameter in _parameters(inner):
            kept["state"][key] = {
                k: v.detach() if torch.is_tensor(v) else v for k, v in inner.state.get(parameter, {}).items()
            }
            if wrapper is not inner:
                kept["main"][key] = parameter.detach()
        scaler = getattr(wrapper, "grad_scaler", None)
        if scaler is not None:
            kept["scaler"] = scaler.state_dict()
        return kept

    def restore(self, kept: Nested) -> None:
        for name, wrapper, inner in self.parts():
            if name not in kept or len(kept[name]["groups"]) != len(inner.param_groups):
                raise LayoutError(
                    "the optimizer's parameter groups are not those of the snapshot; another model or optimizer"
                )
            self._restore(wrapper, inner, kept[name])

    def _restore(self, wrapper: Any, inner: torch.optim.Optimizer, kept: Nested) -> None:
        for group, values in zip(inner.param_groups, kept["groups"], strict=True):
            for key, value in values.items():
                if torch.is_tensor(group.get(key)):
                    _fill(f"group {key}", group[key], value)
                else:
                    group[key] = value.clone() if torch.is_tensor(value) else value
        for key, parameter in _parameters(inner):
            _fill_state(f"optimizer {key}", inner, parameter, kept["state"][key])
            if key in kept["main"]:
                _fill(f"optimizer {key}", parameter.detach(), kept["main"][key])
        if "scaler" in kept:
            wrapper.grad_scaler.load_state_dict(kept["scaler"])


def _parameters(inner: torch.optim.Optimizer) -> Iterable[tuple[str, torch.Tensor]]:
    """Parameters by place: group.position. The same layout gives the same places."""
    for g, group in enumerate(inner.param_groups):
        for p, parameter in enumerate(group["params"]):
            yield f"{g}.{p}", parameter


def _fill_state(where: str, inner: torch.optim.Optimizer, parameter: torch.Tensor, kept: Mapping[str, Any]) -> None:
    """Fill the state of one parameter; make what a fresh optimizer does not have yet, and drop what the snapshot does not have."""
    state = inner.state[parameter]
    for key in set(state) - set(kept):
        del state[key]
    for key, value in kept.items():
        if not torch.is_tensor(value):
            state[key] = value
        elif torch.is_tensor(state.get(key)):
            _fill(f"{where} {key}", state[key], value)
        else:  # moments live with their parameter; torch keeps `step`, a scalar, on the CPU unless it is fused or capturable
            here = any(g.get("fused") or g.get("capturable") for g in inner.param_groups) or value.dim() > 0
            state[key] = value.clone().to(parameter.device) if here else value.clone()
    if not state:
        inner.state.pop(parameter, None)


class Stateful:
    """Whatever has `state_dict` and `load_state_dict`: schedulers, data loaders."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def collect(self) -> Nested:
        return dict(self.thing.state_dict())

    def restore(self, kept: Nested) -> None:
        self.thing.load_state_dict({k: v.clone() if torch.is_tensor(v) else v for k, v in kept.items()})


class Values:
    """A mapping of plain values, or the attributes of an object, filled in place."""

    def __init__(self, mapping: MutableMapping[str, Any], names: Sequence[str] | None = None) -> None:
        self.mapping = mapping
        self.names = names

    def collect(self) -> Nested:
        return _plain({k: v for k, v in self.mapping.items() if self.names is None or k in self.names})

    def restore(self, kept: Nested) -> None:
        for key, value in kept.items():
            self.mapping[key] = value.clone() if torch.is_tensor(value) else value


def _plain(values: Mapping[str, Any]) -> Nested:
    """Without what a snapshot cannot hold (functions, modules): such things are the script's to build again."""
    return {key: value for key, value in values.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(_is_plain(v) for v in value)
    if type(value) is dict:
        return all(type(k) in (str, int) and _is_plain(v) for k, v in value.items())
    return value is None or type(value) in (bool, int, float, str, bytes) or torch.is_tensor(value)


class Randomness:
    """Every generator of this rank: python, numpy, torch on CPU and device, and Megatron's tracker with its model-, expert- and
    data-parallel streams. Megatron's own checkpoint keeps data-parallel rank 0's only."""

    def __init__(self, kinds: Iterable[str]) -> None:
        """kinds: device types of the model's tensors."""
        self.kinds = tuple(kinds)

    def collect(self) -> Nested:
        kept: Nested = {
            "python": random.getstate(),
            "torch": torch.get_rng_state(),
            "device": device.rng_states(self.kinds),
            "tracker": {name: _state_of(stream) for name, stream in _tracker_states().items()},
        }
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            kept["numpy"] = numpy.random.get_state()
        return kept

    def restore(self, kept: Nested) -> None:
        random.setstate(kept["python"])
        torch.set_rng_state(kept["torch"].clone())
        device.set_rng_states({kind: state.clone() for kind, state in kept["device"].items()})
        numpy = sys.modules.get("numpy")
        if numpy is not None and "numpy" in kept:
            numpy.random.set_state(kept["numpy"])
        live = _tracker_states()
        if live:
            states: dict[str, Any] = {}
            for name, state in kept["tracker"].items():
                states[name] = live[name] if isinstance(live.get(name), torch.Generator) else state.clone()
                if isinstance(states[name], torch.Generator):
                    states[name].set_state(state.clone())
            _tracker().set_states(states)


def _tracker() -> Any:
    random_module = sys.modules.get("megatron.core.tensor_parallel.random")
    return None if random_module is None else random_module.get_cuda_rng_tracker()


def _tracker_states() -> dict[str, Any]:
    tracker = _tracker()
    return dict(tracker.get_states()) if tracker is not None and tracker.is_initialized() else {}


def _state_of(stream: Any) -> torch.Tensor:
    return stream.get_state() if isinstance(stream, torch.Generator) else stream
