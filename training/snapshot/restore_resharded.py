"""Restore a state that was saved in another parallel layout into this layout's live tensors.

Tensors are matched by their positions in global tensors, and the values of parameter groups by the parameters in them. Values that are
equal on all ranks (counters, schedulers, a model without known positions) come from rank 0. Random generators can't be restored in another
layout: they keep the script's seeds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import cast

import torch
from msgspec.structs import replace

from ...checkpoint.backend.place import Place
from ...checkpoint.durable.load_resharded import Saved, Wanted, word
from ...checkpoint.format.pytree import unflatten
from ...checkpoint.format.pytree_walk import flatten
from ...checkpoint.format.sharding import Part
from ..attach.rank_stderr import say
from ..state.agreed_values import agreed, refused
from ..state.modules.module_source import ATTRIBUTES, EXTRA
from ..state.optimizers.hybrid_optimizer import stepped_copy
from ..state.optimizers.optimizer_shards import before_gather, owned_parts, state_parts
from ..state.optimizers.optimizers import Optimizers, parameters_of
from ..state.sharding import model_parts, places_of
from ..state.sources import Modules, Preparing, Source, put_back
from ..state.tensors.in_place import local
from . import replicated_values

Parts = dict[str, list[Part]]


def parts_of(sources: Mapping[str, Source]) -> Parts:
    """Return the positions of all live tensors, by their names in a snapshot. The result is empty if a model does not give them."""
    try:
        return _parts_of(sources)
    except Exception as error:  # third-party code, which may not know these models
        say(
            f"the positions of this model's tensors in global tensors are not known ({type(error).__name__}: {error}). Its "
            "snapshots can be restored only in the same parallel layout"
        )
        return {}


def _parts_of(sources: Mapping[str, Source]) -> Parts:
    found: Parts = {}
    divided = before_gather(source for source in sources.values() if isinstance(source, Optimizers))
    for name, source in sources.items():
        if isinstance(source, Modules):
            held = model_parts(source.chunks)
            if source.gathered:
                held |= {key: divided(each, held[key]) for key, each in source.named()[0].items() if key in held}
            found |= {f"{name}/{key}": _prefixed(name, each) for key, each in held.items()}
    for name, source in sources.items():
        if isinstance(source, Optimizers) and source.by_parameter:
            owned = _owned(source, sources)
            for index, wrapper, inner in source.parts():
                for key, parameter in parameters_of(inner):
                    tensors = {k: local(v) for k, v in inner.state.get(parameter, {}).items() if torch.is_tensor(v)}
                    for state, tensor in tensors.items():
                        alike = tensor.shape == local(parameter).shape and state != "step"
                        if alike or tensor.numel() == 1:
                            parts = state_parts(name, state, owned[index, key], alike=alike)
                            found[f"{name}/{index}/state/{key}/{state}"] = parts
                    if wrapper is not inner:
                        found[f"{name}/{index}/main/{key}"] = state_parts(name, "main", owned[index, key], alike=True)
    return found


def trained_of(sources: Mapping[str, Source]) -> set[str]:
    """Return the names in a snapshot of the parameters that optimizers contain directly. (Megatron's may contain shards instead.)"""
    optimizers = [source for source in sources.values() if isinstance(source, Optimizers)]
    listed = {id(each) for source in optimizers for *_, inner in source.parts() for _, each in parameters_of(inner)}
    models = (source.known_as(name) for name, source in sources.items() if isinstance(source, Modules))
    return {name for named in models for name, parameter in named.items() if id(parameter) in listed}


def _owned(source: Optimizers, sources: Mapping[str, Source]) -> dict[tuple[str, str], list[Part]]:
    """Return, for each of the optimizer's own parameters, the parts (boxes in a global tensor) of the model's parameter to which it
    belongs."""
    places: dict[int, list[Part]] = {}
    for name, model in sources.items():
        if isinstance(model, Modules):
            for chunk in model.chunks:
                places |= {key: _prefixed(name, parts) for key, parts in places_of(chunk).items()}
    return owned_parts(source, places)


def _prefixed(name: str, parts: Sequence[Part]) -> list[Part]:
    return [replace(part, name=f"{name}/{part.name}") for part in parts]


def restore_elsewhere(
    snapshot: Place, sources: Mapping[str, Source], alone: Collection[str], optional: Collection[str]
) -> None:
    """Fill `sources` with the state in `snapshot`, saved in any layout. alone: names of sources that stay unchanged. optional: names of
    sources that the snapshot may lack.

    Raises LayoutError, after only tensors have changed, if the snapshot lacks a part of the state. Raises SnapshotError, MachineError or
    OSError as `load.open_rank` does.
    """
    saved = Saved(snapshot)
    try:
        placed = {name for name, source in sources.items() if _has_places(name, source, sources, saved)}
    except ValueError as error:
        raise refused(saved, f"the position of a tensor is not known ({error})") from error
    models = {name: source for name, source in sources.items() if name in placed and isinstance(source, Modules)}
    replicated_values.refuse_or_tell_of_copies(saved, models, placed)
    kept = replicated_values.shared(saved, sources.keys() - placed - {*alone}, optional)
    described = saved.described[0]
    beside = {name: replicated_values.beside_tensors(saved, name, model) for name, model in models.items()}
    for name, source in sorted(sources.items(), key=lambda each: isinstance(each[1], Optimizers)):
        if name in beside:
            models[name].follow(beside[name])
        elif name in placed:
            for index in described.get(name, {}):
                agreed(saved, name, index, "members")
            cast(Optimizers, source).follow(described.get(name, {}))
            _make_states(name, cast(Optimizers, source), sources, saved)
        elif name in kept and isinstance(source, Preparing):
            source.prepare(described[name])
    state = {name: sources[name].collect() for name in placed}
    skeleton, leaves = flatten(state, torch.is_tensor)
    parts = _parts_of(sources)
    buffers = {
        name: torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu") for name, leaf in leaves if parts.get(name)
    }
    wanted = []
    for name, buffer in buffers.items():
        dtype = str(buffer.dtype).removeprefix("torch.")
        memory = buffer.reshape(-1).view(torch.uint8).numpy().view(word(dtype))
        wanted.append(Wanted(name, dtype, parts[name], memory))
    saved.fill(wanted)
    kept |= unflatten(skeleton, dict(leaves) | buffers)
    for name in placed:
        if name in beside:
            kept[name] |= replicated_values.loose_buffers(saved, name, models[name])
            attributes = replicated_values.attributes(saved, name, models[name])
            kept[name] |= {EXTRA: beside[name][EXTRA], ATTRIBUTES: attributes}
        else:
            replicated_values.by_parameter(saved, name, _owned(cast(Optimizers, sources[name]), sources), kept[name])
    put_back(sources, kept)
    replicated_values.tell_of_sums(saved)


def _has_places(name: str, source: Source, sources: Mapping[str, Source], saved: Saved) -> bool:
    """Whether the tensors of a model, or of its optimizer, have known positions here and in the snapshot. Tensors of a plain module on
    several ranks have none. Raises LayoutError if only some parameters have none, because these would keep the script's initial values."""
    if isinstance(source, Modules):
        placed = model_parts(source.chunks)
        here = {key: placed.get(key, []) for key in source.tensors() if key not in source.buffers}
        held = [p for manifest in saved.manifests for p in manifest.table.pieces if p.name.startswith(f"{name}/")]
        there = not held or any(piece.parts for piece in held)
    elif isinstance(source, Optimizers) and source.by_parameter:
        here = {f"{index}/{key}": parts for (index, key), parts in _owned(source, sources).items()}
        there = replicated_values.has_places(saved, name)
    else:
        return False
    lost = [key for key, parts in here.items() if not parts]
    if there and 0 < len(lost) < len(here):
        raise refused(saved, f"the position of {lost[0]} of {name!r} is not known")
    return there and not lost


def _make_states(name: str, source: Optimizers, sources: Mapping[str, Source], saved: Saved) -> None:
    """Create the states of parameters that are in the snapshot but not yet in a fresh optimizer."""
    owned = _owned(source, sources)
    states = {key.split("/")[1] for key in saved.boxes if key.startswith(f"{name}/")} - {"main"}
    for index, _, inner in source.parts():
        for key, parameter in parameters_of(inner):
            for state in sorted(states):
                for part in owned[index, key][:1]:
                    box = next(iter(saved.boxes.get(f"{name}/{state}/{part.name}", ())), None)
                    if box is None or state in inner.state[parameter]:
                        continue
                    piece = saved.piece(box)
                    alike = box.part.shape == part.shape
                    dtype = getattr(torch, piece.dtype)
                    inner.state[parameter][state] = (
                        torch.zeros_like(stepped_copy(inner, parameter).detach(), dtype=dtype)
                        if alike
                        else torch.zeros(piece.shape if prod(piece.shape) == 1 else (), dtype=dtype, device="cpu")
                    )
