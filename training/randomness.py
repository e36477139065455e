"""The random number generators of a rank, as a source of state; and those that a data loader has for itself."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from . import device
from .live import Nested


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


def collect_host() -> dict[str, Any]:
    """The global generators of this process, but for those of devices."""
    kept = {"python": _packed(random.getstate()), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    return kept if numpy is None else {**kept, "numpy": numpy.random.get_state()}


def restore_host(kept: Nested) -> None:
    random.setstate(_unpacked(kept["python"]))
    torch.set_rng_state(kept["torch"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in kept:
        numpy.random.set_state(kept["numpy"])


Own: TypeAlias = torch.Generator | np.random.Generator | np.random.RandomState | random.Random


def own_generators(*holders: Any) -> list[Own]:
    """The generators among the attributes of `holders`, each once, in an order that is the same in each life."""
    found: dict[int, Own] = {}
    for holder in holders:
        attributes = vars(holder) if hasattr(holder, "__dict__") else {}
        found |= {id(each): each for _, each in sorted(attributes.items()) if isinstance(each, Own)}
    return list(found.values())


def collect_own(generators: Sequence[Own]) -> list[Any]:
    kept: list[Any] = []
    for each in generators:
        match each:
            case torch.Generator() | np.random.RandomState():
                kept.append(each.get_state())
            case np.random.Generator():
                kept.append(each.bit_generator.state)
            case random.Random():
                kept.append(_packed(each.getstate()))
    return kept


def restore_own(generators: Sequence[Own], kept: Sequence[Any]) -> None:
    for each, state in zip(generators, kept, strict=False):
        match each:
            case torch.Generator() | np.random.RandomState():
                each.set_state(state)
            case np.random.Generator():
                each.bit_generator.state = state
            case random.Random():
                each.setstate(_unpacked(state))


def _unpacked(packed: Sequence[Any]) -> tuple[Any, ...]:
    version, words, gauss = packed
    return version, tuple(words.tolist()), gauss


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
