"""The random number generators of a rank, as a source of state; and those that a data loader has for itself."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
import torch

from . import device
from .kinds import packed, unpacked
from .live import Nested
from .state import Source


class Randomness:
    """Every generator of this rank: python, numpy, torch on CPU and device, and Megatron's tracker with its model-, expert- and
    data-parallel streams. Megatron's own checkpoint keeps data-parallel rank 0's only."""

    def __init__(self, kinds: Iterable[str]) -> None:
        """kinds: device types of the model's tensors."""
        self.kinds = tuple(kinds)

    def collect(self) -> Nested:
        return {
            **collect_host(),
            "device": device.rng_states(self.kinds),
            "tracker": {name: _state_of(stream) for name, stream in _tracker_states().items()},
        }

    def restore(self, kept: Nested) -> None:
        restore_host(kept)
        device.set_rng_states(kept["device"])
        live = _tracker_states()
        if live:
            states: dict[str, Any] = {}
            for name, state in kept["tracker"].items():
                states[name] = live[name] if isinstance(live.get(name), torch.Generator) else state
                if isinstance(states[name], torch.Generator):
                    states[name].set_state(state)
            _tracker().set_states(states)


class Alone:
    """What is a rank's alone, as a source of state: its generators, and where there are some, those of its data."""

    def __init__(self, generators: Randomness) -> None:
        self.generators = generators
        self.data: Source | None = None

    def collect(self) -> Nested:
        kept = self.generators.collect()
        return kept if self.data is None else {**kept, "data": self.data.collect()}

    def restore(self, kept: Nested) -> None:
        self.generators.restore(kept)
        if self.data is not None and "data" in kept:
            self.data.restore(kept["data"])


def collect_host() -> dict[str, Any]:
    """The global generators of this process, but for those of devices."""
    kept = {"python": packed(random.getstate()), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    return kept if numpy is None else {**kept, "numpy": numpy.random.get_state()}


def restore_host(kept: Nested) -> None:
    random.setstate(unpacked(kept["python"]))
    torch.set_rng_state(kept["torch"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in kept:
        numpy.random.set_state(kept["numpy"])


Own: TypeAlias = torch.Generator | np.random.Generator | np.random.RandomState | random.Random


_PARTS = 256
"""So many objects are looked through for generators, in loaders and datasets that may hold everything."""


def own_generators(**holders: Any) -> dict[str, Own]:
    """The generators in `holders` and in what they consist of (datasets of datasets, transforms), each once, by names that are the same in
    each life."""
    found: dict[str, Own] = {}
    seen: set[int] = set()
    todo = deque(holders.items())
    while todo and len(seen) < _PARTS:
        name, thing = todo.popleft()
        if id(thing) in seen or isinstance(thing, (type, ModuleType, torch.Tensor, torch.nn.Module)):
            continue
        seen.add(id(thing))
        if isinstance(thing, Own):
            found[name] = thing
        elif isinstance(thing, (list, tuple)) and len(thing) <= _PARTS:
            todo += ((f"{name}.{at}", part) for at, part in enumerate(thing) if _has_parts(part))
        elif isinstance(thing, dict) and len(thing) <= _PARTS:
            todo += ((f"{name}.{at}", part) for at, part in thing.items() if _has_parts(part))
        else:
            parts = vars(thing).items() if hasattr(thing, "__dict__") else ()
            todo += ((f"{name}.{at}", part) for at, part in sorted(parts) if _has_parts(part))
    return found


def _has_parts(thing: Any) -> bool:
    return isinstance(thing, (list, tuple, dict, Own)) or hasattr(thing, "__dict__")


def collect_own(generators: Mapping[str, Own]) -> dict[str, Any]:
    return {name: _state(each) for name, each in generators.items()}


def _state(generator: Own) -> Any:
    match generator:
        case torch.Generator() | np.random.RandomState():
            return generator.get_state()
        case np.random.Generator():
            return generator.bit_generator.state
        case random.Random():
            return packed(generator.getstate())


def restore_own(generators: Mapping[str, Own], kept: Mapping[str, Any]) -> None:
    for name in generators.keys() & kept.keys():
        generator = generators[name]
        match generator:
            case torch.Generator() | np.random.RandomState():
                generator.set_state(kept[name])
            case np.random.Generator():
                generator.bit_generator.state = kept[name]
            case random.Random():
                generator.setstate(unpacked(kept[name]))


def _tracker() -> Any:
    random_module = sys.modules.get("megatron.core.tensor_parallel.random")
    return None if random_module is None else random_module.get_cuda_rng_tracker()


def _tracker_states() -> dict[str, Any]:
    tracker = _tracker()
    return dict(tracker.get_states()) if tracker is not None and tracker.is_initialized() else {}


def _state_of(stream: Any) -> torch.Tensor:
    return stream.get_state() if isinstance(stream, torch.Generator) else stream
