"""A state that was saved in another parallel layout, put into this one's live tensors.

Tensors go by their places in global ones; the values of parameter groups by the parameters that are in them; and what is the same on all
ranks (counters, schedulers, a model that says nothing of places) comes from rank 0. Generators have no place in another layout: they stay
as the script has seeded them.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from ..checkpoint.contents import LAYOUT_KEYS, group_values, loose_groups
from ..checkpoint.geometry import Part
from ..checkpoint.manifest import RankManifest
from ..checkpoint.reshard import Saved, Wanted, word
from ..checkpoint.stores import Place
from ..checkpoint.tensors import Piece
from ..checkpoint.tree import unflatten
from ..checkpoint.walk import flatten
from ..resilience.errors import LayoutError
from .live import local
from .optimizer_places import owned_parts, state_parts
from .optimizers import Optimizers, parameters_of
from .places import model_parts, places_of
from .state import Modules, Preparing, Source

_GROUP_KINDS = ("wd_mult", "lr_mult", "pre_wd_mult", "pre_lr_mult", "is_decoupled_lr")
"""What tells Megatron's groups apart (megatron.core.optimizer, `param_group_identifier_keys`; NeMo's spelling too), but for the layout."""

Parts = dict[str, list[Part]]


def parts_of(sources: Mapping[str, Source]) -> Parts:
    """The places of all live tensors, by their names in a snapshot; none where a model does not say."""
    try:
        return _parts_of(sources)
    except Exception as error:  # other people's code, on models that it may not know
        print(
            f"mt-resilient: where this model's tensors lie in global ones is not known ({type(error).__name__}: {error}); its "
            "snapshots can be restored in the same parallel layout only",
            file=sys.stderr,
        )
        return {}


def _parts_of(sources: Mapping[str, Source]) -> Parts:
    found: Parts = {}
    for name, source in sources.items():
        if isinstance(source, Modules):
            found |= {f"{name}/{key}": _prefixed(name, parts) for key, parts in model_parts(source.chunks).items()}
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


def _owned(source: Optimizers, sources: Mapping[str, Source]) -> dict[tuple[str, str], list[Part]]:
    """Parts of the parameter that each of the optimizer's own ones belongs to."""
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
    """Fill `sources` with the state in `snapshot`, whatever layout it was saved in. alone: names of sources to leave as they are; optional:
    of those that may not be in it.

    Raises LayoutError, with nothing changed but tensors, when the snapshot does not hold all of it; SnapshotError, MachineError or OSError
    as `restore.open_rank` does.
    """
    saved = Saved(snapshot)
    placed = {name for name, source in sources.items() if _has_places(name, source, sources, saved)}
    shared = _shared(saved, sources.keys() - placed - {*alone}, optional)
    described = saved.manifests[0].table.described()
    for name in sorted(placed, key=lambda name: isinstance(sources[name], Optimizers)):
        cast(Modules | Optimizers, sources[name]).follow(described.get(name, {}))
    for name, source in sources.items():
        if name in placed and isinstance(source, Optimizers):
            _make_states(name, source, sources, saved)
        elif name in shared and isinstance(source, Preparing):
            source.prepare(described[name])
    state = {name: sources[name].collect() for name in placed}
    skeleton, leaves = flatten(state, torch.is_tensor)
    parts = _parts_of(sources)
    buffers = {name: torch.empty(leaf.shape, dtype=leaf.dtype) for name, leaf in leaves if parts.get(name)}
    wanted = []
    for name, buffer in buffers.items():
        dtype = str(buffer.dtype).removeprefix("torch.")
        memory = buffer.reshape(-1).view(torch.uint8).numpy().view(word(dtype))
        wanted.append(Wanted(name, dtype, parts[name], memory))
    saved.fill(wanted)
    kept = unflatten(skeleton, dict(leaves) | buffers)
    for name, source in sources.items():
        if name in kept and isinstance(source, Optimizers):
            _group_values(name, source, sources, saved, kept[name])
        if name in kept:
            source.restore(kept[name])
        elif name in shared:
            source.restore(shared[name])


