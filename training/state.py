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
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from ..checkpoint.tensors import Piece
from ..resilience.errors import LayoutError
from . import device

Nested = dict[str, Any]


class Source(Protocol):
    def collect(self) -> Nested:
        """Live tensors and plain values, nested; the caller copies the tensors before anything changes them."""
        ...

    def restore(self, kept: Nested) -> None:
        """Put back what `collect` gave. The tensors in `kept` are new ones, the source's to keep."""
        ...


@runtime_checkable
class Preparing(Source, Protocol):
    """A source whose tensors are filled where they are: in `kept`, one that `collect` gives and that fits is that very tensor, filled."""

    def prepare(self, described: Nested) -> None:
        """Before anything is touched: `described` is what `restore` will get, with a `Piece` for each tensor. Make room for what a fresh
        start does not have yet. Raises LayoutError where it cannot fit."""
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


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What of it lies here: a DTensor's own part, anything else as it is."""
    held = tensor.detach() if tensor.requires_grad else tensor
    return held.to_local() if hasattr(held, "to_local") else held


def _fits(where: str, live: torch.Tensor, piece: Piece) -> None:
    if tuple(live.shape) != piece.shape or str(live.dtype) != f"torch.{piece.dtype}":
        raise LayoutError(
            f"{where}: the snapshot holds {piece.dtype} {piece.shape}, this run has "
            f"{str(live.dtype).removeprefix('torch.')} {tuple(live.shape)}; it was taken with another model or another parallel layout"
        )


def _put(live: torch.Tensor, kept: torch.Tensor) -> None:
    """`kept` into `live`, if it is not there already."""
    there = (
        live.data_ptr() == kept.data_ptr() != 0 and live.stride() == kept.stride()
    )  # 0: a subclass that hides its memory
    if not there:
        with torch.no_grad():
            live.copy_(kept)


class Modules:
    """Parameters and buffers, the non-persistent ones too, of one module or of the chunks of a pipeline stage."""

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        self.chunks = list(chunks)

    def tensors(self) -> dict[str, torch.Tensor]:
        named = (*self._named(torch.nn.Module.named_parameters), *self._named(torch.nn.Module.named_buffers))
        return {name: local(tensor) for name, tensor in named}

    def _named(
        self, what: Callable[[torch.nn.Module], Iterable[tuple[str, torch.Tensor]]]
    ) -> Iterable[tuple[str, torch.Tensor]]:
        for index, chunk in enumerate(self.chunks):
            prefix = f"chunk{index}." if len(self.chunks) > 1 else ""
            for name, tensor in what(chunk):
                yield prefix + name, tensor

    def parameters(self) -> list[torch.Tensor]:
        return [parameter for chunk in self.chunks for parameter in chunk.parameters()]

    def steady(self, collected: Nested) -> list[torch.Tensor]:
        """What in `collected` only an optimizer's step writes: parameters, unless they are gathered during the forward pass."""
        gathered = any(getattr(getattr(c, "ddp_config", None), "overlap_param_gather", False) for c in self.chunks)
        buffers = {name for name, _ in self._named(torch.nn.Module.named_buffers)}
        return [] if gathered else [tensor for name, tensor in collected.items() if name not in buffers]

    def collect(self) -> Nested:
        return dict(self.tensors())

    def prepare(self, described: Nested) -> None:
        live = self.tensors()
        if live.keys() != described.keys():
            odd = sorted(live.keys() ^ described.keys())[:3]
            raise LayoutError(
                f"the model's tensors are not those of the snapshot: {', '.join(odd)} …; another model or layout"
            )
        for name, tensor in live.items():
            _fits(name, tensor, described[name])

    def restore(self, kept: Nested) -> None:
        for name, tensor in self.tensors().items():
            _put(tensor, kept[name])


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
        self.thing = thing
        self.wrappers = [thing] if isinstance(thing, torch.optim.Optimizer) else _inner_optimizers(thing)

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

    def collect(self) -> Nested:
        return {name: self._collect(wrapper, inner) for name, wrapper, inner in self.parts()}

    def _collect(self, wrapper: Any, inner: torch.optim.Optimizer) -> Nested:
        groups = [{k: v for k, v in group.items() if k != "params"} for group in inner.param_groups]
        kept: Nested = {"groups": [_plain(group) for group in groups], "state": {}, "main": {}}
        for key, parameter in parameters_of(inner):
            kept["state"][key] = {
                k: local(v) if torch.is_tensor(v) else v for k, v in inner.state.get(parameter, {}).items()
            }
            if wrapper is not inner:
                kept["main"][key] = local(parameter)
        scaler = getattr(wrapper, "grad_scaler", None)
        if scaler is not None:
            kept["scaler"] = scaler.state_dict()
        return kept

    def prepare(self, described: Nested) -> None:
        for name, wrapper, inner in self.parts():
            if name not in described or len(described[name]["groups"]) != len(inner.param_groups):
                raise LayoutError(
                    "the optimizer's parameter groups are not those of the snapshot; another model or optimizer"
                )
            part = described[name]
            for key, parameter in parameters_of(inner):
                if key not in part["state"] or (wrapper is not inner and key not in part["main"]):
                    raise LayoutError(f"the snapshot's optimizer has no parameter {key}; another model or optimizer")
                if key in part["main"]:
                    _fits(f"optimizer {key}", local(parameter), part["main"][key])
                _make_room(f"optimizer {key}", inner, parameter, part["state"][key])

    def restore(self, kept: Nested) -> None:
        for name, wrapper, inner in self.parts():
            self._restore(wrapper, inner, kept[name])

    def _restore(self, wrapper: Any, inner: torch.optim.Optimizer, kept: Nested) -> None:
        for group, values in zip(inner.param_groups, kept["groups"], strict=True):
            _update(group, values)
        for key, parameter in parameters_of(inner):
            if kept["state"][key]:
                _update(inner.state[parameter], kept["state"][key])
            if key in kept["main"]:
                _put(local(parameter), kept["main"][key])
        if "scaler" in kept:
            wrapper.grad_scaler.load_state_dict(kept["scaler"])


