"""The random number generators of a rank, as a source (an object that the Session saves)."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from .. import device
from .sources import Modules, Optimizers, Source, put_back
from .tensors.in_place import Nested
from .values.type_adapters import packed, unpacked


class Randomness:
    """All random generators of this rank: python, numpy, torch on CPU and device, and Megatron's tracker with its model-, expert- and
    data-parallel streams. Megatron's own checkpoint keeps only the generators of data-parallel rank 0. Before torch 2.9, DTensors draw
    from a stream of their own, once their first random operation has created it."""

    def __init__(self, where: Sequence[torch.device]) -> None:
        """where: the devices whose generators the training may use (`generator_devices`), without the CPU."""
        self.where = where

    def collect(self) -> Nested:
        return {
            **collect_host(),
            "device": device.rng_states(self.where),
            "tracker": {
                n: s.get_state() if isinstance(s, torch.Generator) else s for n, s in _tracker_states().items()
            },
            **(
                {"dtensor": {name: state.clone() for name, state in states.items()}}
                if (states := _dtensor_states())
                else {}
            ),
        }

    def restore(self, kept: Nested) -> None:
        restore_host(kept)
        device.set_rng_states(kept["device"], self.where)
        live = _tracker_states()
        if live:
            states: dict[str, Any] = {}
            for name, state in kept["tracker"].items():
                states[name] = live[name] if isinstance(live.get(name), torch.Generator) else state
                if isinstance(states[name], torch.Generator):
                    states[name].set_state(state)
            _tracker().set_states(states)
        streams = _dtensor_states()
        for name in streams.keys() & kept.get("dtensor", {}).keys():
            streams[name] = kept["dtensor"][name].to(streams[name].device, copy=True)


def generator_devices(sources: Iterable[Source], models: Sequence[torch.device]) -> list[torch.device]:
    """Return the devices whose generators the training may use: those of the `models`, those of the optimizers' parameters, and those on
    which DTensors compute even if their parts are on the CPU."""
    sources = list(sources)
    stepped = [each for source in sources if isinstance(source, Optimizers) for each in source.stepped()]
    own = [each for source in sources if isinstance(source, Modules) for each in source.named()[0].values()]
    meshes = {str(mesh.device_type) for each in (*stepped, *own) if (mesh := getattr(each, "device_mesh", None))}
    here = [torch.device(kind, device.module(kind).current_device()) for kind in sorted(meshes - {"cpu", "meta"})]
    return sorted({*models, *device.devices(stepped), *here}, key=str)


_OTHERS = ("data", "gradients", "loaders", "counts", "variables")


class Alone:
    """The state that belongs to one rank alone, as a source. The source contains the rank's random generators and, if they exist, the
    states of the data, the gradients, the loaders with started workers, the step counts, and the generators in the script's variables."""

    def __init__(self, generators: Randomness) -> None:
        self.generators = generators
        self.data: Source | None = None
        self.gradients: Source | None = None
        self.loaders: Source | None = None
        self.counts: Source | None = None
        self.variables: Source | None = None

    def collect(self) -> Nested:
        return self.generators.collect() | {name: source.collect() for name, source in self._others().items()}

    def restore(self, kept: Nested) -> None:
        self.generators.restore(kept)
        put_back(self._others(), kept)

    def _others(self) -> dict[str, Source]:
        return {name: source for name in _OTHERS if (source := getattr(self, name)) is not None}


def collect_host() -> dict[str, Any]:
    """Return the states of this process's global generators, without those of devices."""
    kept = {"python": packed(random.getstate()), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    return kept if numpy is None else {**kept, "numpy": numpy.random.get_state()}


def restore_host(kept: Nested) -> None:
    random.setstate(unpacked(kept["python"]))
    torch.set_rng_state(kept["torch"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in kept:
        numpy.random.set_state(kept["numpy"])


def _tracker() -> Any:
    random_module = sys.modules.get("megatron.core.tensor_parallel.random")
    return None if random_module is None else random_module.get_cuda_rng_tracker()


def _tracker_states() -> dict[str, Any]:
    tracker = _tracker()
    return dict(tracker.get_states()) if tracker is not None and tracker.is_initialized() else {}


def _dtensor_states() -> dict[str, torch.Tensor]:
    """Return the live dict of the streams from which DTensors draw; empty if they draw from torch's generators, or have not drawn yet."""
    tracker = getattr(sys.modules.get("torch.distributed.tensor._random"), "_rng_tracker", None)
    return getattr(tracker, "rng_states", {})