def _has_places(name: str, source: Source, sources: Mapping[str, Source], saved: Saved) -> bool:
    """Whether the tensors of a model, or of its optimizer, lie in global ones, here and in the snapshot. Of a plain module among several
    ranks nobody says it. Raises LayoutError where that is so of some parameters: they would stay as the script has made them."""
    if isinstance(source, Modules):
        placed = model_parts(source.chunks)
        names = [key for key in source.tensors() if key not in source.buffers]
        lost = [key for key in names if not placed[key]]
    elif isinstance(source, Optimizers):
        if not source.by_parameter:
            return False
        owned = _owned(source, sources)
        names = [f"{index}/{key}" for index, key in owned]
        lost = [f"{index}/{key}" for (index, key), parts in owned.items() if not parts]
    else:
        return False
    held = [p for manifest in saved.manifests for p in manifest.table.pieces if p.name.startswith(f"{name}/")]
    there = not held or any(piece.parts for piece in held)
    if isinstance(source, Optimizers) and any("/state/" in piece.name and not piece.parts for piece in held):
        return False  # of no parameter's shape: what an optimizer has factored, say
    if there and 0 < len(lost) < len(names):
        raise LayoutError(
            f"{saved.snapshot} cannot be taken to another parallel layout: where {lost[0]} of {name!r} lies in the whole is not known"
        )
    return there and not lost


def _shared(saved: Saved, names: Collection[str], optional: Collection[str]) -> dict[str, Any]:
    """The sources `names`, which have to be the same on all ranks."""
    found = {}
    for name in sorted(names):
        kept = [_one(manifest, name) for manifest in saved.manifests]
        if name in optional and not any(kept):
            continue
        if any(other != kept[0] for other in kept) or kept[0] is None:
            why = "is not in it" if kept[0] is None else "differs from rank to rank"
            raise LayoutError(
                f"{saved.snapshot} cannot be taken to another parallel layout: the state of {name!r} {why}"
            )
        pieces = [piece for piece in saved.manifests[0].table.pieces if piece.name.startswith(f"{name}/")]
        tensors = {piece.name: _tensor(piece, saved.content(0, piece)) for piece in pieces}
        found[name] = unflatten(kept[0][0], tensors)
    return found


def _tensor(piece: Piece, content: NDArray[np.uint8]) -> torch.Tensor:
    dtype = getattr(torch, piece.dtype)
    if not content.size:  # torch lets nobody view that as another type
        return torch.empty(piece.shape, dtype=dtype)
    return torch.from_numpy(content).view(dtype).view(piece.shape)


def _one(manifest: RankManifest, name: str) -> tuple[Any, list[str]] | None:
    """One source's skeleton, and the fingerprints of its tensors."""
    table = manifest.table
    skeleton = next((node for key, node in table.skeleton.get("dict", ()) if key == name), None)
    prints = [
        each
        for piece, each in zip(table.pieces, manifest.fingerprints, strict=True)
        if piece.name.startswith(f"{name}/")
    ]
    return None if skeleton is None else (skeleton, prints)


def _make_states(name: str, source: Optimizers, sources: Mapping[str, Source], saved: Saved) -> None:
    """Make the state of each parameter that the snapshot has and a fresh optimizer does not."""
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
                        torch.zeros_like(parameter.detach(), dtype=dtype) if alike else torch.zeros((), dtype=dtype)
                    )


def _group_values(name: str, source: Optimizers, sources: Mapping[str, Source], saved: Saved, kept: Any) -> None:
    """Into the groups of `kept`, the values of saved groups that have a parameter in common with them; or, where nobody has saved which
    parameters a group has (Megatron's own checkpoints), of one that is of the same kind."""
    values, loose = group_values(saved, name), loose_groups(saved, name)
    for (index, key), parts in _owned(source, sources).items():
        group = kept[index]["groups"][int(key.split(".")[0])]
        for part in parts[:1]:
            found = values.get(part.name) or _alike(group, loose)
            group.update({k: v for k, v in found.items() if k not in LAYOUT_KEYS and not isinstance(v, Piece)})


def _alike(group: Mapping[str, Any], saved: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """As Megatron finds a group again: by its multipliers. One that is of no kind is the only one."""
    kind = {key: group[key] for key in _GROUP_KINDS if key in group}
    same = [each for each in saved if kind.items() <= {key: each.get(key) for key in _GROUP_KINDS}.items()]
    same.sort(key=lambda each: any(each.get(key) != group.get(key) for key in LAYOUT_KEYS))
    return same[0] if same and (kind or len(same) == 1) else {}