def parameters_of(inner: torch.optim.Optimizer) -> Iterable[tuple[str, torch.Tensor]]:
    """Parameters by place: group.position. The same layout gives the same places."""
    for g, group in enumerate(inner.param_groups):
        for p, parameter in enumerate(group["params"]):
            yield f"{g}.{p}", parameter


def _make_room(where: str, inner: torch.optim.Optimizer, parameter: torch.Tensor, described: Mapping[str, Any]) -> None:
    """Bring the state of one parameter into the form `described`: drop what is not in it, make what a fresh optimizer does not have yet."""
    state = inner.state[parameter]
    for key in set(state) - set(described):
        del state[key]
    for key, piece in described.items():
        if not isinstance(piece, Piece):
            continue
        if torch.is_tensor(state.get(key)):
            _fits(f"{where} {key}", local(state[key]), piece)
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


def _update(live: MutableMapping[str, Any], kept: Mapping[str, Any]) -> None:
    """`kept` into `live`, tensors in place where there are some."""
    for key, value in kept.items():
        if torch.is_tensor(value) and torch.is_tensor(live.get(key)) and local(live[key]).shape == value.shape:
            _put(local(live[key]), value)
        else:
            live[key] = value


class Stateful:
    """Whatever has `state_dict` and `load_state_dict`: schedulers, data loaders."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def collect(self) -> Nested:
        return dict(self.thing.state_dict())

    def restore(self, kept: Nested) -> None:
        self.thing.load_state_dict(kept)


class Values:
    """A mapping of plain values, or the attributes of an object, filled in place."""

    def __init__(self, mapping: MutableMapping[str, Any], names: Sequence[str] | None = None) -> None:
        self.mapping = mapping
        self.names = names

    def collect(self) -> Nested:
        return _plain({k: v for k, v in self.mapping.items() if self.names is None or k in self.names})

    def restore(self, kept: Nested) -> None:
        _update(self.mapping, kept)


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
            "python": _packed(random.getstate()),
            "torch": torch.get_rng_state(),
            "device": device.rng_states(self.kinds),
            "tracker": {name: _state_of(stream) for name, stream in _tracker_states().items()},
        }
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            kept["numpy"] = numpy.random.get_state()
        return kept

    def restore(self, kept: Nested) -> None:
        version, words, gauss = kept["python"]
        random.setstate((version, tuple(words.tolist()), gauss))
        torch.set_rng_state(kept["torch"])
        device.set_rng_states(kept["device"])
        numpy = sys.modules.get("numpy")
        if numpy is not None and "numpy" in kept:
            numpy.random.set_state(kept["numpy"])
        live = _tracker_states()
        if live:
            states: dict[str, Any] = {}
            for name, state in kept["tracker"].items():
                states[name] = live[name] if isinstance(live.get(name), torch.Generator) else state
                if isinstance(states[name], torch.Generator):
                    states[name].set_state(state)
            _tracker().set_states(states)


def _packed(state: tuple[Any, ...]) -> tuple[int, np.ndarray[Any, Any], float | None]:
    """Python's 625 words as one array: a leaf is cheaper to look through than a tuple, and this is done at each step."""
    version, words, gauss = state
    return version, np.array(words, np.uint32), gauss


def _tracker() -> Any:
    random_module = sys.modules.get("megatron.core.tensor_parallel.random")
    return None if random_module is None else random_module.get_cuda_rng_tracker()


def _tracker_states() -> dict[str, Any]:
    tracker = _tracker()
    return dict(tracker.get_states()) if tracker is not None and tracker.is_initialized() else {}


def _state_of(stream: Any) -> torch.Tensor:
    return stream.get_state() if isinstance(stream, torch.Generator) else stream
